"""The native engine: gradients are summed in fp32, AdamW steps; its state is whole on every data rank, or a part of it on each.

With `engine.shard_optimizer` (Rajbhandari et al. 2020, ZeRO stage 1) a step moves as many bytes as without: gradients are
reduce-scattered while backward runs, each rank updates its part, and the parameters are gathered while the next forward runs.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from megacore.comm import all_reduce
from megacore.config import Config
from megacore.engine.gather import ParameterGatherer
from megacore.engine.optimizer import ALIGNMENT, FlatBuffer, fill_buffers
from megacore.engine.reduce import GradientReducer
from megacore.engine.stepper import Stepper
from megacore.mesh import SOLO, Mesh
from megacore.model.gpt import Stage
from megacore.tensor_parallel.shard import Box, piece_key


class NativeEngine(Stepper):
    """`Engine` over a stage's parameters (see `protocol`)."""

    def __init__(self, config: Config, stage: Stage, mesh: Mesh) -> None:
        self.module, self.mesh = stage, mesh
        self.sharded = config.engine.shard_optimizer and mesh.dp.size > 1
        tied = "embedding.weight" if mesh.tied is not None else None
        self.buffers = fill_buffers(stage, config.engine.bucket_mib, mesh.dp if self.sharded else SOLO, tied)
        self.reducer = GradientReducer(self.buffers, mesh.dp, mesh.tp)
        self.gatherer = ParameterGatherer(stage, self.buffers, mesh.dp) if self.sharded else None
        super().__init__(
            config,
            mesh.device,
            [master for buffer in self.buffers for master in buffer.masters],
            [gradients for buffer in self.buffers for gradients in buffer.own_gradients],
            decay=[buffer.decay for buffer in self.buffers for _ in buffer.ranges],
            row_weights=[weights for buffer in self.buffers for weights in self.row_weights(buffer)],
            over=mesh.world,
            copies=[values for buffer in self.buffers for values in buffer.own_values] if self.buffers[0].rounds else None,
        )

    def row_weights(self, buffer: FlatBuffer) -> list[Tensor]:
        """How much each row of a buffer's ranges counts in the gradient norm: of data ranks with whole gradients each its part, so that
        also a row that is wrong on one of them alone is noticed by all."""
        rows = buffer.rows_where(lambda slot: slot.shard.counted)
        if not self.sharded:
            rows = rows / self.mesh.dp.size
        return [rows[own.start // ALIGNMENT : own.stop // ALIGNMENT] for own in buffer.ranges]

    def backward(self, root: GradientEdge, gradient: Tensor, *, last: bool) -> None:
        """See `Engine`."""
        if last:
            self.reducer.arm()
        torch.autograd.backward([root], [gradient])

    def reduce_gradients(self) -> None:
        """See `Engine`."""
        self.reducer.finish()

    def reduce_tied(self) -> None:
        """See `Engine`."""
        assert self.mesh.tied is not None
        for buffer in self.buffers:
            if buffer.tied:
                for gradients in buffer.own_gradients:
                    all_reduce(gradients, self.mesh.tied)

    def gradients(self) -> dict[str, tuple[Tensor, Box]]:
        """See `Engine`."""
        return self._pieces("", [gradients for buffer in self.buffers for gradients in buffer.own_gradients])

    def behind_step(self) -> None:
        """See `Stepper`. AdamW itself rounded the masters into this rank's part of the parameters."""
        if self.gatherer is not None:
            self.gatherer.start()
        self.reducer.clear()

    def behind_loading(self) -> None:
        """See `Stepper`."""
        self.settle()
        for buffer in self.buffers:
            buffer.publish()
        if self.gatherer is not None:
            self.gatherer.start()

    def settle(self) -> None:
        """See `Engine`."""
        if self.gatherer is not None:
            self.gatherer.finish()

    def close(self) -> None:
        """See `Engine`."""
        super().close()
        self.reducer.close()

    def tensors(self) -> dict[str, tuple[Tensor, Box]]:
        """See `Engine`: for every parameter its master and both moments."""
        named = self._pieces("model/", [master for buffer in self.buffers for master in buffer.masters])
        return named | self._pieces("adam_m/", self.first) | self._pieces("adam_v/", self.second)

    def _pieces(self, kind: str, tensors: list[Tensor]) -> dict[str, tuple[Tensor, Box]]:
        """This rank's pieces of what `tensors` hold, one for each range of each buffer."""
        pieces: dict[str, tuple[Tensor, Box]] = {}
        held = iter(tensors)
        for buffer in self.buffers:
            for name, view, box in buffer.pieces([next(held) for _ in buffer.ranges]):
                # Data ranks with whole state have equal copies, of which the first is saved.
                counted = box.counted and (self.sharded or self.mesh.dp.rank == 0)
                pieces[piece_key(f"{kind}{name}", pieces)] = (view, replace(box, counted=counted))
        return pieces
