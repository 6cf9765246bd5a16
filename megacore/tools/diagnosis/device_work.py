"""What a GPU has done of the work that its host gave it, told without waiting for it.

With NCCL the host runs ahead of its device and then waits, so a long step looks like a hang from the host,
and all ranks look alike.
Events tell more: one is recorded before and one behind every forward and backward, and asking one (`query`)
waits for nothing.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol, Self

KEPT = 4096  # pieces of work that are remembered where nobody asks for them


class DeviceEvent(Protocol):
    """A mark in a device's work, as `torch.cuda.Event` with timing is one."""

    def record(self) -> object:
        """Sets the mark behind all that the device was given so far."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def elapsed_time(self, end_event: Self) -> float:
        """Milliseconds from this mark to a later one; both have been passed."""


class DeviceWork:
    """The forwards and backwards that a device was given, and those that it has done. Any thread may ask."""

    def __init__(self, event: Callable[[], DeviceEvent]) -> None:
        """`event`: makes one."""
        self.event = event
        self.pending: deque[tuple[str, bool, DeviceEvent, DeviceEvent]] = deque(maxlen=KEPT)
        self.lock = threading.Lock()
        self.done = 0  # pieces of work
        self.milliseconds = 0.0  # that they took, of those that are timed
        self.timed = True  # what comes next
        self.samples = False  # whether waits are timed: of some steps only, because a step has thousands
        # name of a group, marks before and behind a wait
        self.waits: deque[tuple[str, DeviceEvent, DeviceEvent]] = deque(maxlen=KEPT)
        self.wait_began: DeviceEvent | None = None
        self.fault = ""  # what the device said when it was asked

    def begin(self) -> DeviceEvent:
        """Notes that what the device is given from here on is one piece of work; `end` ends it."""
        began = self.event()
        began.record()
        return began

    def end(self, name: str, began: DeviceEvent) -> None:
        """Notes the end of a piece of work, `name` for people; `began` is from `begin`."""
        ended = self.event()
        ended.record()
        self.pending.append((name, self.timed, began, ended))
        self.look()

    def look(self) -> int:
        """How many pieces of work the device has done."""
        with self.lock:
            try:
                while self.pending and self.pending[0][3].query():
                    _, timed, began, ended = self.pending.popleft()
                    self.milliseconds += began.elapsed_time(ended) if timed else 0.0
                    self.done += 1
            except RuntimeError as error:  # the main thread meets it too, when it next waits
                self.fault = str(error).splitlines()[0]
                self.pending.clear()
            return self.done

    def take_seconds(self) -> float:
        """Seconds that the device took for forwards and backwards since this was asked last."""
        self.look()
        with self.lock:
            seconds, self.milliseconds = self.milliseconds / 1000, 0.0
        return seconds

    def wait_begins(self) -> None:
        """The device is about to wait for an operation."""
        self.wait_began = self.begin() if self.samples else None

    def wait_ends(self, name: str) -> None:
        """It waits for no more than that, an operation over the group `name`."""
        if self.wait_began is not None:
            ended = self.event()
            ended.record()
            self.waits.append((name, self.wait_began, ended))

    def take_waits(self) -> dict[str, float]:
        """Seconds of the waits timed since this was asked last, by the name of a group.

        The device must have passed them.
        """
        waits, self.waits = self.waits, deque(maxlen=KEPT)
        found: dict[str, float] = {}
        for name, began, ended in waits:
            found[name] = found.get(name, 0.0) + began.elapsed_time(ended) / 1000
        return found

    def standing(self) -> str:
        """What the device is at, in words."""
        with self.lock:
            return self.fault or (self.pending[0][0] if self.pending else "")
