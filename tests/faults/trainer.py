"""Mistakes of the training loop around the step, which a proof of the step alone does not see."""

from dataclasses import replace
from typing import Any
from unittest import mock

from megacore.engine.learning_rate import learning_rate
from megacore.engine.native import NativeEngine
from megacore.train import evaluation, step, trainer
from tests.faults import both, fault

patch = mock.patch.object


@fault(
    "the learning rate of the step before is used, and the right one is logged",
    "one",
    "other weights are saved after step 3",
    check="trained",
)
def rate_of_the_step_before() -> Any:
    log = trainer.Trainer.log

    def right(self: Any, result: Any) -> None:
        lr = learning_rate(self.config.optim, result.step, self.config.train.steps)
        log(self, replace(result, lr=lr))

    late = patch(
        step, "learning_rate", lambda optim, number, steps: learning_rate(optim, max(1, number - 1), steps)
    )
    return both(late, patch(trainer.Trainer, "log", right))


@fault(
    "the learning rate begins its warmup again when a run resumes",
    "one",
    "step 4 logs another lr",
    check="trained",
)
def warmup_begins_again() -> Any:
    run = trainer.Trainer.run

    def from_the_start(self: Any, *arguments: Any) -> int:
        with patch(
            step,
            "learning_rate",
            lambda optim, number, steps: learning_rate(optim, number - self.origin.step, steps),
        ):
            return run(self, *arguments)

    return patch(trainer.Trainer, "run", from_the_start)


@fault(
    "the learning rate is computed one step ahead, and not again after a rollback",
    "one",
    "step 4 logs another lr",
    check="rollback",
)
def rate_computed_ahead() -> Any:
    ahead: list[float] = []

    def cached(optim: Any, number: int, steps: int) -> float:
        ahead.append(learning_rate(optim, number + 1, steps))
        return ahead[-2] if len(ahead) > 1 else learning_rate(optim, number, steps)

    return patch(step, "learning_rate", cached)


@fault(
    "a run that goes back keeps the moments of the steps that it leaves",
    "one",
    "step 5 logs another loss",
    check="rollback",
)
def moments_kept_behind_a_rollback() -> Any:
    restore = trainer.Trainer.restore

    def kept(self: Any) -> Any:
        moments = {
            key: tensor.clone()
            for key, (tensor, _) in self.engine.tensors().items()
            if not key.startswith("model/")
        }
        origin = restore(self)
        for key, (tensor, _) in self.engine.tensors().items():
            if key in moments and moments[key].any():
                tensor.copy_(moments[key])
        return origin

    return patch(trainer.Trainer, "restore", kept)


@fault(
    "a run that goes on counts steps that were skipped as updates",
    "one",
    "other weights are saved after step 4",
    check="trained",
)
def skipped_steps_counted_as_updates() -> Any:
    load = NativeEngine.load_state

    def counted(self: Any, state: dict[str, Any], tensors: Any) -> None:
        load(self, state | {"updates": state["updates"] + state["skipped"]}, tensors)

    return patch(NativeEngine, "load_state", counted)


@fault(
    "a validation of some batches reads the beginning of the corpus alone",
    "one",
    "step 2 logs another validation loss",
    check="trained",
)
def validation_of_the_beginning() -> Any:
    batches = evaluation.validation_batches

    def first(config: Any, mesh: Any, samples: Any) -> Any:
        length = min(len(samples), config.train.eval_batches * config.train.global_batch_size)
        beginning = mock.MagicMock(samples=samples.samples)
        beginning.__len__.return_value = length
        return batches(config, mesh, beginning)

    return patch(evaluation, "validation_batches", first)
