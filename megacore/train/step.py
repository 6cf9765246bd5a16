"""One training step: what the trainer runs, what benchmarks time and what `verify` proves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from megacore.checkpoint.weights import WEIGHTS
from megacore.config import Config
from megacore.config.implied import masks_targets
from megacore.config.schema import IGNORED
from megacore.distributed.collectives import all_reduce
from megacore.distributed.cpu import own_cores
from megacore.distributed.mesh import Mesh
from megacore.distributed.shard import TensorSlice, shard_of
from megacore.engine.choose import Engines, build_engine, build_stages
from megacore.engine.learning_rate import learning_rate
from megacore.model.batch import Microbatch
from megacore.model.choose import layers_of
from megacore.model.initial import initialise
from megacore.model.layers import DTYPES, Layers, check, fields_of, losses_of
from megacore.pipeline.partition import plans_of
from megacore.pipeline.runtime import Runtime

Number = TypeVar("Number", Tensor, float)


@dataclass(frozen=True)
class StepResult(Generic[Number]):
    """The results of one step, the same on every rank.

    A step returns numbers as fp64 scalars on the device (`StepResult[Tensor]`): whoever reads one waits for
    the device. The trainer copies them to the host later, all in one tensor (`pack`, `unpack`).
    """

    step: int
    lr: float  # learning rate of this step's update
    loss: Number  # mean over the global batch, before the update; of several losses the sum
    grad_norm: Number  # of the whole model, before clipping
    # updates skipped since the run began: a loss or gradient was not finite, or a spike
    skipped_so_far: Number
    flags: Mapping[str, Number]  # by name, the number of ranks that raised the flag in this step
    losses: Mapping[str, Number]  # by name, each times its coefficient; empty if the model has one loss

    def pack(self: "StepResult[Tensor]") -> Tensor:
        """Return all numbers in one fp64 tensor."""
        numbers = [
            self.loss,
            self.grad_norm,
            self.skipped_so_far,
            *self.flags.values(),
            *self.losses.values(),
        ]
        return torch.stack(numbers)

    def unpack(self, packed: Tensor) -> "StepResult[float]":
        """Return this result with the numbers of `pack`, which have arrived on the host."""
        loss, grad_norm, skipped_so_far, *others = packed.tolist()
        flags, losses = others[: len(self.flags)], others[len(self.flags) :]
        return StepResult(
            step=self.step,
            lr=self.lr,
            loss=loss,
            grad_norm=grad_norm,
            skipped_so_far=skipped_so_far,
            flags=dict(zip(self.flags, flags, strict=True)),
            losses=dict(zip(self.losses, losses, strict=True)),
        )


def no_flags() -> Mapping[str, bool]:
    """Return the flags of a step without a trainer."""
    return {}


class TrainStep:
    """This rank's stages, their engine and their schedule, and one step through them.

    Construction and every method are collective over all ranks.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        *,
        draw: bool = True,
        layers: Layers | None = None,
        engines: Engines | None = None,
    ) -> None:
        """Build this rank's part of the model.

        `draw`: draw the first weights now; otherwise the caller reads weights or calls `draw`. `layers`: of
        another model than the config's. `engines`: further values of `engine.kind`, such as
        `megacore.tools.deepspeed.engine.ENGINES`.
        """
        self.config = config
        self.mesh = mesh
        layers = layers_of(config) if layers is None else layers
        check(layers)
        self.losses = losses_of(layers)
        self.stages = build_stages(config, mesh, layers)
        self.engine = build_engine(config, self.stages, mesh, engines)
        self.runtime = Runtime(self.stages, self.engine, mesh.pp, mesh.listeners)
        self.plans = plans_of(config)  # by the number of microbatches, which may grow during a run
        self.masks_targets = masks_targets(config) or "targets" in fields_of(layers)
        if draw:
            self.draw()

    def draw(self) -> None:
        """Draw the weights that training starts with. Each rank draws only the pieces that it holds."""
        tensors = self.engine.tensors()
        self.draw_into(tensors)
        self.engine.load_state(self.engine.state(), tensors)

    def draw_into(self, tensors: Mapping[str, tuple[Tensor, TensorSlice]]) -> None:
        """Draw the first weights into pieces such as `Engine.tensors` returns."""
        weights = {
            key.removeprefix(WEIGHTS): piece for key, piece in tensors.items() if key.startswith(WEIGHTS)
        }
        shards = {
            name: shard_of(parameter) for stage in self.stages for name, parameter in stage.named_parameters()
        }
        train = self.config.train
        threads = own_cores(self.mesh.place.local_world_size)
        # Called now and then, because drawing a large model may take longer than a hang.
        sign_of_life = partial(self.mesh.listeners.phase, "drawing weights")
        initialise(weights, shards, train.seed, DTYPES[train.precision], threads, sign_of_life)

    def __call__(
        self,
        step: int,
        batch: Sequence[Microbatch],
        flags: Callable[[], Mapping[str, bool]] = no_flags,
        before_update: Callable[[], None] = lambda: None,
    ) -> StepResult[Tensor]:
        """Train on this rank's microbatches of step `step` (from 1), without waiting for the device.

        `flags` is called after backward; the result says on how many ranks each flag was raised.
        `before_update` is called when gradients are the sums over all ranks and no parameter has changed.
        """
        self.begin(step)
        local_losses = self.forward_backward(batch)
        losses, flag_counts = self.sum_over_ranks(local_losses, flags())
        before_update()
        return self.update(step, losses, flag_counts)

    def begin(self, step: int) -> None:
        """Give layers the settings of a step, such as a window that grows. Evaluation uses them too."""
        for stage in self.stages:
            stage.at_step(step)

    def forward_backward(self, batch: Sequence[Microbatch]) -> dict[str, Tensor]:
        """Run the microbatches forward and backward; the engine then has the reduced gradients.

        Returns this rank's part of each loss, fp64 scalars on the device. Their sum over all ranks is the
        loss of the global batch.
        """
        weights = self.loss_weights(batch)
        self.mesh.listeners.phase("forward and backward")
        loss_sums = self.runtime.run(self.plans[len(batch)], batch, weights)

        local_losses = {}
        for name, loss in self.losses.items():
            # Ranks that compute the same loss count once. Tensor ranks do, unless sequence parallelism
            # divides the loss's tokens among them (`sp`).
            divided_by = (self.mesh.tp.name,) if loss.sp and self.config.parallel.sequence else ()
            is_counted = self.mesh.counts(*divided_by)
            value = loss_sums[name] * weights[name]  # zero on stages without this loss
            local_losses[name] = (
                value.double() if is_counted else torch.zeros_like(value, dtype=torch.float64)
            )
        return local_losses

    def loss_weights(self, batch: Sequence[Microbatch]) -> dict[str, float | Tensor]:
        """Return the weight of each loss's sum over tokens: its coefficient / targets of the global batch.

        Backward starts with these weights, so gradients need no division later. They are known before the
        first forward, and equal on every rank.
        """
        one_over_count = {
            field: self.one_over_count(batch, field)
            for field in dict.fromkeys(loss.over for loss in self.losses.values())
        }
        weights: dict[str, float | Tensor] = {}
        for name, loss in self.losses.items():
            weight = one_over_count[loss.over]
            weights[name] = weight if loss.coefficient == 1.0 else loss.coefficient * weight
        return weights

    def one_over_count(self, batch: Sequence[Microbatch], field: str) -> float | Tensor:
        """Return 1 / entries of the global batch's `field`, such as "targets", that a loss is the mean over.

        If entries may be masked (`IGNORED`), ranks count theirs and all-reduce the count, because a rank may
        have more than another, or none. Otherwise the count follows from the config.
        """
        train = self.config.train
        if field == "tokens" or (field == "targets" and not self.masks_targets):
            sequences = len(batch) * self.config.data_size * train.micro_batch_size
            return 1.0 / (sequences * train.seq_len)

        counts = [(microbatch[field] != IGNORED).sum() for microbatch in batch]
        local_count = torch.stack(counts).sum(dtype=torch.float64)
        if not self.mesh.is_loss_rank:  # another tensor rank counts the same tokens
            local_count = torch.zeros_like(local_count)
        self.mesh.listeners.phase("loss")
        # Every pipeline stage has the batch, and counts it too.
        count = all_reduce(local_count, self.mesh.world) / self.mesh.pp.size
        return 1.0 / count.clamp_(min=1.0)

    def sum_over_ranks(
        self, local_losses: Mapping[str, Tensor], flags: Mapping[str, bool]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All-reduce the losses and the flags of this step in one small collective over the world.

        The host does not wait for it. Returns the losses of the global batch, and for each flag the number of
        ranks that raised it.
        """
        self.mesh.listeners.phase("loss")
        device = self.mesh.device
        raised = [torch.full((), float(flag), dtype=torch.float64, device=device) for flag in flags.values()]
        sums = list(all_reduce(torch.stack([*local_losses.values(), *raised]), self.mesh.world))
        losses = dict(zip(local_losses, sums, strict=False))
        flag_counts = dict(zip(flags, sums[len(local_losses) :], strict=True))
        return losses, flag_counts

    def update(
        self, step: int, losses: Mapping[str, Tensor], flag_counts: Mapping[str, Tensor]
    ) -> StepResult[Tensor]:
        """Clip the gradients and update the parameters, with the learning rate of step `step`."""
        lr = learning_rate(self.config.optim, step, self.config.train.steps)
        total, *others = losses.values()
        for loss in others:
            total = total + loss

        self.mesh.listeners.phase("optimizer step")
        statistics = self.engine.step(lr, total)
        self.mesh.listeners.phase("between steps")
        return StepResult(
            step=step,
            lr=lr,
            loss=total,
            grad_norm=statistics.grad_norm,
            skipped_so_far=statistics.skipped,
            flags=flag_counts,
            losses=losses if len(losses) > 1 else {},
        )
