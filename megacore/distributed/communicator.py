"""The operations of one group, over its communicator or, for tensors that fit, through shared memory.

Layers and engines call `collectives`, the runtime and the mesh a `Communicator` too. Only libraries that
bring their own collectives (FSDP2, DeepSpeed) send anything else in a step. Listeners hear of each operation
when it begins and when it is waited for.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import count, cycle
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.distributed.events import Listener, Listeners, Operation
from megacore.distributed.shared_memory import SharedMemory

# torch 2.13 renamed these two; 2.11 has the old names only.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_numbers = count(1)


class Work(Protocol):
    """The handle of an operation that is under way."""

    def wait(self) -> object:
        """Returns when the result can be used."""


class Exchanged:
    """The handle of an exchange of parts; once waited for, their sum is in `out`."""

    def __init__(self, work: Work, parts: Tensor, out: Tensor) -> None:
        self.work, self.parts, self.out = work, parts, out

    def wait(self) -> None:
        """Waits, and sums in the order of the ranks."""
        self.work.wait()
        with torch.no_grad():
            torch.sum(self.parts, 0, dtype=self.out.dtype, out=self.out)


class Staged:
    """The handle of operations of which each begins when the one before has ended.

    On a GPU they follow each other on a stream beside the one that computes, which waits for them in `wait`
    alone. Until then the
    tensors that they use must live: `held` keeps the operations, and they keep these.
    """

    def __init__(
        self,
        operations: Sequence[Callable[[], Work]],
        finish: Callable[[], object] = lambda: None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Begins the first.

        `finish` makes the result of what the last has brought. `stream`: see `side_stream`.
        """
        self.held, self.left, self.finish, self.stream = operations, list(operations), finish, stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        with self._beside():
            self.work = self.left.pop(0)()

    def _beside(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def advance(self) -> None:
        """If an operation is left, lets it begin when the one under way has ended; on a GPU
        the host does not wait for that.
        """
        if self.left:
            with self._beside():
                self.work.wait()
                self.work = self.left.pop(0)()

    def wait(self) -> None:
        """Waits for all of them."""
        while self.left:
            self.advance()
        with self._beside():
            self.work.wait()
            self.finish()
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for operations in stages, one of `SIDE_STREAMS` in turn: each keeps memory of its own.

    None on a device without streams.
    """
    if device.type != "cuda":
        return None
    if device not in _side_streams:
        _side_streams[device] = cycle([torch.cuda.Stream(device) for _ in range(SIDE_STREAMS)])
    return next(_side_streams[device])


SIDE_STREAMS = 3  # when the fourth bucket begins, the first begins its last operation
_side_streams: dict[torch.device, Iterator[torch.cuda.Stream]] = {}


class Together:
    """The handle of several operations."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = works

    def wait(self) -> None:
        """Waits for all of them."""
        for work in self.works:
            work.wait()


class ObservedWork:
    """The handle of an operation. Listeners are told when it is waited for."""

    __slots__ = ("listeners", "tokens", "work")

    def __init__(self, listeners: Listeners, tokens: list[tuple[Listener, Any]], work: Work) -> None:
        self.listeners, self.tokens, self.work = listeners, tokens, work

    def wait(self) -> None:
        """Returns when the result can be used."""
        self.listeners.reply(Listener.on_wait_begin, self.tokens)
        try:
            self.work.wait()
        finally:
            self.listeners.reply(Listener.on_wait_end, self.tokens)


P = ParamSpec("P")
R = TypeVar("R")


def observed(
    method: Callable[Concatenate["Communicator", P], R],
) -> Callable[Concatenate["Communicator", P], R]:
    """Decorate an operation of a communicator: listeners are told of its start and of waits for it."""
    name = method.__name__.removeprefix("start_")
    returns_done = name == method.__name__ not in ("send", "receive")

    @wraps(method)
    def notifying(self: "Communicator", *args: P.args, **options: P.kwargs) -> R:
        listeners = self.listeners
        if listeners is None or not listeners.overriding(Listener.on_collective):
            return method(self, *args, **options)
        tensors = tuple(x for x in args if isinstance(x, Tensor))
        peer = next((x for x in args if type(x) is int), -1)
        tokens = listeners.notify(Listener.on_collective, Operation(_called[self.key], name, tensors, peer))
        if returns_done:
            listeners.reply(Listener.on_started, tokens)
            ObservedWork(
                listeners, tokens, SimpleNamespace(wait=partial(method, self, *args, **options))
            ).wait()
            return cast(R, None)
        work = method(self, *args, **options)
        listeners.reply(Listener.on_started, tokens)
        return cast(R, ObservedWork(listeners, tokens, cast(Work, work)))

    return notifying


class Communicator:
    """The operations of a group of several ranks.

    Tensors are contiguous; those of `start_…` must not be touched before `wait`.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        size: int,
        shared: SharedMemory | None = None,
        listeners: Listeners | None = None,
    ) -> None:
        self.process_group, self.size, self.shared, self.listeners = process_group, size, shared, listeners
        self.downward = process_group  # for messages to lower ranks, see `Mesh._connect_stages`
        # gloo would do an all-reduce on every rank: that takes 2.0 times as long between 2 ranks, and 2.6
        # times between 4 (4 MiB).
        self.scatters = dist.get_backend(process_group) != "gloo"
        self.key = f"wire {next(_numbers)}"  # its name in this process

    def carries(self, x: Tensor) -> bool:
        """Whether `x` goes through shared memory."""
        return self.shared is not None and self.shared.carries(x)

    @observed
    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduces `x` in place."""
        dist.all_reduce(x, op, group=self.process_group)

    @observed
    def start_all_reduce(self, x: Tensor) -> Work:
        """Begins to sum `x` in place."""
        if self.shared is not None and self.shared.carries(x):
            return self.shared.all_reduce(x)
        return dist.all_reduce(x, group=self.process_group, async_op=True)

    @observed
    def start_all_gather(self, x: Tensor, out: Tensor) -> Work:
        """Begins to gather `[n, …]` of every rank into `out`, ``[size · n, …]``; `x` may lie in it."""
        if self.shared is not None and self.shared.carries(x):
            return self.shared.all_gather(x, out)
        return all_gather_single(out, x, group=self.process_group, async_op=True)

    @observed
    def start_reduce_scatter(self, x: Tensor, out: Tensor) -> Work:
        """Begins to sum ``[size · n, …]``; `out` gets this rank's `[n, …]` of the sum, and may lie in `x`.

        Parts travel in the dtype of `x`. If `out` is wider, they are summed in that, which no backend's own
        operation does.
        """
        if self.shared is not None and self.shared.carries(x):
            return self.shared.reduce_scatter(x, out)
        if self.scatters and x.dtype == out.dtype:
            return reduce_scatter_single(out, x, group=self.process_group, async_op=True)
        parts = torch.empty_like(x)
        work = dist.all_to_all_single(parts, x, group=self.process_group, async_op=True)
        return Exchanged(work, parts.view(self.size, *out.shape), out)

    @observed
    def start_all_to_all(self, x: Tensor, out: Tensor) -> Work:
        """Begins to send part i of ``[size, …]`` to rank i, and to fill `out` with the parts of all ranks."""
        return dist.all_to_all_single(out, x, group=self.process_group, async_op=True)

    @observed
    def start_exchange(self, x: Tensor, out: Tensor, sent: Sequence[int], received: Sequence[int]) -> Work:
        """Begins to send parts of so many elements to each rank, and to fill `out`
        with parts of so many from each.
        """
        return dist.all_to_all_single(
            out, x, list(received), list(sent), group=self.process_group, async_op=True
        )

    @observed
    def start_broadcast(self, x: Tensor, source: int) -> Work:
        """Begins to copy `x` of the world's rank `source` into `x` of every rank."""
        work = dist.broadcast(x, source, group=self.process_group, async_op=True)
        assert work is not None
        return work

    @observed
    def start_shift(self, x: Tensor, out: Tensor, after: int, before: int) -> Work:
        """Begins to send `x` to the world's rank `after`, and to receive `out` from `before`, as one
        operation of all ranks of a ring.

        NCCL must get the two as a batch: one after the other, every rank's send would wait for a receive that
        stands behind a send.
        """
        pair = (
            dist.P2POp(dist.isend, x, after, self.process_group),
            dist.P2POp(dist.irecv, out, before, self.process_group),
        )
        return Together(dist.batch_isend_irecv(list(pair)))

    @observed
    def broadcast(self, x: Tensor, source: int) -> None:
        """Copies `x` of the world's rank `source` into `x` of every rank."""
        dist.broadcast(x, source, group=self.process_group)

    @observed
    def barrier(self, device_ids: list[int] | None) -> None:
        """Waits for every rank."""
        dist.barrier(group=self.process_group, device_ids=device_ids)

    @observed
    def send(self, x: Tensor, peer: int) -> Work:
        """Begins to send `x` to the world's rank `peer`, behind what was sent there before."""
        work = dist.isend(x, peer, group=self.process_group if dist.get_rank() < peer else self.downward)
        assert work is not None
        return work

    @observed
    def receive(self, x: Tensor, peer: int) -> Work:
        """Begins to receive `x` from the world's rank `peer`, behind what was received from there before."""
        work = dist.irecv(x, peer, group=self.process_group if peer < dist.get_rank() else self.downward)
        assert work is not None
        return work


@dataclass(frozen=True)
class Group:
    """The ranks along some axes that have equal coordinates along all others.

    A group of one has none: collectives do nothing.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int  # this process's position in `ranks`
    communicator: Communicator | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.communicator is not None:
            _called[self.communicator.key] = self

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def key(self) -> str:
        """By which operations of a compiled graph name the group (`group_called`); of more than one rank."""
        assert self.communicator is not None
        return self.communicator.key

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The communicator, for libraries that bring their own collectives."""
        return None if self.communicator is None else self.communicator.process_group


SOLO = Group("solo", (0,), 0)

# by `Group.key`; whoever was given a group holds it
_called: WeakValueDictionary[str, Group] = WeakValueDictionary()


def group_called(key: str) -> Group:
    """The group with this `key`: a compiled graph holds tensors and plain values, and no group."""
    return _called[key]
