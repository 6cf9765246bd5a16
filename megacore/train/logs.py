"""A run's records, written by rank 0: config.json and metrics.jsonl, and lines on the console.

Those who watch the figures besides are monitors, which whoever starts a run attaches (`tools/monitoring`). A run goes on without console
and monitors, but not without its records. If these cannot be written, `broken` says why, and the trainer saves and ends.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from megacore.config import Config
from megacore.config.schema import resolved
from megacore.config.source import COPY, source_of
from megacore.errors import LogError
from megacore.files import open_plain, write_whole
from megacore.records import as_json, recorded

if TYPE_CHECKING:  # the process that talks to wandb needs no torch
    from torch import nn

    from megacore.distributed.mesh import Mesh
    from megacore.distributed.observer import Waits
    from megacore.train.metrics import StepMetrics
    from megacore.train.step import TrainStep

CONSOLE_SECONDS = 5.0  # between lines if there is no terminal to redraw


@dataclass(frozen=True)
class Report:
    """What a logged step brings, on every rank."""

    figures: dict[str, Any]  # a line of metrics.jsonl
    by_rank: Mapping[str, Sequence[float]]  # what each rank has of its own, by name
    by_part: Mapping[str, Sequence[float]]  # seconds of each rank's step, by what they were spent on: what its monitors said (`parts`)
    saved_step: int  # of the newest checkpoint
    save_seconds: float  # that its save took


class Monitor:
    """Is told a run's figures. These methods do nothing: a monitor has those that it needs.

    A monitor that fails at a figure, a record or a report is named once, and training goes on without it.
    """

    shows_steps = False  # whether it shows steps on the terminal, in place of lines

    def start(self, config: Config, mesh: "Mesh") -> None:
        """Before the first step. Collective."""

    def built(self, step: "TrainStep") -> None:
        """On every rank, once the model and its engine are there."""

    def open(self, config: Config, folder: Path, first_step: int, say: Callable[[str], None]) -> None:
        """On rank 0, before the first record, and again if the run's `folder` was deleted. `config`: without any `auto` that the run has
        settled. `say` prints a line."""

    def record(self, figures: dict[str, Any]) -> None:
        """On rank 0: a line of metrics.jsonl."""

    def parts(self, computed: float, waits: "Waits", steps: int) -> Mapping[str, float]:
        """On every rank, before each report: seconds of this rank's step by what they were spent on, under names that all ranks have.
        `computed`: seconds a step that it worked itself. `waits`: its waits in so many `steps`."""
        return {}

    def figures(self, figures: Mapping[str, Any], stages: Sequence["nn.Module"]) -> Mapping[str, float]:
        """On every rank, for each report: further figures of a logged step, from those there are and from this rank's stages of the model.
        All ranks answer alike. Where that needs others' numbers, they communicate over the mesh of `start`; then none may fail alone."""
        return {}

    def report(self, report: Report) -> None:
        """On every rank: a logged step."""

    def validation(self, loss: float) -> None:
        """On every rank: a validation's loss, nats a token."""

    def close(self, *, quietly: bool = False) -> None:
        """On every rank, at the end; on rank 0 also before `open` is called again, `quietly` then. It may be called twice."""


@contextmanager
def surviving(monitor: Monitor, monitors: list[Monitor], say: Callable[[str], None]) -> Iterator[None]:
    """A context for what a monitor does. If it fails, `say` prints so, and it is no longer among the `monitors` of this rank."""
    try:
        yield
    except Exception as error:  # whatever a monitor of the user's own does wrong: no run ends for it
        monitors.remove(monitor)
        say(f"WARNING: {type(monitor).__name__} failed, and the run goes on without it: {type(error).__name__}: {error}")


