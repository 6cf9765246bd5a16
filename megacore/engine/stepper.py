"""The step of the native and the fsdp engine: norm, clipping, loss scale and update,
without a host synchronisation.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megacore.config import Config
from megacore.config.optim_groups import ParameterGroups
from megacore.distributed.buffers import BUFFERS, buffers_of, update_buffers
from megacore.distributed.collectives import all_reduce
from megacore.distributed.mesh import Mesh
from megacore.distributed.shard import Shard, TensorSlice, shard_of
from megacore.engine.held_tensors import HeldTensors, MasterRange
from megacore.engine.loss_scale import LossScale
from megacore.engine.optimizers import GroupedUpdate
from megacore.engine.owners import Holders, Part, dealings_of
from megacore.engine.protocol import Engine, StepStatistics
from megacore.engine.spike_detector import SpikeGuard
from megacore.kernels.grad_norm import SumOfSquares, clip_coefficient
from megacore.model.stage import Stage
from megacore.optimizers.rule import AVERAGE


class OptimizerStep(Engine, ABC):
    """Updates the masters that this rank holds from their gradients. These tensors stay where they are.

    An engine adds how parameters and gradients get there, and what happens after a step and after loading.
    """

    mesh: Mesh
    groups: ParameterGroups

    def __init__(
        self, config: Config, mesh: Mesh, stages: Sequence[Stage], ranges: Sequence[MasterRange]
    ) -> None:
        """The mesh's device computes, and has the figures; masters may be elsewhere.

        An engine first sets `groups`, for its ranges.
        """
        optim, train = config.optim, config.train
        self.module_buffers = buffers_of(self.modules)
        self.device, self.over, self.clip = mesh.device, mesh.world, optim.grad_clip
        # which are named for the device
        kernels = "auto" if config.engine.cpu_offload else config.model.kernels
        trained = [pair for stage in stages for pair in stage.named_parameters() if pair[1].requires_grad]
        shards = {name: shard_of(parameter) for name, parameter in trained}
        dealings = dealings_of(shards, self.groups, self.holders, self.part_at(shards))
        owned = {
            task.name
            for every in dealings.values()
            for dealing in every
            for tasks in dealing.rounds
            for task in dealing.owned(tasks)
        }
        self.held = HeldTensors(ranges, shards, self.groups, self.pieces, owned, mesh.device)
        self.optimizer = GroupedUpdate(self.held, dealings, mesh.device, kernels)
        self.averages = None
        if AVERAGE in self.held.state:
            from megacore.engine.averages import WeightAverages  # which only such runs load

            self.averages = WeightAverages(self.held, optim.ema)
        self.squares = SumOfSquares(
            [r.gradient for r in ranges], [r.row_weights for r in ranges], implementation=kernels
        )
        # Gradients are of the mean over the global batch. The scale starts so that a microbatch's own would
        # be 2^16.
        microbatches = train.batch_at(1) // train.micro_batch_size
        self.loss_scale = LossScale(train.precision == "fp16", 2.0**16 * microbatches, self.device)
        self.skipped = torch.zeros((), device=self.device, dtype=torch.float64)
        self.spikes = (
            SpikeGuard(optim.spike_threshold, self.device) if optim.spike_threshold is not None else None
        )

    def loss_gradient(self, scale: float | Tensor) -> Tensor:
        return self.loss_scale.value * scale

    def root(self, outputs: Sequence[Tensor]) -> list[GradientEdge]:
        return [get_gradient_edge(output) for output in outputs]

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The gradient norm of the whole model as an fp64 scalar, with the loss scale.

        Replicated and tied parameters count once. It has the same bits on every rank.
        """
        return all_reduce(self.squares().to(self.device), self.over).sqrt()

    @torch.no_grad()
    def step(self, lr: float, loss: Tensor | None = None) -> StepStatistics:
        """See `Engine`.

        If loss or gradient is not finite, or the norm is a spike, the step changes only the loss scale.
        """
        self.settle()
        norm = self.grad_norm() / self.loss_scale.value
        overflow = ~norm.isfinite()
        refused = overflow if loss is None else overflow | ~loss.isfinite()
        if self.spikes is not None:
            refused = refused | self.spikes.is_spike(norm)
            self.spikes.remember(norm, refused)
        skip = refused.float()
        coefficient = clip_coefficient(norm, self.clip) if self.clip else torch.ones_like(norm)
        self.optimizer.step(lr, self.loss_scale.value / coefficient, skip)
        if self.averages is not None:
            self.averages.update(self.optimizer.updates, skip)
        self.skipped += skip
        update_buffers(self.module_buffers, self.mesh, skip)
        self.loss_scale.update(overflow.float())
        self.behind_step(skip)
        return StepStatistics(norm, self.skipped.clone())

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        if self.averages is None:
            yield
            return
        self.settle()
        self.averages.swap()
        self.behind_loading()
        try:
            yield
        finally:
            self.settle()
            self.averages.swap()
            self.behind_loading()

    @abstractmethod
    def holders(self, shard: Shard) -> Holders:
        """The ranks that hold a parameter with this completed record."""

    @abstractmethod
    def part_at(self, shards: Mapping[str, Shard]) -> Callable[[str, int], Part]:
        """A function that says what a rank of the world, one of a parameter's holders, has of it.

        `shards`: of all parameters, by name.
        """

    @abstractmethod
    def behind_step(self, skip: Tensor) -> None:
        """Copies the masters into the parameters that compute, and clears the gradients.

        `skip`: 1 if the step was skipped, else 0.
        """

    @abstractmethod
    def behind_loading(self) -> None:
        """Copies masters that were just read into the parameters that compute."""

    def state(self) -> dict[str, Any]:
        """See `Engine`. Reads the device."""
        scale, updates = self.loss_scale, self.optimizer.updates.to(self.device)
        numbers = torch.stack([updates.double(), self.skipped, scale.value, scale.good_steps]).tolist()
        named: dict[str, Any] = dict(
            zip(("updates", "skipped", "loss_scale", "good_steps"), numbers, strict=True)
        )
        if not scale.dynamic:
            del named["loss_scale"], named["good_steps"]
        return named if self.spikes is None else named | {"norms": self.spikes.state()}

    def load_state(self, state: dict[str, Any], tensors: Mapping[str, tuple[Tensor, TensorSlice]]) -> None:
        self.optimizer.set_updates(state["updates"])
        if self.averages is not None and not state["updates"]:
            self.averages.begin()
        self.skipped.fill_(state["skipped"])
        # else the checkpoint is of a run that did not scale
        if self.loss_scale.dynamic and "loss_scale" in state:
            self.loss_scale.value.fill_(state["loss_scale"])
            self.loss_scale.good_steps.fill_(state["good_steps"])
        if self.spikes is not None:
            self.spikes.load_state(state.get("norms", []))
        self.behind_loading()

    def tensors(self) -> dict[str, tuple[Tensor, TensorSlice]]:
        """See `Engine`: every parameter's master and optimizer state, what is frozen, and every buffer."""
        self.settle()  # a gather that ends later would put back the values that it began with
        buffers = {f"{BUFFERS}{name}": buffer.piece for name, buffer in self.module_buffers.items()}
        return (
            self.held.tensors() | {f"model/{name}": piece for name, piece in self.frozen().items()} | buffers
        )

    @abstractmethod
    def frozen(self) -> dict[str, tuple[Tensor, TensorSlice]]:
        """This rank's pieces of the parameters that need no gradient (`requires_grad`), by name.

        They compute, and nobody updates them.
        """

    @abstractmethod
    def pieces(self, prefix: str, tensors: Sequence[Tensor | None]) -> dict[str, tuple[Tensor, TensorSlice]]:
        """This rank's pieces of `tensors`, one for each range or None, by prefix
        and name (see `shard.piece_key`).
        """

    def close(self) -> None:
        self.settle()
