"""Records what a rank has begun and where it waits, so that a hang can be explained.

A note costs about a microsecond and touches no device. The line of code where a thread is, is not recorded
but looked up when needed (`line_of`). With NCCL an operation has begun when it is enqueued, and only the
host's waits are noted. Events say how far the device is (`device_work.DeviceWork`).
"""

import re
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megacore.distributed.events import Listener, Operation, Slow, Waits
from megacore.pipeline.schedule import REDUCTIONS, TRANSFERS, Action
from megacore.tools.diagnosis.device_work import DeviceEvent, DeviceWork
from megacore.tools.diagnosis.stragglers import Stragglers

EMPTY = torch.empty(0)  # stands for what an operation without tensors is about
KEPT = 8  # the last operations that a channel remembers: ranks disagree on one of them
Note = tuple[int, str, str, torch.Size, torch.dtype]  # number, name of the group, operation, shape, dtype

FOR_DEVICE = "waiting for its device"  # a phase
DATA = "data"  # what the host waits for in `FlightRecorder.spent`, besides groups


class Channel:
    """The operations that a rank has begun over one communicator, or over one link between two ranks.

    All members begin the same operations in the same order, so equal numbers mean one operation. If the
    operations differ, the ranks disagree.
    """

    __slots__ = ("begun", "recent", "wanted")

    def __init__(self) -> None:
        # `wanted`: the number of the operation that the rank waits for, or has waited for last
        self.begun = self.wanted = 0
        self.recent: deque[Note] = deque(maxlen=KEPT)

    def begin(self, name: str, operation: str, x: Tensor) -> int:
        """Notes that this rank begins its part of the channel's next operation, on `x`;
        returns its number.
        """
        self.begun += 1
        self.recent.append((self.begun, name, operation, x.shape, x.dtype))
        return self.begun


