"""What rank 0 writes of a run: config.json, metrics.jsonl, skipped.jsonl, and lines on the console."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from megacore.config import Config
from megacore.config.schema import resolved
from megacore.config.source import COPY, source_of
from megacore.distributed.mesh import Mesh
from megacore.errors import LogError
from megacore.files import open_plain, write_whole
from megacore.tools.metrics_file import as_json, recorded
from megacore.tools.retention import set_aside
from megacore.train.callbacks import Callback, Report

CONSOLE_SECONDS = 5.0  # between lines if there is no terminal to redraw


class Records:
    """The files of a run's folder (see `megacore.train.records.Records`).

    If they are deleted during the run, they begin anew.
    """

    def __init__(self) -> None:
        self.metrics: IO[str] | None = None
        self.was_deleted = False  # whether the folder or metrics.jsonl was deleted since the run began

    def open(self, config: Config, mesh: Mesh, first_step: int) -> None:
        """Make the run's folder, and open the files in it.

        A run that does not resume its newest checkpoint sets aside those beyond its first step, before it
        drops their steps from metrics.jsonl: it will reach these steps again.
        """
        self.config, self.mesh = config, mesh
        self.folder = Path(resolved(config.log.dir))
        self.file = self.folder / "metrics.jsonl"
        right = "a folder with room, that can be written"
        if config.checkpoint.resume != "auto":
            try:
                set_aside(self.folder / "checkpoints", first_step - 1)
            except OSError as error:
                wrong = f"checkpoints beyond step {first_step - 1} cannot be set aside: {error.strerror}"
                raise LogError(str(self.folder), wrong, "a folder that can be written") from None
        try:
            self._open(first_step)
        except OSError as error:
            wrong = f"its records cannot be begun: {error.strerror}"
            raise LogError(str(self.folder), wrong, right) from None

    def write(self, record: dict[str, Any]) -> None:
        """Write a line of metrics.jsonl."""
        with self._recording(record["step"]) as metrics:
            metrics.write(as_json(record) + "\n")
            metrics.flush()

    def write_skipped(self, record: dict[str, Any]) -> None:
        """Write a line of skipped.jsonl."""
        skipped = self.folder / "skipped.jsonl"
        with self._recording(record["step"]), skipped.open("a", encoding="utf-8") as out:
            out.write(as_json(record) + "\n")

    def rewind(self, first_step: int) -> None:
        """Drop the records from `first_step` on."""
        with self._recording(first_step) as metrics:
            metrics.close()
            self.metrics = open_metrics(self.file, first_step)

    def close(self) -> None:
        """Close the files."""
        if self.metrics is not None:
            with suppress(OSError):  # every record was flushed, or the failure was reported
                self.metrics.close()

    def _open(self, first_step: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.config
        if (source := source_of(config)) is not None:  # so that the folder has all that its config names
            write_whole(self.folder / COPY, source.text)
            config = config.model_copy(update={"model": config.model.model_copy(update={"source": COPY})})
        write_whole(self.folder / "config.json", config.model_dump_json(by_alias=True, indent=2) + "\n")
        self.metrics = open_metrics(self.file, first_step)

    @contextmanager
    def _recording(self, step: int) -> Iterator[IO[str]]:
        """Return a context for writing a record of `step`."""
        assert self.metrics is not None
        try:
            if not is_there(self.file, self.metrics):
                self._begin_anew(step)
            yield self.metrics
        except OSError as error:
            right = "room, or a folder that can be written"
            raise LogError(str(self.file), error.strerror or str(error), right) from None

    def _begin_anew(self, step: int) -> None:
        if not self.was_deleted:
            self.mesh.print(
                f"WARNING: {self.file} was deleted while the run wrote it; it begins anew with step {step}"
            )
        self.was_deleted = True
        self.close()
        self._open(step)
        # Some callbacks keep files in the same folder.
        self.mesh.listeners.notify(Callback.on_records_open, self.folder, step)


class Console(Callback):
    """Prints lines about steps, unless another callback draws them on the terminal (`shows_steps`)."""

    def on_start(self, config: Config, mesh: Mesh) -> None:
        self.mesh = mesh
        self.steps = config.train.steps
        self.last_line = 0.0

    def on_records_open(self, folder: Path, first_step: int) -> None:
        """Begin to count time."""
        self.on_rewind(first_step)

    def on_rewind(self, first_step: int) -> None:
        """Begin to count time anew."""
        self.started, self.first_step = time.monotonic(), first_step

    def on_log(self, report: Report) -> None:
        """Print a logged step, at most every `CONSOLE_SECONDS`."""
        step = report.metrics["step"]
        now = time.monotonic()
        is_drawn = any(isinstance(c, Callback) and c.shows_steps for c in self.mesh.listeners)
        is_due = now - self.last_line > CONSOLE_SECONDS or step in (self.first_step, self.steps)
        if is_due and not is_drawn:
            self.last_line = now
            left = (now - self.started) / (step - self.first_step + 1) * (self.steps - step)
            self.mesh.print(f"step {step}/{self.steps}  {in_brief(report.metrics)}  {left:.0f} s left")

    def on_skipped(self, record: dict[str, Any]) -> None:
        """Print a step that was skipped."""
        samples = f"{record['first_sample']}–{record['last_sample']}"
        self.mesh.print(
            f"step {record['step']} skipped: loss {record['loss']:g}, gradient norm "
            f"{record['grad_norm']:g}, samples {samples}"
        )


def in_brief(figures: Mapping[str, Any]) -> str:
    """A logged step on the console."""
    mfu = "" if figures["mfu"] is None else f"  MFU {figures['mfu']:.1%}"
    return (
        f"loss {figures['loss']:.4f}  lr {figures['lr']:.3g}  norm {figures['grad_norm']:.3g}  "
        f"{figures['tokens_per_second']:,.0f} tokens/s{mfu}  {figures['memory_bytes'] / 2**30:.1f} GiB"
    )


def is_there(path: Path, file: IO[str]) -> bool:
    """Whether `path` still names the open `file`."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def open_metrics(path: Path, first_step: int) -> IO[str]:
    """Opens metrics.jsonl to append. Drops lines of steps that will be run again, and what is no record."""
    if path.exists():
        aside = path.with_suffix(".partial")
        try:
            with open_plain(path) as file, aside.open("wb") as kept:
                kept.writelines(line + b"\n" for step, line in recorded(file) if step < first_step)
            aside.replace(path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
    return path.open("a", encoding="utf-8")
