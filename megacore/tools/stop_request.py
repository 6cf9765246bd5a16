"""Requests to stop a run, by a signal or a file."""

import signal
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # SIGHUP: the terminal was closed
STOP = "STOP"  # a file of this name in log.dir is a request too, as long as it exists
LOOK_SECONDS = 1.0  # between looks at the file system, which may be slow


def requests() -> list[signal.Signals]:
    """The signals that ask this process to stop. Under nohup, SIGHUP does not."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in REQUESTS if number != signal.SIGHUP or not ignored]


class StopRequest:
    """A context in which SIGINT (Ctrl-C), SIGTERM, SIGUSR1, SIGHUP (a closed terminal) or a file `STOP` in
    `folder` set `requested`, and do not end the process.

    A request may reach only some ranks, so ranks agree on it between steps. Enter it before torch is
    imported, so that it also notices requests during start-up.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: where to look for the file; None: nowhere."""
        self.file = None if folder is None else folder / STOP
        self.signalled = False
        self.looked = 0.0
        self.found = False

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop."""
        if self.file is not None and time.monotonic() - self.looked > LOOK_SECONDS:
            with suppress(OSError):  # the file system does not answer now
                self.found = self.file.exists()
            self.looked = time.monotonic()
        return self.signalled or self.found

    def __enter__(self) -> "StopRequest":
        self.previous = {number: signal.signal(number, self._note) for number in requests()}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signalled = True

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
