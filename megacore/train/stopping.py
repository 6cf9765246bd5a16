"""Ending a run on request, after a saved step."""

import signal
import time
from pathlib import Path
from types import FrameType, TracebackType

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # the last: the terminal was closed
STOP = "STOP"  # a file of this name in log.dir asks for the same, for as long as it is there
LOOK_SECONDS = 1.0  # between looks at a file system that may be far away


def requests() -> list[signal.Signals]:
    """The signals that ask this process to stop: under nohup a closed terminal does not."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in REQUESTS if number != signal.SIGHUP or not ignored]


class StopAgreed(Exception):
    """All ranks have agreed to stop here, at the boundary of a step."""


class StopRequest:
    """While entered, SIGINT (Ctrl-C), SIGTERM, SIGUSR1 and SIGHUP (a closed terminal) set `requested` instead of ending the process; so
    does a file `STOP` in `folder`.

    A request may reach some ranks only, so ranks agree on it at the boundary of a step. Entered before torch is imported, it
    also notes what comes during start-up.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: where to look for the file; None: not at all."""
        self.file = None if folder is None else folder / STOP
        self.signalled = False
        self.looked = 0.0
        self.found = False

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop."""
        if self.file is not None and time.monotonic() - self.looked > LOOK_SECONDS:
            self.found = self.file.exists()
            self.looked = time.monotonic()
        return self.signalled or self.found

    def __enter__(self) -> "StopRequest":
        self.previous = {number: signal.signal(number, self._note) for number in requests()}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signalled = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
