"""Requests to stop a run, by a signal or a file."""

import os
import signal
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType

from megacore.tools.interrupt import (
    PASSED_ON_SECONDS,
    SignalThread,
    end_after_grace,
    interrupt,
    status_after_signal,
)

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # SIGHUP: the terminal was closed
STOP = "STOP"  # a file of this name in log.dir is a request too, as long as it exists
LOOK_SECONDS = 1.0  # between looks at the file system, which may be slow


def requests() -> list[signal.Signals]:
    """The signals that ask this process to stop. Under nohup, SIGHUP does not."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in REQUESTS if number != signal.SIGHUP or not ignored]


class StopRequest:
    """A context in which SIGINT (Ctrl-C), SIGTERM, SIGUSR1, SIGHUP (a closed terminal) or a file `STOP`
    in `folder` ask the run to stop.

    Until `begin` is called there is nothing to save, so a signal ends the process with status
    128 + signal. From then on it sets `requested`, and a second Ctrl-C ends the process at once.

    A request may reach only some ranks, so ranks agree on it between steps. Enter the context before
    torch is imported, so that it also notices requests during start-up.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: where to look for the file; None: nowhere."""
        self.file = None if folder is None else folder / STOP
        self.begun = False
        self.signalled = False
        self.first_interrupt: float | None = None  # time of the first Ctrl-C since `begin`
        self.looked = 0.0
        self.found = False

    def begin(self) -> None:
        """From here on a request lets the step end, and saves it."""
        self.begun = True

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop."""
        if self.file is not None and time.monotonic() - self.looked > LOOK_SECONDS:
            with suppress(OSError):  # the file system does not answer now
                self.found = self.file.exists()
            self.looked = time.monotonic()
        return self.signalled or self.found

    def __enter__(self) -> "StopRequest":
        self.contexts = ExitStack()
        self.contexts.enter_context(SignalThread(self._react))
        for number in requests():
            previous = signal.signal(number, self._handle)
            self.contexts.callback(signal.signal, number, previous)
        return self

    def __exit__(self, *_: object) -> None:
        self.contexts.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Take a signal in the main thread."""
        self.signalled = True
        if not self.begun:
            interrupt(number, frame)

    def _react(self, number: int) -> None:
        """React in the signal thread, even while the main thread waits in C++."""
        if not self.begun:
            end_after_grace(number, unless=lambda: self.begun)
        elif number == signal.SIGINT or (number == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ):
            self._count_interrupt(number)

    def _count_interrupt(self, number: int) -> None:
        """End the process at the second Ctrl-C, which torchrun passes on as SIGTERM."""
        if self.first_interrupt is None:
            if number != signal.SIGINT:
                return
            self.first_interrupt = time.monotonic()
            if self.file is not None:  # one rank of the run prints it
                line = "Ctrl-C: the run saves and stops after this step; once more ends it at once"
                print(line, file=sys.stderr, flush=True)
        elif time.monotonic() - self.first_interrupt > PASSED_ON_SECONDS:
            os._exit(status_after_signal(number))
