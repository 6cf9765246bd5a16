"""The native engine: gradients are summed in fp32, AdamW steps; its state is whole on every data rank, or a part of it on each.

With `engine.shard_optimizer` (Rajbhandari et al. 2020, ZeRO stage 1) a step moves as many bytes as without: gradients are
reduce-scattered while backward runs, each rank updates its part, and the parameters are gathered while the next forward runs.
"""

from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megacore.comm import all_reduce
from megacore.config import Config
from megacore.engine.gather import ParameterGatherer
from megacore.engine.optimizer import ALIGNMENT, FlatBuffer, LossScale, fill_buffers
from megacore.engine.protocol import StepStatistics
from megacore.engine.reduce import GradientReducer
from megacore.kernels.adamw import AdamW
from megacore.kernels.grad_norm import SumOfSquares, clip_coefficient
from megacore.mesh import SOLO, Mesh
from megacore.model.gpt import Stage
from megacore.tensor_parallel.shard import Box, piece_key


class NativeEngine:
    """`Engine` over a stage's parameters (see `protocol`)."""

    def __init__(self, config: Config, stage: Stage, mesh: Mesh) -> None:
        self.mesh, self.clip = mesh, config.optim.grad_clip
        self.sharded = config.engine.shard_optimizer and mesh.dp.size > 1
        tied = "embedding.weight" if mesh.tied is not None else None
        self.buffers = fill_buffers(stage, config.engine.bucket_mib, mesh.dp if self.sharded else SOLO, tied)
        self.reducer = GradientReducer(self.buffers, mesh.dp, mesh.tp)
        self.gatherer = ParameterGatherer(stage, self.buffers, mesh.dp) if self.sharded else None
        self.first, self.second = ([[torch.zeros_like(m) for m in b.masters] for b in self.buffers] for _ in range(2))  # moments
        self.optimizer = self._optimizer(config)
        # Gradients are of the mean over the global batch; the scale starts where its microbatches' own would be 2^16.
        microbatches = config.train.global_batch_size // config.train.micro_batch_size
        self.loss_scale = LossScale(config.train.precision == "fp16", 2.0**16 * microbatches, mesh.device)
        self.skipped = torch.zeros((), device=mesh.device, dtype=torch.float64)
        self.squares = SumOfSquares(
            [gradients for buffer in self.buffers for gradients in buffer.own_gradients],
            [weights for buffer in self.buffers for weights in self.row_weights(buffer)],
            implementation=config.model.kernels,
        )

    def _optimizer(self, config: Config) -> AdamW:
        def every(tensors: list[list[Tensor]]) -> list[Tensor]:
            return list(chain.from_iterable(tensors))

        optim = config.optim
        return AdamW(
            every([buffer.masters for buffer in self.buffers]),
            every([buffer.own_gradients for buffer in self.buffers]),
            every(self.first),
            every(self.second),
            weight_decay=[optim.weight_decay if buffer.decay else 0.0 for buffer in self.buffers for _ in buffer.ranges],
            beta1=optim.beta1,
            beta2=optim.beta2,
            eps=optim.eps,
            copies=every([buffer.own_values for buffer in self.buffers]) if self.buffers[0].rounds else None,
            implementation=config.model.kernels,
        )

    def row_weights(self, buffer: FlatBuffer) -> list[Tensor]:
        """Of each of a buffer's ranges, 1 for rows that count in the gradient norm here, 0 for those that do elsewhere."""
        rows = buffer.rows_where(lambda slot: slot.shard.counted)
        return [rows[own.start // ALIGNMENT : own.stop // ALIGNMENT] for own in buffer.ranges]

    def loss_gradient(self, scale: float) -> Tensor:
        """See `Engine`."""
        return self.loss_scale.value * scale

    def root(self, output: Tensor) -> GradientEdge:
        """See `Engine`."""
        return get_gradient_edge(output)

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
        return self._pieces("", [buffer.own_gradients for buffer in self.buffers])

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The norm of the gradient of the whole model, a replicated or tied parameter counted once; fp64 scalar, scaled."""
        return all_reduce(self.squares(), self.mesh.world if self.sharded else self.mesh.model).sqrt()

    @torch.no_grad()
    def step(self, lr: float) -> StepStatistics:
        """See `Engine`. A step whose gradient is not finite changes nothing but the loss scale."""
        self.settle()
        norm = self.grad_norm() / self.loss_scale.value
        skip = (~norm.isfinite()).float()
        coefficient = clip_coefficient(norm, self.clip) if self.clip else torch.ones_like(norm)
        self.optimizer.step(lr, self.loss_scale.value / coefficient, skip)
        self.skipped += skip
        self.loss_scale.update(skip)
        if self.gatherer is not None:
            self.gatherer.start()
        self.reducer.clear()
        return StepStatistics(norm, self.skipped.clone())

    def settle(self) -> None:
        """See `Engine`."""
        if self.gatherer is not None:
            self.gatherer.finish()

    def tensors(self) -> dict[str, tuple[Tensor, Box]]:
        """See `Engine`: for every parameter its master and both moments."""
        named = self._pieces("model/", [buffer.masters for buffer in self.buffers])
        return named | self._pieces("adam_m/", self.first) | self._pieces("adam_v/", self.second)

    def _pieces(self, kind: str, tensors: list[list[Tensor]]) -> dict[str, tuple[Tensor, Box]]:
        """This rank's pieces of what `tensors` hold, for each buffer one tensor a range."""
        pieces: dict[str, tuple[Tensor, Box]] = {}
        for buffer, held in zip(self.buffers, tensors, strict=True):
            for name, view, box in buffer.pieces(held):
                # Data ranks with whole state have equal copies, of which the first is saved.
                counted = box.counted and (self.sharded or self.mesh.dp.rank == 0)
                pieces[piece_key(f"{kind}{name}", pieces)] = (view, replace(box, counted=counted))
        return pieces

    def state(self) -> dict[str, float]:
        """See `Engine`. Reads the device."""
        scale = self.loss_scale
        numbers = torch.stack([self.optimizer.updates.double(), self.skipped, scale.value, scale.good_steps]).tolist()
        return dict(zip(("updates", "skipped", "loss_scale", "good_steps"), numbers, strict=True))

    def load_state(self, state: dict[str, float]) -> None:
        """See `Engine`."""
        self.optimizer.updates.fill_(state["updates"])
        self.skipped.fill_(state["skipped"])
        if self.loss_scale.dynamic and state["loss_scale"] > 1.0:  # else the checkpoint is of a run that did not scale
            self.loss_scale.value.fill_(state["loss_scale"])
            self.loss_scale.good_steps.fill_(state["good_steps"])
        self.settle()
        for buffer in self.buffers:
            buffer.publish()
        if self.gatherer is not None:
            self.gatherer.start()
