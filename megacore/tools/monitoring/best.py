"""Keeps a run's best checkpoint, that of the least validation loss, beside those that
come and go: `checkpoint.best`.
"""

import math
import os
import shutil
from pathlib import Path

from pydantic import ValidationError

from megacore.checkpoint import checkpoints_in
from megacore.files import open_plain
from megacore.tools.metrics_file import Validation, recorded

FOLDER = "best"  # in a run's folder, with one checkpoint: every script takes it for a folder of checkpoints


def losses_of(run: Path) -> dict[int, float]:
    """The validation losses that a run has recorded, by step."""
    found = {}
    with open_plain(run / "metrics.jsonl") as file:
        for step, line in recorded(file):
            if b'"valid_loss"' in line:
                try:
                    loss = Validation.model_validate_json(line).valid_loss
                except ValidationError:  # another program's line
                    continue
                if loss is not None and math.isfinite(loss):
                    found[step] = loss
    return found


class BestKept:
    """On rank 0, is told of each checkpoint, and prints what becomes of the best one."""

    def __init__(self, run: Path) -> None:
        self.run, self.folder = run, run / FOLDER

    def __call__(self, saved: Path) -> None:
        if said := keep_if_best(self.run, saved):
            print(said, flush=True)


def keep_if_best(run: Path, saved: Path) -> str | None:
    """If of the checkpoint just saved and the best so far the new one has less loss, or the run has gone back
    behind the other, keeps it instead. Returns what to say of that.

    Files are links to those of the checkpoint: they take room only when that is deleted. Where the disk knows
    no links they are copied.
    """
    try:
        losses, step = losses_of(run), step_of(saved)
        kept = [path for path in checkpoints_in(run / FOLDER) if path.name != saved.name]
        least = min((losses.get(step_of(path), math.inf) for path in kept), default=math.inf)
        if step not in losses or losses[step] >= least or (run / FOLDER / saved.name).exists():
            return None
        place = run / FOLDER / saved.name
        aside = place.with_name(f"{place.name}.partial")
        shutil.rmtree(aside, ignore_errors=True)  # of a run that was killed here
        shutil.copytree(saved, aside, copy_function=link)
        aside.rename(place)
        for path in kept:
            shutil.rmtree(path)
    except OSError as error:  # the run has its checkpoint, and goes on
        return f"WARNING: {saved} is not kept as the best one: {error.strerror or error}"
    return f"best so far: {place}, validation loss {losses[step]:.4f}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("step_"))


def link(source: str, target: str) -> None:
    """A second name of the file, or else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
