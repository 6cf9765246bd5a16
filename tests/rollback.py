"""Runs with bad steps, and what a run does that goes back to its last checkpoint and around them."""

import contextlib
import io
import shutil
from pathlib import Path
from unittest import mock

import torch

from megacore.checkpoint import Reader
from megacore.model.batch import Microbatch
from megacore.tools.verify.worker import planted
from megacore.train.step import TrainStep
from megacore.train.trainer import Trainer
from tests import training
from tests.manifests import edit_text

# of a run, of the checkpoint that it goes back to, and the batches that make it do so
STEPS, SAVED, BAD = 8, 3, [5, 6]


def poisoned_rank(
    config_path: str, overrides: list[str], log_dir: str, batches: list[int], value: float
) -> list[int]:
    """A run in which the last rank's gradient is multiplied by `value` in some batches;
    returns the batches that were read.
    """
    next_batch, forward_backward = Trainer.next_batch, TrainStep.forward_backward
    read = []

    def noted(self: Trainer) -> list[Microbatch]:
        read.append(self.step + self.batch_offset)
        return next_batch(self)

    def poisoned(self: TrainStep, batch: list[Microbatch]) -> dict[str, torch.Tensor]:
        local_losses = forward_backward(self, batch)
        if read[-1] in batches and self.mesh.place.rank == self.mesh.place.world_size - 1:
            for piece, _ in self.engine.gradients().values():
                piece.mul_(value)
        return local_losses

    with (
        mock.patch.object(Trainer, "next_batch", noted),
        mock.patch.object(TrainStep, "forward_backward", poisoned),
    ):
        training.run_rank(config_path, overrides, log_dir)
    return read


def went_back(folder: str, plant: str | None) -> str:
    """A run that goes back, and a fresh one that resumes the same checkpoint and passes over the same
    samples: how they differ bit by bit, in words. What a run computes ahead, or remembers beside its
    checkpoint, would be another step's after it went back.
    """
    at = Path(folder)
    saved = {"every": SAVED, "keep": 9}
    optim = {"warmup_steps": 5, "max_skips": len(BAD), "max_rollbacks": 1, "spike_threshold": 1e9}
    config = training.write_config(
        at,
        training.write_corpus(at),
        model={"num_layers": 2},
        train={"steps": STEPS},
        optim=optim,
        checkpoint=saved,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        with planted(plant):
            poisoned_rank(config, [], f"{folder}/back", BAD, torch.nan)
        began = at / f"fresh/checkpoints/step_{SAVED:08}"
        shutil.copytree(at / "back/checkpoints" / began.name, began)
        edit_text(began, lambda manifest: manifest["state"].update(samples=BAD[-1] * 8, rollbacks=1))
        poisoned_rank(config, [], f"{folder}/fresh", BAD, torch.nan)
    found, right = ({line["step"]: line for line in training.metrics(at / run)} for run in ("back", "fresh"))
    for step, expected in right.items():
        for name in ("loss", "grad_norm", "lr", "skipped", "tokens"):
            if found[step][name] != expected[name]:
                return f"step {step} logs another {name}"
    ours, theirs = (Reader(at / run / f"checkpoints/step_{STEPS:08}") for run in ("back", "fresh"))
    for name, tensor in theirs.manifest.tensors.items():
        if ours.manifest.tensors[name].digest != tensor.digest:
            return f"another {name} is saved"
    for name, value in theirs.state.items():
        if name != "config" and ours.state[name] != value:
            return f"another {name} is saved"
    return ""
