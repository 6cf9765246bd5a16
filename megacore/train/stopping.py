"""Ending a run on request, after a saved step."""

import signal
from types import FrameType, TracebackType

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """While entered, SIGINT (Ctrl-C), SIGTERM and SIGUSR1 set `requested` instead of ending the process.

    A signal may reach some ranks only, so ranks agree on it where they exchange figures anyway: on a logged step.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> "StopRequest":
        self.previous = {number: signal.signal(number, self._note) for number in REQUESTS}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
