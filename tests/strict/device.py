"""A rank's device: communicators, each of which runs its operations in order in a thread of its own,
and the queues that they share.
"""

import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.strict.exchange import Gloo, Mismatch, agree, swap


@dataclass(frozen=True)
class Rules:
    """How unkind the device is."""

    seed: int = 0
    queues: int | None = None  # hardware queues of a rank; None: as many as it needs
    pairs: bool = (
        # two ranks that send and receive have a communicator; else, as PyTorch does where it connects early,
        # a group has one
        True
    )
    delay: float = 0.002  # seconds at most, drawn for each operation, before it starts
    lag: float = 0.02  # seconds at most, drawn likewise, until its input is read though nobody waits for it
    patience: float = 30.0  # seconds, after which whoever waits gives up


@dataclass(eq=False)
class Operation:
    """What a rank has enqueued on a communicator."""

    header: dict[str, Any]  # what its peers must agree with, by `exchange.agree`
    peers: list[int]  # in the group
    inputs: list[Tensor]
    outputs: list[Tensor]
    outgoing: Callable[[list[Tensor]], dict[int, Tensor]]  # from the inputs, what each peer gets
    incoming: dict[int, Tensor]  # what each gives, of this shape and dtype
    combine: Callable[[dict[int, Tensor]], list[Tensor]]  # from that, the outputs' content
    site: str
    collective: bool
    results: list[Tensor] = field(default_factory=list)
    wanted: bool = False  # somebody waits for it
    started: bool = False
    done: bool = False
    written: bool = False

    def __post_init__(self) -> None:
        """The moment in which it is enqueued: from here on outputs are poison."""
        spans = [span(x) for x in self.outputs]
        self.inputs = [clone(x) if any(overlap(span(x), out) for out in spans) else x for x in self.inputs]
        for x in self.outputs:
            alias(x).fill_(poison(x.dtype))

    def write(self) -> None:
        """Puts the results where they belong."""
        if not self.written:
            for x, result in zip(self.outputs, self.results, strict=True):
                alias(x).copy_(result.view(x.shape))
            self.written = True

    def __str__(self) -> str:
        header = self.header
        return (
            f"{header['operation']} number {header['number']} of {header['count']} × {header['dtype']} "
            f"at {self.site}"
        )


class Communicator:
    """Runs operations one after the other, with the ranks of a group or with one of them."""

    def __init__(self, device: "Device", name: str, gloo: Gloo, tag: int) -> None:
        self.device, self.name, self.gloo, self.tag = device, name, gloo, tag
        self.queue: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self.pending: deque[Operation] = deque()  # which are not done
        self.random = random.Random(
            f"{device.rules.seed}/{dist.get_rank() if dist.is_initialized() else gloo.rank}/{name}"
        )
        self.hardware = device.join(self)
        threading.Thread(target=self.serve, daemon=True, name=f"strict {name}").start()

    def enqueue(self, operation: Operation) -> "Handle":
        """Puts an operation behind the others."""
        with self.device.changed:
            self.device.complain()
            self.pending.append(operation)
            self.hardware.append(operation)
            if operation.collective:
                self.device.turns.append(operation)
            self.queue.put(operation)
        return Handle(self, operation)

    def serve(self) -> None:
        """The communicator's thread."""
        rules = self.device.rules
        for operation in iter(self.queue.get, None):
            try:
                time.sleep(self.random.uniform(0.0, rules.delay))
                self.start(operation)
                agree(
                    self.gloo,
                    self.tag,
                    operation.header,
                    operation.peers,
                    f"over {self.name}, at {operation.site}",
                )
                self.device.wait(lambda op=operation: op.wanted, self.random.uniform(0.0, rules.lag))
                with torch.no_grad():
                    arrived = swap(
                        self.gloo, self.tag, operation.outgoing(operation.inputs), operation.incoming
                    )
                    operation.results = operation.combine(arrived)
            except BaseException as error:
                self.device.fail(self, operation, error)
                return
            with self.device.changed:
                operation.done = True
                self.pending.popleft()
                if operation.collective:
                    self.device.turns.remove(operation)
                self.device.changed.notify_all()

    def start(self, operation: Operation) -> None:
        """Returns when all before it in its hardware queue have started and, if queues are shared, it
        is its turn among collectives.
        """
        shared, device = self.device.rules.queues is not None, self.device

        def free() -> bool:
            turn = not (shared and operation.collective) or device.turns[0] is operation
            return turn and (not shared or self.hardware[0] is operation)

        if not device.wait(free, device.rules.patience):
            raise TimeoutError(f"not started in {device.rules.patience:g} s")
        with device.changed:
            operation.started = True
            self.hardware.remove(operation)
            device.changed.notify_all()