class Logs:
    """Writes the records on rank 0. On other ranks every method does nothing."""

    def __init__(self, config: Config, is_writer: bool, first_step: int, monitors: list[Monitor] | None = None) -> None:
        self.writing, self.monitors = is_writer, [] if monitors is None else monitors
        self.broken = ""  # why the run's records cannot be written any more
        if not is_writer:
            return
        self.config, self.directory = config, Path(resolved(config.log.dir))
        self.file = self.directory / "metrics.jsonl"
        self.metrics: IO[str]
        self.was_deleted = False  # whether the folder or metrics.jsonl was deleted since the run began
        try:
            self._open(first_step)
        except OSError as error:
            right = "a folder with room, that can be written"
            raise LogError(str(self.directory), f"its records cannot be begun: {error.strerror}", right) from None
        self.steps, self.started, self.first_step = config.train.steps, time.monotonic(), first_step  # since when time is counted
        self.last_line = 0.0
        self.named: set[int] = set()  # stragglers that were reported

    def say(self, text: str) -> None:
        """Prints a line on the console."""
        if self.writing:
            print(text, flush=True)

    def step(self, figures: dict[str, Any], stragglers: dict[int, float]) -> None:
        """Records a step; docs/run_folder.md explains the keys. `stragglers`: by rank, seconds of their own work in a step."""
        if not self.writing:
            return
        self._record(figures | ({"stragglers": list(stragglers)} if stragglers else {}))
        new = {rank: seconds for rank, seconds in stragglers.items() if rank not in self.named}
        self.named = set(stragglers)
        for rank, seconds in new.items():
            self.say(
                f"step {figures['step']}: rank {rank} holds up the others, busy for {seconds:.2f} s of {figures['step_seconds']:.2f} s"
            )
        now, shown = time.monotonic(), any(monitor.shows_steps for monitor in self.monitors)
        if not shown and (now - self.last_line > CONSOLE_SECONDS or figures["step"] in (self.first_step, self.steps)):
            self.last_line = now
            left = (now - self.started) / (figures["step"] - self.first_step + 1) * (self.steps - figures["step"])
            self.say(f"step {figures['step']}/{self.steps}  {in_brief(figures)}  {left:.0f} s left")

    def validation(self, step: int, loss: float) -> None:
        """Records a validation's loss."""
        if self.writing:
            self._record({"step": step, "valid_loss": loss})

    def skipped(self, figures: "StepMetrics", first: int, last: int) -> None:
        """Records a step that was not taken, and its samples `first` to `last` in the run's order."""
        if not self.writing:
            return
        self.say(f"step {figures.step} skipped: loss {figures.loss:g}, gradient norm {figures.grad_norm:g}, samples {first}–{last}")
        record = {"step": figures.step, "first_sample": first, "last_sample": last, "loss": figures.loss, "grad_norm": figures.grad_norm}
        with self._recording(figures.step), (self.directory / "skipped.jsonl").open("a", encoding="utf-8") as out:
            out.write(as_json(record) + "\n")

    def reopen(self, first_step: int) -> None:
        """Forgets what was recorded from `first_step` on, because the run went back to it."""
        if self.writing:
            with self._recording(first_step):
                self.metrics.close()
                self.metrics = open_metrics(self.file, first_step)
            self.started, self.first_step = time.monotonic(), first_step

    def _open(self, first_step: int) -> None:
        """Makes the run's folder and opens the files in it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        config = self.config
        if (source := source_of(config)) is not None:  # so that the folder has all that its config names
            write_whole(self.directory / COPY, source.text)
            config = config.model_copy(update={"model": config.model.model_copy(update={"source": COPY})})
        write_whole(self.directory / "config.json", config.model_dump_json(by_alias=True, indent=2) + "\n")
        self.metrics = open_metrics(self.file, first_step)
        for monitor in self.monitors:
            monitor.open(self.config, self.directory, first_step, self.say)

    def _record(self, figures: dict[str, Any]) -> None:
        with self._recording(figures["step"]):
            self.metrics.write(as_json(figures) + "\n")
            self.metrics.flush()
        for monitor in list(self.monitors):
            with surviving(monitor, self.monitors, self.say):
                monitor.record(figures)

    @contextmanager
    def _recording(self, step: int) -> Iterator[None]:
        """A context for writing a record of `step`. If the folder was deleted, records begin anew. An error sets `broken`."""
        try:
            if not is_there(self.file, self.metrics):
                self._open_again(step)
            yield
        except OSError as error:
            if not self.broken:
                self.broken = error.strerror or str(error)
                self.say(f"ERROR: the run's records cannot be written any more ({self.broken}): it saves a checkpoint and ends")

    def _open_again(self, step: int) -> None:
        if not self.was_deleted:
            self.say(f"WARNING: {self.file} was deleted while the run wrote it; it begins anew with step {step}")
        self.was_deleted = True
        self.metrics.close()
        for monitor in self.monitors:
            monitor.close(quietly=True)
        self._open(step)

    def close(self) -> None:
        """Closes the files. It may be called twice."""
        if self.writing:
            with suppress(OSError):  # every record was flushed, or the failure was reported
                self.metrics.close()


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
