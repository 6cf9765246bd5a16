"""Keeps a run's best checkpoint, that of the least validation loss, beside those that
come and go: `checkpoint.best`.
"""

import math
import os
import shutil
from pathlib import Path

from pydantic import ValidationError

from megacore.checkpoint import checkpoints_in
from megacore.checkpoint.folder import folder_of
from megacore.config import Config
from megacore.config.schema import resolved
from megacore.distributed.mesh import Mesh
from megacore.files import open_plain
from megacore.tools.metrics_file import Validation, recorded
from megacore.tools.retention import set_aside
from megacore.train.callbacks import Callback

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


class BestKept(Callback):
    """On rank 0, keeps the checkpoint with the least validation loss."""

    def on_start(self, config: Config, mesh: Mesh) -> None:
        self.mesh = mesh
        self.resumes_newest = config.checkpoint.resume == "auto"
        self.run = Path(resolved(config.log.dir))
        self.latest: Path | None = None

    def on_records_open(self, folder: Path, first_step: int) -> None:
        """Set aside a best checkpoint of steps that the run will do again."""
        if not self.resumes_newest:
            set_aside(self.run / FOLDER, first_step - 1)
        resumed = folder_of(self.run / "checkpoints", first_step - 1)
        self.latest = resumed if resumed.is_dir() else None

    def on_checkpoint(self, path: Path) -> None:
        self.latest = path
        self.keep_if_best(path)

    def on_end(self) -> None:
        """The loss of the last step is known only after its save."""
        if self.latest is not None:
            self.keep_if_best(self.latest)

    def keep_if_best(self, saved: Path) -> None:
        """Keep a checkpoint if it is the best one, and print that."""
        if line := keep_if_best(self.run, saved):
            self.mesh.print(line)


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