class Device:
    """What the communicators of a rank share."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.changed = threading.Condition()
        self.failure: str | None = None
        self.communicators: list[Communicator] = []
        self.queues: list[deque[Operation]] = []  # hardware queues: operations that have not started
        # collectives that are not done, in the order in which they were enqueued
        self.turns: deque[Operation] = deque()

    def join(self, communicator: Communicator) -> deque[Operation]:
        """Gives a new communicator its hardware queue."""
        if self.rules.queues is None or len(self.queues) < self.rules.queues:
            self.queues.append(deque())
        self.communicators.append(communicator)
        return self.queues[(len(self.communicators) - 1) % len(self.queues)]

    def wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Whether something comes true in time, or fails."""
        with self.changed:
            return (
                self.changed.wait_for(lambda: ready() or self.failure is not None, seconds)
                and self.failure is None
            )

    def complain(self) -> None:
        """Raises what went wrong in any communicator."""
        if self.failure is not None:
            raise RuntimeError(self.failure)

    def fail(self, communicator: Communicator, operation: Operation, error: BaseException) -> None:
        """Notes the first failure, with what this rank is at."""
        with self.changed:
            heads = [
                f"{c.name}: {c.pending[0]}{'' if c.pending[0].started else ' (not started)'}"
                for c in self.communicators
                if c.pending
            ]
            if self.failure is None:
                said = (
                    str(error)
                    if isinstance(error, Mismatch)
                    else f"{operation} over {communicator.name} waits in vain ({error})"
                )
                self.failure = f"strict: {said}" + (
                    "" if isinstance(error, Mismatch) else f"; at the heads: {'; '.join(heads)}"
                )
            self.changed.notify_all()

    def close(self) -> None:
        """Ends the threads."""
        with self.changed:
            self.failure = self.failure or "the device is closed"
            self.changed.notify_all()
        for communicator in self.communicators:
            communicator.queue.put(None)


class Handle(dist.Work):  # type: ignore[misc]
    """What PyTorch returns for an operation under way."""

    def __init__(self, communicator: Communicator, operation: Operation) -> None:
        super().__init__()
        self.communicator, self.operation = communicator, operation

    def wait(self, timeout: Any = None) -> bool:
        """Returns when the result is written. Raises what went wrong on this rank's device."""
        device, own = self.communicator.device, self.operation
        with device.changed:
            for before in self.communicator.pending:
                before.wanted = True
                if before is own:
                    break
            device.changed.notify_all()
        if not device.wait(lambda: own.done, 2 * device.rules.patience):
            device.complain()
            raise TimeoutError(f"strict: {own} over {self.communicator.name} waits in vain")
        own.write()
        return True

    def is_completed(self) -> bool:
        """Whether it is done; the result is written by `wait` alone."""
        return self.operation.done


def alias(x: Tensor) -> Tensor:
    """A view of the same memory that autograd does not know: a device writes without telling it."""
    with torch.no_grad(), torch.inference_mode(False):
        return torch.empty(0, dtype=x.dtype).set_(
            x.untyped_storage(), x.storage_offset(), x.shape, x.stride()
        )  # type: ignore[call-overload]


def clone(x: Tensor) -> Tensor:
    """A copy that autograd does not know."""
    return alias(x).clone()


def poison(dtype: torch.dtype) -> Any:
    """What stands in a result before `wait`."""
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max // 3


def span(x: Tensor) -> tuple[int, int]:
    """The addresses of a contiguous tensor."""
    return x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()


def overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether two spans have memory in common."""
    return a[0] < b[1] and b[0] < a[1]