class FlightRecorder(Listener):
    """One rank's channels, and its work between their operations."""

    on_error = "keep"  # the watchdog takes silence for a hang

    def __init__(self, device: DeviceWork | None = None, stages: int = 1) -> None:
        """`device`: the work of a GPU; None where the CPU computes.

        `stages`: how many ranks the pipeline has.
        """
        self.device, self.outliers = device, Stragglers(stages)
        self.events = 0  # number of notes: while it does not grow, the rank stands still
        self.step = 0
        # with microbatch and chunk, where it has them
        self.phase: tuple[str, int, int] = ("starting", -1, -1)
        self.waiting: Channel | None = None
        self.since = 0.0  # when the wait began
        self.worker: int | None = None  # the thread of this process that the main thread waits for
        self.waited = 0.0  # seconds spent waiting for other ranks
        # seconds that the host waited, by the name of a group, and for DATA
        self.spent: dict[str, float] = {}
        self.channels: dict[str, Channel] = {}
        self.by_group: dict[str, Channel] = {}  # the same channels, by the keys of groups
        self.before_aside: tuple[float, dict[str, float]] = (0.0, {})
        self.before_wait = self.phase
        self.action_began: DeviceEvent | None = None
        self.compilations = 0  # under way, within each other or in several threads
        self.compiling_since = 0.0

    def on_step_begin(self, step: int, logged: bool) -> None:
        self.step = step
        if self.device is not None:  # the logged steps alone, on whose figures the host waits in any case
            self.device.samples = logged

    def on_phase(self, phase: str) -> None:
        self.mark(phase)

    def on_pause_begin(self, phase: str) -> None:
        self.before_aside = self.waited, dict(self.spent)
        self.mark(phase)
        if self.device is not None:
            self.device.timed = self.device.samples = False

    def on_pause_end(self) -> None:
        self.waited, self.spent = self.before_aside  # only waiting within steps counts
        if self.device is not None:
            self.device.timed = True

    def on_action_begin(self, action: Action) -> None:
        """Of transfers it hears as operations.

        On a GPU, what it computes for a microbatch is a piece of work.
        """
        if action.op not in TRANSFERS:
            self.mark(action.op.value, action.microbatch, action.chunk)
            if self.device is not None and action.op not in REDUCTIONS:  # in which a rank waits for others
                self.action_began = self.device.begin()

    def on_action_end(self, action: Action) -> None:
        if self.device is not None and self.action_began is not None:
            self.device.end(
                f"{action.op.value} of microbatch {action.microbatch} (step {self.step})", self.action_began
            )
            self.action_began = None

    def on_collective(self, operation: Operation) -> tuple[Channel, int, str]:
        group, name = operation.group, operation.name
        if name in ("send", "receive"):
            own = group.ranks[group.rank]
            channel = self.link(own, operation.peer) if name == "send" else self.link(operation.peer, own)
            name = "transfer"
        elif (known := self.by_group.get(group.key)) is not None:
            channel = known
        else:
            channel = self.by_group[group.key] = self.channel(group.ranks)
        self.events += 1
        return (
            channel,
            channel.begin(group.name, name, operation.tensors[0] if operation.tensors else EMPTY),
            group.name,
        )

    def on_wait_begin(self, token: tuple[Channel, int, str]) -> None:
        self.waiting, number, _ = token
        self.waiting.wanted, self.since = number, time.perf_counter()
        if self.device is not None:
            self.device.wait_begins()

    def on_wait_end(self, token: tuple[Channel, int, str]) -> None:
        *_, name = token
        if self.device is not None:
            self.device.wait_ends(name)
        seconds = time.perf_counter() - self.since
        self.waited += seconds
        self.spent[name] = self.spent.get(name, 0.0) + seconds
        self.waiting = None
        self.events += 1

    def on_host_wait_begin(self, what: str, thread: int | None = None) -> None:
        """If the reading `thread` hangs, its line of code is named."""
        self.worker, self.since, self.before_wait = thread, time.perf_counter(), self.phase
        if what != DATA:
            self.mark(FOR_DEVICE)

    def on_host_wait_end(self, what: str) -> None:
        seconds, self.worker = time.perf_counter() - self.since, None
        if what == DATA:
            self.spent[DATA] = self.spent.get(DATA, 0.0) + seconds
        else:
            self.mark(*self.before_wait)
            self.waited += seconds

    def step_waits(self) -> Waits:
        """Takes what was noted since."""
        device, waited, spent = self.device, self.waited, self.spent
        self.waited, self.spent = 0.0, {}
        return (
            Waits(waited, spent)
            if device is None
            else Waits(waited, spent, device.take_seconds(), device.take_waits())
        )

    def stragglers(
        self, busy: Sequence[float], device_busy: Sequence[float], step_seconds: float
    ) -> dict[int, Slow]:
        return self.outliers.named(busy, device_busy, step_seconds)

    def mark(self, phase: str, microbatch: int = -1, chunk: int = -1) -> None:
        """Notes the phase of work that begins or continues.

        It also tells apart the work of engines with their own collectives.
        """
        self.phase = (phase, microbatch, chunk)
        self.events += 1

    def on_compile_begin(self) -> None:
        """Notes that code is being compiled, in any thread of this process."""
        self.compilations += 1
        if self.compilations == 1:
            self.compiling_since = time.monotonic()

    def on_compile_end(self) -> None:
        """Notes the end of a compilation, whether it has succeeded or not."""
        self.compilations = max(0, self.compilations - 1)
        self.events += 1

    def compiling_seconds(self) -> float | None:
        """How long this process has been compiling; None if it is not. Any thread may ask."""
        return time.monotonic() - self.compiling_since if self.compilations else None

    def progress(self) -> int:
        """A number that grows whenever the host notes something or its device has done something.

        Any thread may ask.
        """
        return self.events + (0 if self.device is None else self.device.look())

    def channel(self, ranks: Sequence[int]) -> Channel:
        """The channel of a communicator over `ranks`."""
        return self._open(channel_of(ranks))

    def link(self, source: int, target: int) -> Channel:
        """The channel for transfers from rank `source` to rank `target`."""
        return self._open(f"{source}>{target}")

    def _open(self, key: str) -> Channel:
        if key not in self.channels:
            self.channels[key] = Channel()
        return self.channels[key]


def channel_of(ranks: Sequence[int]) -> str:
    """The key of a communicator's channel, from which `ranks_of` reads its ascending ranks: all 4,096 are
    ``0-4095``, every fourth of sixteen ``0-12/4``, and two pairs ``0-1,8-9``.
    """
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
    return [
        rank for first, last, *stride in runs for rank in range(int(first), int(last) + 1, *map(int, stride))
    ]


STANDARD = (sysconfig.get_paths()["stdlib"], str(Path(torch.__file__).parent), __file__)


def is_ours(file: str) -> bool:
    """Whether a line of this file tells what a thread is doing.

    Lines of the standard library, PyTorch and the recorder do not.
    """
    return not file.startswith((*STANDARD, "<frozen")) or (
        "site-packages" in file and not file.startswith(STANDARD[1:])
    )


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
