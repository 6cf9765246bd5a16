"""What a run tells those who watch it: hang diagnosis, proofs, dry runs and measurements are listeners.

A mesh has the list of its run's listeners. It is empty unless whoever starts the run adds some
(`mesh.listeners.append`), and then all that is left of it in a step is a test of an empty list.
Communicators, runtime, loader and trainer tell the list what they do.
"""

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from torch import Tensor

from megacore.pipeline.schedule import Action

if TYPE_CHECKING:
    from megacore.distributed.communicator import Group

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Operation:
    """What a rank begins over a group. `peer`: the other rank of the world, where there is only one."""

    group: "Group"
    # all_reduce, all_gather, reduce_scatter, all_to_all, exchange, shift, broadcast, barrier, send or receive
    name: str
    # what is given, and then where the result comes, if elsewhere; an listener must not keep them
    tensors: tuple[Tensor, ...]
    peer: int = -1


@dataclass(frozen=True)
class Waits:
    """Seconds that a rank has waited since this was asked last, validations and saves
    left out; 0 where nobody knows.
    """

    for_ranks: float = 0.0
    # of the host, by the name of a group, and for "data"
    by_group: Mapping[str, float] = field(default_factory=dict)
    device_worked: float = 0.0  # seconds that its GPU took for forwards and backwards
    device_by_group: Mapping[str, float] = field(default_factory=dict)  # of its GPU, in the last logged step


class Slow(NamedTuple):
    """Of a rank that holds up the others: seconds of its own work in a step, the median of those
    of its like, and whose seconds.
    """

    seconds: float
    usual: float
    of: str = "host"


class Listener:
    """Hears what one rank does.

    A tool overrides the methods that it needs; they run in the middle of a step, and wait for nothing.

    What an listener raises does not end the run, nor keeps anything from the others: it is said once. If an
    listener's answer would then be wrong, as a proof's, it is `vital`: what it raises is raised where it was
    told.
    """

    vital = False
    failed = False

    def on_step_begin(self, step: int, logged: bool) -> None:
        """`logged`: whether the host waits for the step's figures in any case."""

    def on_phase(self, phase: str) -> None:
        """What the rank does from here on, other than the plan's actions, such as
        "data" or "optimizer step".
        """

    def on_pause_begin(self, phase: str) -> None:
        """Begins what does not count as a step's time: "validation" or "saving"."""

    def on_pause_end(self) -> None:
        """Ends it."""

    def on_compile_begin(self, *_: object) -> None:
        """Code is compiled from here on, which may take minutes; may be nested."""

    def on_compile_end(self, *_: object) -> None:
        """It is compiled, or has failed."""

    def on_action_begin(self, action: Action) -> None:
        """The runtime begins an action of the plan; what it takes from other ranks has come."""

    def on_action_end(self, action: Action) -> None:
        """The runtime has done it. A GPU may only have been given it."""

    def on_collective(self, operation: Operation) -> Any:
        """The rank begins its part of an operation.

        What this returns, the listener is given back at what follows of it.
        """

    def on_started(self, token: Any) -> None:
        """The operation is under way."""

    def on_wait_begin(self, token: Any) -> None:
        """The rank waits for the operation from here on (a GPU's host only makes its stream wait)."""

    def on_wait_end(self, token: Any) -> None:
        """It has waited, even if an exception ends that."""

    def on_host_wait_begin(self, what: str, thread: int | None = None) -> None:
        """The main thread waits for "data", which another `thread` reads, or for its "device"."""

    def on_host_wait_end(self, what: str) -> None:
        """It has waited."""

    def waits(self) -> Waits | None:
        """Asked at each report: what it knows of how long the rank has waited."""

    def stragglers(
        self, busy: Sequence[float], device_busy: Sequence[float], step_seconds: float
    ) -> dict[int, Slow] | None:
        """Asked at each report with every rank's seconds a step, those that it worked itself and those of its
        device: the ranks that hold up the others.
        """


class Listeners(list[Listener]):
    """All who watch one rank."""

    def tell(
        self, event: Callable[Concatenate[Any, P], T], *args: P.args, **options: P.kwargs
    ) -> list[tuple[Listener, T]]:
        """Calls a method of `Listener` on each, and returns who answered what."""
        return [(listener, self._call(listener, event, *args, **options)) for listener in tuple(self)]

    def tell_back(self, event: Callable[[Any, Any], object], tokens: list[tuple[Listener, Any]]) -> None:
        """Calls a method on each of those who answered, with its answer."""
        for listener, token in tokens:
            self._call(listener, event, token)

    def phase(self, name: str) -> None:
        """Tells them of a phase; also called now and then during long work, as a sign of life."""
        self.tell(Listener.on_phase, name)

    @contextmanager
    def aside(self, phase: str) -> Iterator[None]:
        """A context of what does not count as a step's time."""
        self.tell(Listener.on_pause_begin, phase)
        try:
            yield
        finally:
            self.tell(Listener.on_pause_end)

    @contextmanager
    def compilation(self) -> Iterator[None]:
        """A context in which code is compiled other than by torch.compile."""
        self.tell(Listener.on_compile_begin)
        try:
            yield
        finally:
            self.tell(Listener.on_compile_end)

    def waits(self) -> Waits:
        """What the first who knows answers."""
        return next((waits for _, waits in self.tell(Listener.waits) if waits is not None), Waits())

    def stragglers(
        self, busy: Sequence[float], device_busy: Sequence[float], step_seconds: float
    ) -> dict[int, Slow]:
        """What the first who knows answers."""
        answers = self.tell(Listener.stragglers, busy, device_busy, step_seconds)
        return next((found for _, found in answers if found is not None), {})

    def _call(
        self, listener: Listener, event: Callable[Concatenate[Any, P], T], *args: P.args, **options: P.kwargs
    ) -> T:
        try:
            return getattr(listener, event.__name__)(*args, **options)  # type: ignore[no-any-return]
        except Exception as error:
            if listener.vital:
                raise
            if not listener.failed:  # it is told on: a watchdog takes silence for a hang
                report = "".join(traceback.format_exception(error))
                sys.stderr.write(
                    f"{report}WARNING: {type(listener).__name__} failed, and may see less from here on; "
                    "the run continues\n"
                )
            listener.failed = True
            return None  # type: ignore[return-value]
