"""Restarts a run until it has finished. The launcher's command is a child process.

A launcher that gets a signal gives its ranks little time, sometimes half a minute, and does not forward every
signal. So the
supervisor sends none: it writes a file `STOP` to the run's folder, and every rank saves and ends at the next
step.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import IO

from pydantic import ValidationError

from megacore.distributed.processes import ENDED, process_state
from megacore.errors import ConfigError, shown
from megacore.files import open_plain, read_plain
from megacore.records import Record, complaint
from megacore.tools.diagnosis.failure_note import FAILURE, NOT_MET, FailureNote
from megacore.tools.metrics_file import newest
from megacore.tools.processes import descendants
from megacore.tools.relaunch.child_watch import ChildWatch
from megacore.tools.relaunch.fleet import Machines, TooFew
from megacore.tools.stop_request import STOP, requests

STOPPED = 75
PREFIX = "supervise: "
LOOK_SECONDS = 0.2
WAIT_SECONDS = 5.0  # between looks for machines, where there are too few
MOST_BACKOFF = 300.0
END_SECONDS = 10.0  # for a launcher to end its ranks
NOTE_BYTES = 65536  # of the note about a failure
SAME_REASON = 3  # starts in a row that end for one reason without progress, after which no more are tried
# Numbers that may differ between two failures with the same cause.
COUNTERS = re.compile(
    r"0[xX][0-9a-fA-F]+|(?:(?<=#)|(?<=\bstep )|(?<=\.py:))\d+|\b\d[\d.,]*(?= (?:s|MiB|GiB)\b)"
)
LOST_SECONDS = 60.0  # for a launcher to end by itself after a host was lost
# The deepspeed launcher starts ranks through pdsh and ssh, which would wait for ever for a host whose network
# is cut.
NOTICE = "-o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=4"


class FailureRecord(Record):
    """The file `failure_note.FAILURE`, as far as the supervisor needs it."""

    reason: str = ""  # empty: the run has not recorded any
    hosts: tuple[str, ...] = ()  # that were lost


class Supervisor:
    """One run, from its first start to its end."""

    def __init__(
        self,
        command: list[str],
        folder: Path,
        *,
        fleet: Machines | None = None,
        restarts: int = 3,
        backoff: float = 2.0,
        stall: float = 1800.0,
        steps: int = 0,
        listener: Callable[[str], None] | None = None,
    ) -> None:
        """`command` starts the run, which has `steps` steps and the log.dir `folder`.

        `fleet`: the machines, if they may change.

        `restarts`: how many restarts in a row may bring no progress. `backoff`: seconds before the first of
        them, doubled with each.
        `stall`: if nothing new is in `folder` for so many seconds, the run is restarted. `listener` gets
        every line of output.
        """
        self.command, self.folder, self.fleet, self.listener = command, folder, fleet, listener
        self.restarts, self.backoff, self.stall, self.steps = restarts, backoff, stall, steps
        self.child: subprocess.Popen[str] | None = None
        self.watch = ChildWatch(folder, stall)
        self.news, self.since = (0, 0), 0.0  # the progress that was seen last, and when
        self.lost: float | None = None  # when a host was
        self.failure = FailureRecord()  # of the last start
        self.requests = 0  # to stop
        self.first_signal = 0  # that asked
        self.resizing = False  # whether the run was asked to stop because its machines have changed
        self.stalled = False  # whether it was ended because nothing happened
        self.request = 0  # when `_ask` wrote its file, by the file system's clock; 0: it has not
        self.best = (0, 0)  # the furthest progress before the last start
        self.attempts = 0
        self.found: set[tuple[str, int]] = set()  # checkpoints that were there before the first start

    def run(self) -> int:
        """Restarts the run until it has finished (0), stopped on request (75), is refused (2), or fails
        without progress (its status).
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.found = self._saved()
        with self.watch:
            return self._run()

    def _saved(self) -> set[tuple[str, int]]:
        """The checkpoints, by the clock of the file system's host, which may differ from this one's."""
        found = set()
        for path in (self.folder / "checkpoints").glob("step_????????"):
            with contextlib.suppress(FileNotFoundError):  # it was removed just now
                found.add((path.name, path.stat().st_mtime_ns))
        return found

    def _run(self) -> int:
        initial = self.best = self.progress()
        fruitless = same_reason = 0
        last_cause = ""
        waits = False
        listens = threading.current_thread() is threading.main_thread()
        previous = {number: signal.signal(number, self._note) for number in requests()} if listens else {}
        try:
            while True:
                try:
                    status = self._attempt()
                    waits = False
                except TooFew as error:
                    if not self.attempts:
                        raise
                    if not waits:
                        say(f"waits for machines: {error.wrong}")
                    waits = True
                    self._sleep(WAIT_SECONDS)
                    if self.asked() or (self.folder / STOP).exists():
                        say("stopped on request; the same command resumes from there")
                        return STOPPED
                    continue
                except (ConfigError, OSError) as error:
                    if not self.attempts:
                        raise
                    # nobody answers now: perhaps later
                    say(str(error), "" if isinstance(error, ConfigError) else PREFIX)
                    self.failure = FailureRecord()
                    status = 2
                now = self.progress()
                gained = self._gains(now)
                best = self.best = (max(self.best[0], now[0]), max(self.best[1], now[1]))
                if status == 0 and max(now) >= self.steps:
                    return 0
                if self.asked() or (status == STOPPED and not self.resizing and not self.stalled):
                    say("stopped on request; the same command resumes from there")
                    return STOPPED
                if self.resizing:
                    self._withdraw()
                    if gained or status == STOPPED:
                        continue
                # else it was going well and cannot go on, for example because of a full disk
                if status == 2 and now == initial:
                    return 2
                if (self.folder / STOP).exists():
                    say(f"stopped on request; remove {self.folder / STOP} to resume")
                    return STOPPED
                cause = cause_of(self.failure.reason)
                is_same = bool(cause) and cause == last_cause
                same_reason = 0 if gained else same_reason + 1 if is_same else 1
                last_cause = cause
                fruitless = 0 if gained else fruitless + 1
                why = f": {shown(self.failure.reason)}" if self.failure.reason else ""
                given_up = ""
                if cause and same_reason >= SAME_REASON:
                    given_up = f"{SAME_REASON} starts in a row ended for the same reason, without progress"
                elif fruitless > self.restarts:
                    given_up = f"{self.restarts} restarts in a row brought no progress"
                if given_up:
                    say(f"given up: {given_up} beyond step {max(best)} (status {status}){why}")
                    return status if status > 0 else 1  # a launcher that was killed may return 0
                pause = min(MOST_BACKOFF, self.backoff * 2 ** min(max(0, fruitless - 1), 20))
                say(
                    f"the run ended with status {status} at step {now[1]}, checkpoint {now[0]}{why}; again "
                    f"in {pause:.0f} s"
                )
                self._sleep(pause)
                if self.asked():
                    return STOPPED
        finally:
            self._withdraw()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def asked(self) -> bool:
        """Whether somebody wants the run to stop."""
        return self.requests > 0

    def _gains(self, progress: tuple[int, int]) -> bool:
        return any(new > old for new, old in zip(progress, self.best, strict=True))

    def progress(self) -> tuple[int, int]:
        """The steps of the newest checkpoint and of the last logged line; 0 if there is none."""
        names: list[str] = []
        with contextlib.suppress(OSError):  # the file system does not answer now
            names = [path.name for path in (self.folder / "checkpoints").glob("step_*")]
        steps = [int(found[1]) for name in names if (found := re.fullmatch(r"step_(\d+)", name))]
        logged: list[int] = []
        with contextlib.suppress(OSError), open_plain(self.folder / "metrics.jsonl") as file:
            logged = [step for step, _ in newest(file)]
        return max(steps, default=0), max(logged, default=0)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self.requests:
            return  # both the kernel and the shell send it when the terminal is closed
        self.requests += 1
        if self.requests == 1:
            self.first_signal = number
            say(
                f"{signal.Signals(number).name}: the run is asked to stop at its next step; once more "
                "ends it at once"
            )
            self._ask()
        elif self.child is not None:
            end_tree(self.child.pid, signal.SIGKILL)

    def _ask(self) -> None:
        file = self.folder / STOP
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # somebody's own request says the same
            with contextlib.suppress(FileExistsError), file.open("x", encoding="utf-8"):
                self.request = file.stat().st_mtime_ns
        except OSError as error:
            say(f"{file} cannot be written, so the run does not hear of it: {error.strerror}")

    def _withdraw(self) -> None:
        """Removes the file that `_ask` wrote, but nobody else's."""
        file = self.folder / STOP
        self.resizing = False
        if self.request and file.exists() and file.stat().st_mtime_ns == self.request:
            file.unlink()
        self.request = 0

    def _attempt(self) -> int:
        """Starts the run once and waits for its end."""
        command = self.command if self.fleet is None else self.fleet.command(self.command, self.folder)
        if self.attempts and self._saved() - self.found:
            command = [*command, "checkpoint.resume=auto"]  # whatever the first start was to begin from
        self.attempts += 1
        self.stalled = False
        note = self.folder / FAILURE
        note.unlink(missing_ok=True)
        FailureNote(self.folder, NOT_MET).begin()  # a rank may fail before rank 0 has started
        self.failure = FailureRecord()
        pipe = None if self.listener is None else subprocess.PIPE
        try:
            self.child = subprocess.Popen(
                command,
                stdout=pipe,
                stderr=pipe and subprocess.STDOUT,
                text=True,
                errors="replace",  # a rank may print anything
                env=environment(unbuffered=pipe is not None),  # a listener hears what is said when it is said
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise ConfigError(
                command[0], f"cannot be started: {getattr(error, 'strerror', error)}", "a launcher's command"
            ) from None
        self.watch.tell(self.child.pid)
        reader = threading.Thread(target=self._listen, args=(self.child.stdout,), daemon=True)
        if self.listener is not None:
            reader.start()
        self.news, self.since, self.lost = self.progress(), time.monotonic(), None
        failed = False
        while self.child.poll() is None:
            time.sleep(LOOK_SECONDS)
            try:
                self._look(self.child.pid, note)
            except Exception as error:  # a run that goes on unwatched is worse than a look that fails
                if not failed:
                    what = (
                        str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
                    )
                    say(f"could not look after the run, and tries on: {what}")
                failed = True
        if self.listener is not None:
            reader.join(END_SECONDS)
        self.watch.tell(0)
        self.failure = self._read_note(note)
        if self.fleet is not None:
            self.fleet.ended(
                gained=self._gains(self.progress()),
                failed=self.child.returncode not in (0, STOPPED),
                lost=self.failure.hosts,
            )
        return self.child.returncode

    def _look(self, launcher: int, note: Path) -> None:
        """Looks whether the run gets on, and whether it has lost a host or its machines have changed."""
        if (latest := self.progress()) != self.news:
            self.news, self.since = latest, time.monotonic()
        if time.monotonic() - self.since > self.stall:
            say(f"nothing new in {self.folder} for {self.stall:.0f} s: the run is ended")
            self.stalled = True
            end_tree(launcher)
        if self.lost is None and self._read_note(note, is_quiet=True).hosts:
            self.lost = time.monotonic()
        if self.lost is not None and time.monotonic() - self.lost > LOST_SECONDS:
            end_tree(launcher)
        if self.fleet is None or self.resizing or self.requests or self.lost is not None:
            return
        if why := self.fleet.changed(self._gains(self.news)):
            say(f"{why}; the run is asked to save and stop at its next step, and is then restarted")
            self.resizing = True
            self._ask()

    def _read_note(self, note: Path, is_quiet: bool = False) -> FailureRecord:
        """Why the run has failed, and which hosts it has lost. `is_quiet`: a damaged note is not reported."""
        try:
            return FailureRecord.model_validate_json(read_plain(note, NOTE_BYTES))
        except FileNotFoundError:
            return FailureRecord()
        except (OSError, ValidationError) as error:
            what = complaint(error) if isinstance(error, ValidationError) else error.strerror
            if not is_quiet:
                say(f"{note} does not say why the run has ended: {what}")
            return FailureRecord()

    def _listen(self, lines: IO[str]) -> None:
        assert self.listener is not None
        for line in lines:
            # nobody hears it any more; but a run whose pipe is full would wait for ever
            with contextlib.suppress(OSError, ValueError):
                self.listener(line)

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.requests:
            time.sleep(LOOK_SECONDS)


def cause_of(reason: str) -> str:
    """What two reasons have in common if their cause is the same: the first clause, without counters."""
    first_clause, *_ = reason.split("; ")  # the others are about ranks that wait
    return COUNTERS.sub("#", first_clause)


def environment(*, unbuffered: bool) -> dict[str, str]:
    """A launcher's: this process's own, with what lets ssh notice a host that is
    gone unless that is said already.
    """
    own = {"PYTHONUNBUFFERED": "1"} if unbuffered else {}
    said = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
    # ssh takes the first of two settings
    return os.environ | own | {"PDSH_SSH_ARGS_APPEND": f"{said} {NOTICE}".strip()}


def end_tree(pid: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Ends a launcher and all processes that it has started, with SIGKILL if the first signal does not."""
    those = [pid, *descendants(pid)]
    send(those[:1], number)
    deadline = time.monotonic() + (END_SECONDS if number != signal.SIGKILL else 0.0)
    while time.monotonic() < deadline and any(process_state(each) not in ENDED for each in those):
        time.sleep(LOOK_SECONDS)
    send(those, signal.SIGKILL)


def send(pids: list[int], number: signal.Signals) -> None:
    """Sends a signal to processes, some of which may have ended."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def say(line: str, prefix: str = PREFIX) -> None:
    """Writes a line to stderr in one write. A closed terminal is no error."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{prefix}{line}\n")
        sys.stderr.flush()
