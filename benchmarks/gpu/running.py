"""Runs the parts of a slice, each in a process of its own, and writes down what they
find while they find it.
"""

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.gpu.parts import Part, Slice
from benchmarks.gpu.report import OK, STOPPED, UNDER_WAY, Report
from megacore.tools.cli import leave

# Torch is imported once, and no process inherits a device that another has opened.
CONTEXT = get_context("forkserver")
# Modules that parts share. Their import must start no threads: a fork has none of them, and would hang.
PRELOADED = ("torch", "benchmarks.training")
PRELOADED_IN_DRY_RUNS = ("benchmarks.kernel_operations", "pytest", "torch._dynamo")
TAIL = 4000  # characters of a log that JSON keeps
POLL_SECONDS = 0.2  # between two looks at the parts that run
LEAST_SECONDS = 5  # a part is not begun with less
# Of a dry run, which has no GPU: kernels are interpreted, and nothing is compiled.
DRY = {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
ENDING = (signal.SIGTERM, signal.SIGINT)  # the signals that end a run


class Rows:
    """Where a part puts what it finds: one JSON object a line, at once.

    A row with a key `failed` says what is wrong.
    """

    def __init__(self, path: Path, dry: bool, until: float, folder: Path) -> None:
        """`until`: when the part is ended, by `time.monotonic`; `folder`: for
        files that come with the results.
        """
        self.path, self.dry, self.until, self.folder = path, dry, until, folder

    def add(self, **fields: Any) -> None:
        """Writes a row."""
        with self.path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(fields, default=str) + "\n")

    def left(self) -> float:
        """Seconds until the part is ended."""
        return self.until - time.monotonic()

    def attempt(self, work: Callable[[], dict[str, Any]], **fields: Any) -> None:
        """Adds a row with `fields` and what `work` returns, or with how it failed: others are still tried."""
        try:
            result = work()
        except Exception as error:
            traceback.print_exc()
            result = {"failed": describe_error(error)}
        self.add(**fields, **result)


def describe_error(error: BaseException) -> str:
    """The type of an exception and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


class StopRequest:
    """Whether SIGTERM or Ctrl-C has asked this process to end.

    The parts that run are ended at the next poll.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def listen(self) -> None:
        """Handle both signals from now on."""
        for number in ENDING:
            signal.signal(number, self.receive)

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal."""
        self.signal = signal.Signals(number)


# --- the process of a part ----------------------------------------------------------------------------------


def run_part(part: Part, dry: bool, rows: Path, log: Path, seconds: float, folder: Path) -> None:
    """A part's process: its own session, its output in `log`."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(target, descriptor)
    out = Rows(rows, dry, time.monotonic() + seconds, folder)
    try:
        set_up(dry)
        call(part.function, out, part.arguments)
    except BaseException as error:
        traceback.print_exc()
        out.add(failed=describe_error(error))
        leave(1)
    leave(0)


def call(function: str, rows: Rows, arguments: Sequence[str]) -> None:
    """Call a part's function, which is given as ``module:name``."""
    module, name = function.split(":")
    getattr(import_module(module), name)(rows, *arguments)


def set_up(dry: bool) -> None:
    """As a run sets up a process on a GPU, before CUDA starts; in a dry run one thread."""
    if dry:
        import torch

        torch.set_num_threads(1)
        return
    from megacore.tools.machine.gpu import set_up_environment
    from megacore.tools.settings.load import resolve

    set_up_environment(resolve({}, [], "benchmarks.gpu", 1).config)


def prepare_processes(dry: bool) -> None:
    """Start the process that all parts are forked from; to be called once, when packages are at hand."""
    os.environ.update(DRY if dry else {})
    sys.path[:] = [path or os.getcwd() for path in sys.path]
    CONTEXT.set_forkserver_preload([*PRELOADED, *(PRELOADED_IN_DRY_RUNS if dry else ())])

    # `timeout` and Ctrl-C signal the whole process group. Only this process may act on it, and end the parts.
    resource_tracker.ensure_running()  # the server would start it, and that unblocks the signals
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


# --- the process that starts them ---------------------------------------------------------------------------


