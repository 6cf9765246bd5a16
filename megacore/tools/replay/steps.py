"""Does steps of a run again, in one process, from a checkpoint of any layout."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.checkpoint import Reader
from megacore.checkpoint.weights import WEIGHTS
from megacore.config import Config
from megacore.config.schema import IGNORED
from megacore.errors import CheckpointError
from megacore.model.batch import Microbatch
from megacore.tools.choices.partition import partitioned
from megacore.tools.choices.run import trainer_of
from megacore.tools.inputs import Inputs
from megacore.tools.library import one_process
from megacore.tools.replay.gauges import Gauges, Size, Tensors
from megacore.tools.replay.history import Attempt
from megacore.tools.settings.load import resolve
from megacore.train.trainer import Trainer

# What rounding explains, relative: layouts add up in another order, and each step adds its own errors to
# those before.
COARSE = 2e-2
ROUNDING = {"fp64": 1e-9, "fp32": 1e-4, "bf16": COARSE, "fp16": COARSE}


@dataclass(frozen=True)
class Done:
    """A step that was done again."""

    step: int
    loss: float
    grad_norm: float
    sizes: dict[Tensors, list[Size]]


def config_of(
    base: Reader, sections: dict[str, Any], source: str | None, folder: str, overrides: list[str]
) -> Config:
    """The run's config for one process, which reads `base` and writes in another `folder`.

    A microbatch is one sample, where that changes nothing that is computed. Raises `UserError`.
    """
    model, train = dict(sections["model"]), dict(sections["train"])
    if model.get("source") is not None and source is None:
        right = f"--source {base.source_copy or 'FILE'}, once you have read it"
        raise CheckpointError(
            str(base.path),
            "its model is a source of the user's, which is executed only if you name it",
            right,
        )
    if source is not None:
        if model.get("source") is None:
            raise CheckpointError(str(base.path), "its model has no source", "no --source")
        model["source"] = str(Path(source).absolute())
    model |= {"attention": "auto", "kernels": "auto"}
    train |= {
        "device": "auto",
        "compile": False,
        "recompute": "none",
        "offload_activations": False,
        "eval_every": 0,
    }
    # Dropout's random numbers and an expert's capacity are a microbatch's, and a layer of the user's own may
    # compute across samples.
    is_custom = source is not None or model.get("hf") is not None
    if not model.get("dropout") and model.get("capacity_factor") is None and not is_custom:
        train["micro_batch_size"] = 1
    raw = {
        "model": model,
        "train": train,
        "data": sections["data"] | {"valid": None},
        "optim": sections["optim"] | {"max_rollbacks": 0},
    }
    raw["checkpoint"] = {"resume": str(base.path.absolute()), "every": 0, "last": False}
    raw["log"] = {"dir": folder, "tensorboard": False}
    if "cpu" in sections:
        raw["cpu"] = sections["cpu"]
    return partitioned(resolve(raw, overrides, "replay", 1).config)


class Replay:
    """The steps behind a checkpoint, done again with the samples that they were dealt, and the same skips."""

    def __init__(self, config: Config, attempt: Attempt) -> None:
        """Raises `UserError` if the corpora are not there, or the checkpoint does not fit."""
        self.config, self.attempt = config, attempt
        inputs = Inputs(config, 0)
        self.stream, self.mesh = inputs.stream, one_process(config)
        self.trainer: Trainer = trainer_of(config, self.mesh, inputs)
        self.gauges = Gauges(self.trainer.train_step.stages)
        self.mesh.listeners.add(self.gauges)

    def steps(
        self, last: int, before_update: Callable[[dict[Tensors, list[Size]], list[Microbatch]], None]
    ) -> Iterator[Done]:
        """Does the steps up to `last`.

        When all gradients of that one are there, and before its update, `before_update` is told of it.
        """
        trainer = self.trainer
        for step in range(trainer.step + 1, last + 1):
            trainer.step, trainer.batch_offset = step, self.attempt.ahead(step)
            batch = trainer.next_batch()
            self.gauges.begin([microbatch.targets for microbatch in batch])
            scale = getattr(trainer.engine, "loss_scale", None)
            by = 1.0 if scale is None else float(scale.value)
            sizes: dict[Tensors, list[Size]] = {}

            def look(
                step: int = step,
                by: float = by,
                sizes: dict[Tensors, list[Size]] = sizes,
                batch: list[Microbatch] = batch,
            ) -> None:
                sizes.update(self.gauges.read(by))
                if step == last:
                    before_update(sizes, batch)

            done = trainer.train_step(step, batch, before_update=look)
            yield Done(step, done.loss.item(), done.grad_norm.item(), sizes)

    def bad_weight(self) -> str | None:
        """The first weight that is not finite."""
        for key, (tensor, _) in self.trainer.engine.tensors().items():
            if key.startswith(WEIGHTS) and not bool(torch.isfinite(tensor).all()):
                return key.removeprefix(WEIGHTS)
        return None

    @torch.no_grad()
    def losses(self, microbatch: Microbatch) -> Tensor | None:
        """The loss of each target ``[batch, seq]`` with the weights of now, 0 where nothing is learned; None
        for models whose last layer has no logits, or that read more than tokens.
        """
        stage = self.trainer.train_step.stages[0]
        if microbatch.more or microbatch.targets is None or not hasattr(stage.behind[0], "logits"):
            return None
        hidden = stage.hidden(microbatch.tokens, microbatch.key, microbatch.documents, microbatch.positions)
        logits = stage.logits(hidden).float()
        targets = microbatch.targets
        return (
            F.cross_entropy(logits, targets.flatten(), reduction="none", ignore_index=IGNORED)
            .view(targets.shape)
            .cpu()
        )

    def close(self) -> None:
        """Ends threads and closes files."""
        self.trainer.close()
        self.trainer.engine.close()
        self.mesh.close()


@contextmanager
def replaying(
    base: Reader, sections: dict[str, Any], attempt: Attempt, source: str | None, overrides: list[str]
) -> Iterator[Replay]:
    """A replay that writes nothing but in a temporary folder."""
    with TemporaryDirectory() as folder:
        replay = Replay(config_of(base, sections, source, folder, overrides), attempt)
        try:
            yield replay
        finally:
            replay.close()


def lossy(sections: dict[str, Any]) -> str | None:
    """How the run made its gradients smaller on their way, which a replay in one process does not."""
    engine = sections.get("engine", {})
    if engine.get("compression") is not None:
        return "engine.compression"
    return "engine.reduce_dtype=bf16" if engine.get("reduce_dtype") == "bf16" else None


def apart(ours: tuple[float, float], recorded: tuple[float | None, float | None], bound: float) -> float:
    """The largest relative difference of loss and norm from the recorded ones; 0 within `bound`,
    infinite if one alone is finite.
    """
    worst = 0.0
    for x, y in zip(ours, recorded, strict=True):
        if y is None or not math.isfinite(x):
            worst = worst if y is None and not math.isfinite(x) else math.inf
        else:
            worst = max(worst, abs(x - y) / max(abs(x), abs(y)) if x != y else 0.0)
    return worst if worst > bound else 0.0
