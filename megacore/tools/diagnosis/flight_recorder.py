"""Records what a rank has begun and where it waits, so that a hang can be explained.

A note costs about a microsecond and touches no device. The line of code where a thread is, is not recorded but looked up when
needed (`line_of`). With NCCL an operation has begun when it is enqueued, and only the host's waits are noted. Events say
how far the device is (`device.DeviceWork`).
"""

import re
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from megacore.tools.diagnosis.device_work import DeviceWork

KEPT = 8  # the last operations that a channel remembers: ranks disagree on one of them
Note = tuple[int, str, str, torch.Size, torch.dtype]  # number, name of the group, operation, shape, dtype

FOR_DEVICE = "waiting for its device"  # a phase
DATA = "data"  # what the host waits for in `FlightRecorder.spent`, besides groups


class Channel:
    """The operations that a rank has begun over one communicator, or over one link between two ranks.

    All members begin the same operations in the same order, so equal numbers mean one operation. If the operations differ, the ranks
    disagree. `during` and `waiting_for` return it as a context that notes that the rank waits.
    """

    __slots__ = ("begun", "ledger", "name", "recent", "since", "wanted")

    def __init__(self, ledger: "FlightRecorder") -> None:
        self.ledger = ledger
        self.begun = self.wanted = 0
        self.name = ""  # of the group for whose operation it waits: groups with equal ranks share a channel
        self.since = 0.0
        self.recent: deque[Note] = deque(maxlen=KEPT)

    def begin(self, name: str, operation: str, x: Tensor) -> int:
        """Notes that this rank begins its part of the channel's next operation, on `x`; returns its number."""
        self.begun += 1
        self.recent.append((self.begun, name, operation, x.shape, x.dtype))
        self.ledger.events += 1
        return self.begun

    def during(self, name: str, operation: str, x: Tensor) -> "Channel":
        """A context around an operation that this rank begins and waits for."""
        self.wanted, self.name = self.begin(name, operation, x), name
        return self

    def waiting_for(self, number: int, name: str = "") -> "Channel":
        """A context around waiting for the operation `number` of the group `name`."""
        self.wanted, self.name = number, name
        return self

    def __enter__(self) -> None:
        self.since = time.perf_counter()
        self.ledger.waiting = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        ledger = self.ledger
        seconds = time.perf_counter() - self.since
        ledger.waited += seconds
        ledger.spent[self.name] = ledger.spent.get(self.name, 0.0) + seconds
        ledger.waiting = None
        ledger.events += 1


class FlightRecorder:
    """One rank's channels, and its work between their operations."""

    def __init__(self, device: DeviceWork | None = None) -> None:
        """`device`: the work of a GPU; None where the CPU computes."""
        self.device = device
        self.events = 0  # number of notes: while it does not grow, the rank stands still
        self.step = 0
        self.phase: tuple[str, int, int] = ("starting", -1, -1)  # with microbatch and chunk, where it has them
        self.waiting: Channel | None = None
        self.worker: int | None = None  # the thread of this process that the main thread waits for
        self.waited = 0.0  # seconds spent waiting for other ranks
        self.spent: dict[str, float] = {}  # seconds that the host waited, by the name of a group, and for DATA
        self.channels: dict[str, Channel] = {}

    def mark(self, phase: str, microbatch: int = -1, chunk: int = -1) -> None:
        """Notes the phase of work that begins or continues. It also tells apart the work of engines with their own collectives."""
        self.phase = (phase, microbatch, chunk)
        self.events += 1

    def progress(self) -> int:
        """A number that grows whenever the host notes something or its device has done something. Any thread may ask."""
        return self.events + (0 if self.device is None else self.device.look())

    def take_waited(self) -> float:
        """Seconds spent waiting for other ranks since this was asked last."""
        waited, self.waited = self.waited, 0.0
        return waited

    def take_spent(self) -> dict[str, float]:
        """Seconds that the host waited since this was asked last, by the name of a group, and for DATA."""
        spent, self.spent = self.spent, {}
        return spent

    def channel(self, ranks: Sequence[int]) -> Channel:
        """The channel of a communicator over `ranks`."""
        return self._open(channel_of(ranks))

    def link(self, source: int, target: int) -> Channel:
        """The channel for transfers from rank `source` to rank `target`."""
        return self._open(f"{source}>{target}")

    def _open(self, key: str) -> Channel:
        if key not in self.channels:
            self.channels[key] = Channel(self)
        return self.channels[key]


def channel_of(ranks: Sequence[int]) -> str:
    """The key of a communicator's channel, from which `ranks_of` reads its ascending ranks: all 4,096 are ``0-4095``, every fourth
    of sixteen ``0-12/4``, and two pairs ``0-1,8-9``."""
    runs, first = [], 0
    while first < len(ranks):
        stride = ranks[first + 1] - ranks[first] if first + 1 < len(ranks) else 1
        last = first
        while last + 1 < len(ranks) and ranks[last + 1] - ranks[last] == stride:
            last += 1
        runs.append(f"{ranks[first]}-{ranks[last]}" + (f"/{stride}" if stride > 1 else ""))
        first = last + 1
    return ",".join(runs)


def ranks_of(channel: str) -> list[int]:
    """The ranks of a channel, by its key."""
    if ">" in channel:
        return [int(rank) for rank in channel.split(">")]
    runs = (re.split("[-/]", run) for run in channel.split(","))
    return [rank for first, last, *stride in runs for rank in range(int(first), int(last) + 1, *map(int, stride))]


STANDARD = (sysconfig.get_paths()["stdlib"], str(Path(torch.__file__).parent), __file__)


def is_ours(file: str) -> bool:
    """Whether a line of this file tells what a thread is doing. Lines of the standard library, PyTorch and the ledger do not."""
    return not file.startswith((*STANDARD, "<frozen")) or ("site-packages" in file and not file.startswith(STANDARD[1:]))


def line_of(thread: int) -> str:
    """The innermost line that `is_ours` of a thread of this process."""
    frame = innermost = sys._current_frames().get(thread)
    while frame is not None and not is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "an unknown line"
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} ({frame.f_code.co_name})"
