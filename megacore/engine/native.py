"""The native engine sums gradients in fp32. Every data rank has the whole optimizer state, or a part of it.

With `engine.shard_optimizer` (Rajbhandari et al. 2020, ZeRO stage 1) gradients are reduce-scattered while
backward runs, each rank updates its part, and the parameters are gathered while the next forward runs. A step
moves as many bytes as without.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from megacore.config import Config
from megacore.config.optim_groups import ParameterGroups
from megacore.config.schema import resolved
from megacore.distributed.collectives import all_reduce
from megacore.distributed.mesh import Mesh
from megacore.distributed.shard import Shard, TensorSlice, materialise, piece_key, shard_of
from megacore.engine.alignment import ALIGNMENT
from megacore.engine.flat_buffer import FlatBuffer, PartsOfBuffers, fill_buffers, travelling_unit
from megacore.engine.owners import Holders, Part, native_holders
from megacore.engine.param_all_gather import ParameterGatherer
from megacore.engine.reduce import GradientReducer
from megacore.engine.stepper import OptimizerStep
from megacore.model.stage import Stage
from megacore.tensor_parallel.gradient import WeightGradPart, finish_in_turn


class NativeEngine(OptimizerStep):
    """An `Engine` for the parameters of a rank's stages (see `protocol`)."""

    def __init__(self, config: Config, stages: Sequence[Stage], mesh: Mesh) -> None:
        self.modules, self.mesh, self.groups = stages, mesh, ParameterGroups(config.optim)
        narrow = torch.bfloat16 if config.engine.reduce_dtype == "bf16" else None
        bucket_mib, self.sharded = resolved(config.engine.bucket_mib), config.engine.shard_optimizer
        travelling = travelling_unit(config.engine)
        self.buffers = fill_buffers(
            stages, bucket_mib, self.groups, mesh, sharded=self.sharded, travelling=travelling
        )
        every = {name: parameter for stage in stages for name, parameter in stage.named_parameters()}
        self.untrained = {name: parameter for name, parameter in every.items() if not parameter.requires_grad}
        materialise(self.untrained.values(), stages[0].device)
        self.compression = None
        if config.engine.compression is not None:
            from megacore.engine.compression import GradientCompression  # which only such runs load

            self.compression = GradientCompression(config.engine.compression, self.buffers)
        self.reducer = GradientReducer(
            self.buffers, narrow, {} if self.compression is None else self.compression.buckets
        )
        self.gatherer = (
            ParameterGatherer(stages, self.buffers)
            if any(buffer.divided for buffer in self.buffers)
            else None
        )
        super().__init__(
            config,
            mesh,
            stages,
            [own for buffer in self.buffers for own in buffer.master_ranges(self.row_weights(buffer))],
        )
        if self.compression is not None:
            self.compression.scaled_by(self.loss_scale.value)

    def holders(self, shard: Shard) -> Holders:
        return native_holders(self.mesh, shard, self.sharded)

    def part_at(self, shards: Mapping[str, Shard]) -> Callable[[str, int], Part]:
        return PartsOfBuffers(self.buffers, self.mesh, shards)

    def row_weights(self, buffer: FlatBuffer) -> list[Tensor]:
        """The weight of each row of a buffer's ranges in the gradient norm.

        Ranks that hold the same row each count a part of it, so all notice a row that is wrong on one of
        them.
        """
        rows = buffer.row_weights(lambda shard: 1.0 / shard.copies(but=buffer.divided))
        return [rows[own.start // ALIGNMENT : own.stop // ALIGNMENT] for own in buffer.ranges]

    def backward(
        self, chunk: int, root: list[GradientEdge], gradients: Sequence[Tensor], *, last: bool
    ) -> None:
        with self.reducer.completing(last):
            torch.autograd.backward(root, gradients)

    def backward_input(
        self, chunk: int, root: list[GradientEdge], gradients: Sequence[Tensor]
    ) -> list[WeightGradPart]:
        with self.reducer.deferral.collect() as parts:
            torch.autograd.backward(root, gradients)
        return parts

    def backward_weight(self, chunk: int, parts: list[WeightGradPart], *, last: bool) -> None:
        if not last:
            for _ in finish_in_turn(parts):
                pass
            return
        left = Counter(total for part in parts for total in part.totals)
        self.reducer.complete(total for total in self.reducer.totals_of(chunk) if not left[total])
        for part in finish_in_turn(parts):
            left.subtract(part.totals)
            self.reducer.complete(total for total in part.totals if not left[total])

    def reduce_gradients(self) -> None:
        self.reducer.finish()

    def reduce_tied(self) -> None:
        for group in self.mesh.shared.values():
            for buffer in self.buffers:
                if buffer.sum.last == group:
                    for gradients in buffer.own_gradients:
                        all_reduce(gradients, group)

    def gradients(self) -> dict[str, tuple[Tensor, TensorSlice]]:
        return self.pieces("", [gradients for buffer in self.buffers for gradients in buffer.own_gradients])

    def behind_step(self, skip: Tensor) -> None:
        """See `OptimizerStep`.

        The update has already rounded the masters into this rank's part of the parameters.
        """
        if self.compression is not None:
            self.compression.keep(skip)
        if self.gatherer is not None:
            self.gatherer.start()
        self.reducer.clear()

    def behind_loading(self) -> None:
        self.settle()
        for buffer in self.buffers:
            buffer.publish()
        if self.gatherer is not None:
            self.gatherer.start()

    def settle(self) -> None:
        if self.gatherer is not None:
            self.gatherer.finish()

    def tensors(self) -> dict[str, tuple[Tensor, TensorSlice]]:
        return super().tensors() | ({} if self.compression is None else self.compression.tensors())

    def close(self) -> None:
        super().close()
        self.reducer.close()

    def frozen(self) -> dict[str, tuple[Tensor, TensorSlice]]:
        return {name: (parameter.data, shard_of(parameter).box) for name, parameter in self.untrained.items()}

    def pieces(self, prefix: str, tensors: Sequence[Tensor | None]) -> dict[str, tuple[Tensor, TensorSlice]]:
        """See `OptimizerStep`: one tensor for each range of each buffer."""
        found: dict[str, tuple[Tensor, TensorSlice]] = {}
        held = iter(tensors)
        for buffer in self.buffers:
            for slot, view, box in buffer.pieces([next(held) for _ in buffer.ranges]):
                box = replace(box, copied=slot.shard.copied_along(but=buffer.divided))
                found[piece_key(f"{prefix}{slot.name}", found)] = (view, box)
        return found
