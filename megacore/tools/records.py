"""A run's records, written by rank 0: config.json, metrics.jsonl, skipped.jsonl;
and the lines on the console.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from megacore.config import Config
from megacore.config.source import COPY, source_of
from megacore.errors import LogError
from megacore.files import open_plain, write_whole
from megacore.tools.metrics_file import as_json, recorded
from megacore.train.logs import Monitor, Monitors, Report

CONSOLE_SECONDS = 5.0  # between lines if there is no terminal to redraw


class Records(Monitor):
    """Writes them. Raises `LogError` where it cannot, and begins anew where somebody has deleted them."""

    def __init__(self) -> None:
        # all who watch the run: some keep files in the same folder, and then begin anew too
        self.watchers = Monitors((), print)
        self.metrics: IO[str] | None = None
        self.was_deleted = False  # whether the folder or metrics.jsonl was deleted since the run began

    def open(self, config: Config, folder: Path, first_step: int, say: Callable[[str], None]) -> None:
        """Makes the run's folder, and opens the files in it."""
        self.config, self.folder, self.file, self.say = config, folder, folder / "metrics.jsonl", say
        try:
            self._open(first_step)
        except OSError as error:
            right = "a folder with room, that can be written"
            raise LogError(str(folder), f"its records cannot be begun: {error.strerror}", right) from None

    def record(self, figures: dict[str, Any]) -> None:
        """Writes a line of metrics.jsonl."""
        with self._recording(figures["step"]) as metrics:
            metrics.write(as_json(figures) + "\n")
            metrics.flush()

    def skipped(self, record: dict[str, Any]) -> None:
        """Writes a line of skipped.jsonl."""
        with (
            self._recording(record["step"]),
            (self.folder / "skipped.jsonl").open("a", encoding="utf-8") as out,
        ):
            out.write(as_json(record) + "\n")

    def reopen(self, first_step: int) -> None:
        """Forgets what was recorded from `first_step` on."""
        with self._recording(first_step) as metrics:
            metrics.close()
            self.metrics = open_metrics(self.file, first_step)

    def close(self, *, quietly: bool = False) -> None:
        """Closes the files."""
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
        """A context for writing a record of `step`."""
        assert self.metrics is not None
        try:
            if not is_there(self.file, self.metrics):
                self._begin_anew(step)
            yield self.metrics
        except OSError as error:
            raise LogError(
                str(self.file), error.strerror or str(error), "room, or a folder that can be written"
            ) from None

    def _begin_anew(self, step: int) -> None:
        if not self.was_deleted:
            self.say(
                f"WARNING: {self.file} was deleted while the run wrote it; it begins anew with step {step}"
            )
        self.was_deleted = True
        self.close()
        others = [monitor for monitor in self.watchers if monitor is not self]
        for monitor in others:
            with self.watchers.surviving(monitor):
                monitor.close(quietly=True)
        self._open(step)
        for monitor in others:
            if monitor in self.watchers:
                with self.watchers.surviving(monitor):
                    monitor.open(self.config, self.folder, step, self.say)


class Console(Monitor):
    """Prints lines about steps; those about each step only as long as nobody draws them on the terminal."""

    def __init__(self) -> None:
        self.watchers: Sequence[Monitor] = ()  # all who watch the run

    def open(self, config: Config, folder: Path, first_step: int, say: Callable[[str], None]) -> None:
        """Begins to count time."""
        self.steps, self.say, self.last_line = config.train.steps, say, 0.0
        self.reopen(first_step)

    def reopen(self, first_step: int) -> None:
        """Begins to count time anew."""
        self.started, self.first_step = time.monotonic(), first_step

    def report(self, report: Report) -> None:
        """Prints a logged step."""
        figures, step = report.figures, report.figures["step"]
        now = time.monotonic()
        shown = any(monitor.shows_steps for monitor in self.watchers)
        if not shown and (now - self.last_line > CONSOLE_SECONDS or step in (self.first_step, self.steps)):
            self.last_line = now
            left = (now - self.started) / (step - self.first_step + 1) * (self.steps - step)
            self.say(f"step {step}/{self.steps}  {in_brief(figures)}  {left:.0f} s left")

    def skipped(self, record: dict[str, Any]) -> None:
        """Prints a step that was not taken."""
        samples = f"{record['first_sample']}–{record['last_sample']}"
        self.say(
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
