"""Why a run ends before its last step, or goes back: somebody asks it to stop, or too many steps in a row are skipped."""

import signal
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # requests are heard before torch is imported
    from megacore.train.metrics import StepMetrics

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # SIGHUP: the terminal was closed
STOP = "STOP"  # a file of this name in log.dir is a request too, as long as it exists
LOOK_SECONDS = 1.0  # between looks at the file system, which may be slow


def requests() -> list[signal.Signals]:
    """The signals that ask this process to stop. Under nohup, SIGHUP does not."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in REQUESTS if number != signal.SIGHUP or not ignored]


class StopAgreed(Exception):
    """All ranks have agreed to stop here, at the boundary of a step."""


class StopRequest:
    """A context in which SIGINT (Ctrl-C), SIGTERM, SIGUSR1, SIGHUP (a closed terminal) or a file `STOP` in `folder` set `requested`, and
    do not end the process.

    A request may reach only some ranks, so ranks agree on it between steps. Enter it before torch is imported, so that it also
    notices requests during start-up.
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


class TooManySkips(RuntimeError):
    """Too many steps in a row were skipped."""


class Skips:
    """Counts skipped steps in a row, the same on every rank."""

    def __init__(self, limit: int, max_rollbacks: int) -> None:
        """`limit`: how many steps in a row are too many. `max_rollbacks`: how often the run may go back, however often it is started."""
        self.limit, self.max_rollbacks = limit, max_rollbacks
        self.in_a_row = 0
        self.skipped = 0.0  # steps skipped so far
        self.rollbacks = 0  # how often the run has gone back

    def restore(self, skipped: float, rollbacks: int) -> None:
        """Goes on from a checkpoint. One that a run goes back to does not know of that."""
        self.skipped, self.rollbacks = skipped, max(self.rollbacks, rollbacks)

    def saw(self, figures: "StepMetrics") -> bool:
        """Whether this step was skipped."""
        new = figures.skipped > self.skipped
        self.skipped = figures.skipped
        self.in_a_row = self.in_a_row + 1 if new else 0
        return new

    def too_many(self) -> bool:
        """Whether the run must go back now. Raises `TooManySkips` if it may not."""
        if self.in_a_row < self.limit:
            return False
        if self.rollbacks >= self.max_rollbacks:
            wrong = f"{self.in_a_row} steps in a row were skipped: their loss or gradient was not finite, or a spike"
            raise TooManySkips(f"{wrong} (optim.max_skips, optim.max_rollbacks; their samples are in skipped.jsonl)")
        self.rollbacks += 1
        self.in_a_row = 0
        return True