@dataclass
class RunningPart:
    """A part that runs: its process, its files, and its entry in the report."""

    part: Part
    process: BaseProcess
    rows: Path
    log: Path
    began: float
    seconds: float  # that it may take
    entry: dict[str, Any]

    @property
    def is_late(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() - self.began > self.seconds

    def copy_rows(self) -> bool:
        """Copy the rows so far into the report; return whether there are new ones."""
        rows = read(self.rows)
        is_new = len(rows) > len(self.entry["rows"])
        self.entry["rows"] = rows
        return is_new

    def finish(self, status: str) -> None:
        """End the process if it still runs, and complete the entry. An empty `status`: it ended by itself."""
        end(self.process)
        self.copy_rows()
        self.entry["seconds"] = round(time.monotonic() - self.began, 1)
        failures = [row["failed"] for row in self.entry["rows"] if "failed" in row]
        is_well = not failures and not self.process.exitcode
        self.entry["status"] = status or (OK if is_well else "failed")
        if self.entry["status"] not in (OK, STOPPED):
            self.entry["log"] = self.log.read_text(encoding="utf-8", errors="replace")[-TAIL:]
            self.entry["why"] = failures[0] if failures else f"exit status {self.process.exitcode}"


@dataclass
class Runner:
    """Runs parts and reports on them."""

    report: Report
    say: Callable[[str], None]
    stop: StopRequest
    patience: float = 1.0  # how many times as long as they should parts may take

    def run(self, slice_: Slice, began: float) -> None:
        """Run the parts of a slice: neighbours with `together` at the same time, others alone.

        The slice's time is counted from `began`, by `time.monotonic`.
        """
        self.report.expect([part.name for part in slice_.parts])
        until = began + self.patience * slice_.seconds
        for together, neighbours in groupby(slice_.parts, key=lambda part: part.together):
            batches = [list(neighbours)] if together else [[part] for part in neighbours]
            for batch in batches:
                if self.stop.signal is None:
                    self.run_batch(batch, until - time.monotonic())
        self.report.close(self.stop.signal)

    def run_batch(self, parts: Sequence[Part], seconds: float) -> None:
        """Run parts at the same time for `seconds` at most, and copy their rows into the report as they come.

        After a signal, those that still run are ended at once.
        """
        if seconds < LEAST_SECONDS:
            for part in parts:
                self.report.entry(part.name)["status"] = "no time was left"
                self.tell(part)
            return
        with tempfile.TemporaryDirectory() as scratch:
            running: list[RunningPart] = []
            try:
                for number, part in enumerate(parts):
                    if self.stop.signal is not None:
                        break
                    limit = min(self.patience * part.seconds, seconds)
                    running.append(self.start(part, Path(scratch) / str(number), limit))
                self.report.write()
                while running and self.stop.signal is None:
                    running = self.poll(running)
            finally:
                for each in running:
                    each.finish(STOPPED)
                self.report.write()

    def start(self, part: Part, scratch: Path, seconds: float) -> RunningPart:
        """Start a part, with its files in a new folder `scratch`."""
        scratch.mkdir()
        rows, log = scratch / "rows", scratch / "log"
        rows.touch()
        log.touch()
        entry = self.report.entry(part.name)
        entry["status"] = UNDER_WAY
        process = CONTEXT.Process(
            target=run_part, args=(part, self.report.dry, rows, log, seconds, self.report.folder)
        )
        process.start()
        return RunningPart(part, process, rows, log, time.monotonic(), seconds, entry)

    def poll(self, running: list[RunningPart]) -> list[RunningPart]:
        """Wait a moment, write down what is new, and return the parts that still run."""
        wait([each.process.sentinel for each in running], timeout=POLL_SECONDS)
        if self.stop.signal is not None:  # a part that has no session yet may have got the signal too
            return running
        left, has_news = [], False
        for each in running:
            is_alive = each.process.is_alive()
            if is_alive and not each.is_late:
                has_news |= each.copy_rows()
                left.append(each)
            else:
                each.finish(f"out of time ({each.seconds:.0f} s)" if is_alive else "")
                self.tell(each.part)
                has_news = True
        if has_news:
            self.report.write()
        return left

    def tell(self, part: Part) -> None:
        """Print how a part ended."""
        entry = self.report.entry(part.name)
        failing = sum("failed" in row for row in entry["rows"])
        failures = f", {failing} rows failed" if failing else ""
        self.say(f"{self.report.name}, {part.name}: {entry['status']}{failures} ({entry['seconds']:.0f} s)")


def read(rows: Path) -> list[dict[str, Any]]:
    """The whole lines so far."""
    lines = rows.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def end(process: BaseProcess) -> None:
    """Ends a part, and whatever it has started."""
    if process.pid is not None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # nothing is left, or it has just begun and has no session yet
            process.kill()
    process.join()
