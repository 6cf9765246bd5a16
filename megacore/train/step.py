"""One training step: what the trainer loops over, what benchmarks time and what `verify` proves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

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
from megacore.engine.choose import build_engine, build_stages
from megacore.engine.learning_rate import learning_rate
from megacore.model.batch import Microbatch
from megacore.model.choose import layers_of
from megacore.model.flow import Loss
from megacore.model.initial import initialise
from megacore.model.layers import DTYPES, Layers, check, fields_of, losses_of
from megacore.pipeline.partition import plans_of
from megacore.pipeline.runtime import Runtime


@dataclass(frozen=True)
class StepResult:
    """The results of a step, on the device, the same on every rank.

    Reading one is the caller's choice and waits for the device.
    """

    loss: Tensor  # the global batch's mean, before the update; fp64. Of several losses the sum
    votes: list[Tensor]  # for each of the votes, how many ranks said yes
    grad_norm: Tensor  # global, before clipping
    skipped: Tensor  # steps skipped so far: their loss or gradient was not finite, or a spike
    lr: float  # the rate of this step's update
    losses: dict[str, Tensor]  # by name, each with its coefficient, if there are several


class TrainStep:
    """This rank's stages, engine and plan, and a step through them.

    Construction and every method are collective over all ranks.
    """

    def __init__(
        self, config: Config, mesh: Mesh, *, draw: bool = True, layers: Layers | None = None
    ) -> None:
        """Without `draw` somebody reads the weights, or calls `draw` later.

        `layers`: of another model than the config's.
        """
        self.config, self.mesh = config, mesh
        layers = layers_of(config) if layers is None else layers
        check(layers)
        self.losses = losses_of(layers)
        self.fields = dict.fromkeys(loss.over for loss in self.losses.values())  # that losses are means over
        self.named_losses = tuple(self.losses) if len(self.losses) > 1 else ()  # a loss alone is `loss`
        self.stages = build_stages(config, mesh, layers)
        self.engine = build_engine(config, self.stages, mesh)
        self.runtime = Runtime(self.stages, self.engine, mesh.pp, mesh.listeners)
        self.plans = plans_of(config)
        self.masks_targets = masks_targets(config) or "targets" in fields_of(layers)
        if draw:
            self.draw()

    def draw(self) -> None:
        """Sets the weights that training starts with: each rank draws what its engine holds of them."""
        held = self.engine.tensors()
        self.draw_into(held)
        self.engine.load_state(self.engine.state(), held)

    def draw_into(self, held: Mapping[str, tuple[Tensor, TensorSlice]]) -> None:
        """Draws the first weights into pieces such as `Engine.tensors` gives."""
        config, mesh = self.config, self.mesh
        weights = {key.removeprefix(WEIGHTS): piece for key, piece in held.items() if key.startswith(WEIGHTS)}
        shards = {
            name: shard_of(parameter) for stage in self.stages for name, parameter in stage.named_parameters()
        }
        threads, note = (
            own_cores(mesh.place.local_world_size),
            partial(mesh.listeners.phase, "drawing weights"),
        )
        initialise(weights, shards, config.train.seed, DTYPES[config.train.precision], threads, note)

    def __call__(
        self,
        number: int,
        batch: Sequence[Microbatch],
        votes: Callable[[], Sequence[float]] = lambda: (),
        before_update: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """Does step `number` (from 1) with this rank's microbatches, without a host
        synchronisation: what `Trainer.loop` does.

        `votes` is called after backward, and `before_update` when gradients are the global sums and no
        parameter has changed yet.
        """
        self.begin(number)
        share = self.forward_backward(batch)
        sums = self.sum_over_ranks(share, votes())
        before_update()
        return self.update(number, *sums)

    def begin(self, number: int) -> None:
        """Lets settings be those of step `number`, also for evaluations behind it."""
        for stage in self.stages:
            stage.at_step(number)

    def forward_backward(self, batch: Sequence[Microbatch]) -> dict[str, Tensor]:
        """Runs the microbatches forward and backward. The engine then has the reduced gradients.

        Returns this rank's part of each loss of the global batch, fp64 on the device. The sum over all ranks
        is the loss.
        """
        weights = self.weights(batch)
        self.mesh.listeners.phase("forward and backward")
        sums = self.runtime.run(self.plans[len(batch)], batch, weights)
        return {
            name: self.own_part(loss, sums[loss.name] * weights[loss.name])
            for name, loss in self.losses.items()
        }

    def own_part(self, loss: Loss, value: Tensor) -> Tensor:
        """A rank's `value` of a loss where it counts, else zero: of ranks that compute the same, one counts.

        Ranks without the loss's layers have zero.
        """
        divided = (self.mesh.tp.name,) if loss.sp and self.config.parallel.sequence else ()
        return value.double() if self.mesh.counts(*divided) else torch.zeros_like(value, dtype=torch.float64)

    def weights(self, batch: Sequence[Microbatch]) -> dict[str, float | Tensor]:
        """The weight of each loss's sums, known before the first backward and the same on every rank."""
        found: dict[str, float | Tensor] = {}
        means = {
            over: self.target_weight(batch) if over == "targets" else self.mean_weight(batch, over)
            for over in self.fields
        }
        for name, loss in self.losses.items():
            found[name] = means[loss.over] if loss.coefficient == 1.0 else loss.coefficient * means[loss.over]
        return found

    def sum_over_ranks(
        self, share: Mapping[str, Tensor], votes: Sequence[float]
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """The global batch's losses, and how many ranks voted yes on each of the questions that ranks decide
        together (1 is yes, 0 is no). One collective brings them all, and nobody waits for it.
        """
        self.mesh.listeners.phase("loss")
        flags = [torch.full((), vote, dtype=torch.float64, device=self.mesh.device) for vote in votes]
        found = list(all_reduce(torch.stack([*share.values(), *flags]), self.mesh.world))
        return dict(zip(share, found, strict=False)), found[len(share) :]

    def update(self, number: int, losses: Mapping[str, Tensor], votes: list[Tensor]) -> StepResult:
        """Clips the gradients and updates the parameters, at the rate of step `number`.

        `votes` are handed on.
        """
        lr = learning_rate(self.config.optim, number, self.config.train.steps)
        loss, *others = losses.values()
        for other in others:
            loss = loss + other
        self.mesh.listeners.phase("optimizer step")
        statistics = self.engine.step(lr, loss)
        self.mesh.listeners.phase("between steps")
        named = {name: losses[name] for name in self.named_losses}
        return StepResult(loss, votes, statistics.grad_norm, statistics.skipped, lr, named)

    def target_weight(self, batch: Sequence[Microbatch]) -> float | Tensor:
        """The weight of a target's loss in the mean: 1 / targets of the global batch that are learned."""
        return self.mean_weight(batch, "targets" if self.masks_targets else "tokens")

    def mean_weight(self, batch: Sequence[Microbatch], field: str) -> float | Tensor:
        """1 / entries of the global batch's `field` that are not `IGNORED`.

        Where some may be, ranks count theirs and sum them: a rank may have more than another, or none.
        """
        if field == "tokens":
            return 1.0 / (
                len(batch)
                * self.config.data_size
                * self.config.train.micro_batch_size
                * self.config.train.seq_len
            )
        own = torch.stack([(microbatch[field] != IGNORED).sum() for microbatch in batch]).sum(
            dtype=torch.float64
        )
        self.mesh.listeners.phase("loss")
        # Every stage has the batch, and so does every tensor rank, of which one counts.
        total = (
            all_reduce(own if self.mesh.is_loss_rank else torch.zeros_like(own), self.mesh.world)
            / self.mesh.pp.size
        )
        return 1.0 / total.clamp_(min=1.0)
