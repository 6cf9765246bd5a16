"""What one rank does, told to listeners: hang diagnosis, proofs, dry runs, measurements and metrics.

Communicators, the runtime, the loader and the trainer notify `mesh.listeners`. `Listener` has the events
that they know; `megacore.train.callbacks.Callback` adds those of a run, such as a logged step. For an event
that no listener overrides, a step pays one dictionary lookup.
"""

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

from torch import Tensor

from megacore.pipeline.schedule import Action

if TYPE_CHECKING:
    from megacore.distributed.communicator import Group

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that a rank starts over a group."""

    group: "Group"
    # all_reduce, all_gather, reduce_scatter, all_to_all, exchange, shift, broadcast, barrier, send or receive
    name: str
    # the input, then the output if that is another tensor; a listener must not keep them
    tensors: tuple[Tensor, ...]
    peer: int = -1  # world rank of the other side of a send or receive


@dataclass(frozen=True)
class Waits:
    """Seconds that a rank has waited since the last report, without validations and saves.

    0 where nothing measures it.
    """

    for_ranks: float = 0.0
    by_group: Mapping[str, float] = field(default_factory=dict)  # of the host, by group name and for "data"
    device_worked: float = 0.0  # seconds that its GPU took for forwards and backwards
    device_by_group: Mapping[str, float] = field(default_factory=dict)  # of its GPU, in the last logged step


class Slow(NamedTuple):
    """A rank that holds up the others, with the seconds that it worked in a step, without waits."""

    seconds: float
    usual: float  # the median of the ranks that do the same work
    of: str = "host"  # or "device": whose seconds they are


class Listener:
    """Is told what one rank does. Override the methods that you need; the others cost nothing.

    Methods run in the middle of a step, so they must not wait for the device. `on_error` says what happens
    if a method raises an exception:

    - "drop" (the default): it is reported once on this rank's stderr. From then on no method is called but
      `on_end`, and training continues.
    - "keep": it is reported once, and the listener is still called. For the hang watchdog's flight recorder,
      whose silence would look like a hang.
    - "raise": the rank fails, which ends the job. For a listener whose answer would otherwise be wrong, such
      as a proof's, and for one that communicates in a step: other ranks would wait for this one.
    """

    on_error: Literal["drop", "keep", "raise"] = "drop"

    def on_step_begin(self, step: int, logged: bool) -> None:
        """A step begins. If it is `logged`, the host will wait for its results."""

    def on_phase(self, phase: str) -> None:
        """The rank begins another phase, such as "data" or "optimizer step".

        Also called now and then during long work, as a sign of life.
        """

    def on_pause_begin(self, phase: str) -> None:
        """Work begins that does not count as a step's time, such as "validation" or "saving"."""

    def on_pause_end(self) -> None:
        """That work is done."""

    def on_compile_begin(self) -> None:
        """Code is being compiled, which may take minutes. Compilations may be nested, or in other threads."""

    def on_compile_end(self) -> None:
        """The compilation is done, or has failed."""

    def on_action_begin(self, action: Action) -> None:
        """The runtime begins an action of the plan. The tensors that it takes from other ranks are there."""

    def on_action_end(self, action: Action) -> None:
        """The action is done on a CPU, and launched on a GPU."""

    def on_collective(self, operation: Operation) -> Any:
        """The rank starts its part of an operation over a group.

        Return a token: the next three methods are called with it. Only listeners that override this method
        are told of waits.
        """

    def on_started(self, token: Any) -> None:
        """The operation is in flight."""

    def on_wait_begin(self, token: Any) -> None:
        """The rank begins to wait for the operation (on a GPU, the host only makes its stream wait)."""

    def on_wait_end(self, token: Any) -> None:
        """The wait is over, perhaps with an exception."""

    def on_host_wait_begin(self, what: str, thread: int | None = None) -> None:
        """The main thread begins to wait for "data", which another `thread` reads, or for its "device"."""

    def on_host_wait_end(self, what: str) -> None:
        """That wait is over."""

    def step_waits(self) -> Waits | None:
        """Return how long this rank has waited since the last call; asked before each report."""

    def stragglers(
        self, busy: Sequence[float], device_busy: Sequence[float], step_seconds: float
    ) -> dict[int, Slow] | None:
        """Return the ranks that hold up the others; asked at each report.

        `busy`, `device_busy`: seconds a step that each rank's host and device worked themselves.
        """

    def on_end(self) -> None:
        """Training is over, or has failed. Called even if this listener has failed before."""


class Listeners:
    """The listeners of one rank, in the order in which they are called."""

    def __init__(self, listeners: Sequence[Listener] = (), rank: int = 0) -> None:
        """`rank`: of this process in the world, for reports of failures."""
        self.rank = rank
        self._listeners = list(listeners)
        self._failed: list[Listener] = []
        self._overriding: dict[str, tuple[Listener, ...]] = {}  # by the name of a method

    def __iter__(self) -> Iterator[Listener]:
        """Iterate over those that are still called."""
        return iter([listener for listener in self._listeners if not self._is_dropped(listener)])

    def add(self, *listeners: Listener) -> None:
        """Call these from now on, after those that are there."""
        self._listeners.extend(listeners)
        self._overriding.clear()

    def remove(self, listener: Listener) -> None:
        """Stop calling a listener."""
        self._listeners.remove(listener)
        self._overriding.clear()

    def overriding(self, event: Callable[..., Any]) -> tuple[Listener, ...]:
        """Return the listeners that override a method of `Listener` or of a subclass."""
        name = event.__name__
        listeners = self._overriding.get(name)
        if listeners is None:
            listeners = tuple(
                listener
                for listener in (self._listeners if name == "on_end" else self)
                if getattr(type(listener), name, event) is not event
            )
            self._overriding[name] = listeners
        return listeners

    def notify(
        self, event: Callable[Concatenate[Any, P], T], *args: P.args, **options: P.kwargs
    ) -> list[tuple[Listener, T]]:
        """Call a method, such as `Listener.on_phase`, of every listener that overrides it.

        Return the listeners that did not fail, with their answers.
        """
        answers = []
        for listener in self.overriding(event):
            try:
                answer = getattr(listener, event.__name__)(*args, **options)
            except Exception as error:
                self.fail(listener, event, error)
            else:
                answers.append((listener, answer))
        return answers

    def reply(self, event: Callable[[Any, Any], object], tokens: Sequence[tuple[Listener, Any]]) -> None:
        """Call a method of those who answered `notify`, each with its own answer."""
        for listener, token in tokens:
            if self._is_dropped(listener):
                continue
            try:
                getattr(listener, event.__name__)(token)
            except Exception as error:
                self.fail(listener, event, error)

    def phase(self, name: str) -> None:
        """Notify listeners of a phase; also called now and then during long work, as a sign of life."""
        self._listen_to_compiler()
        self.notify(Listener.on_phase, name)

    @contextmanager
    def pause(self, phase: str) -> Iterator[None]:
        """Return a context of work that does not count as a step's time."""
        self.notify(Listener.on_pause_begin, phase)
        try:
            yield
        finally:
            self.notify(Listener.on_pause_end)

    @contextmanager
    def compilation(self) -> Iterator[None]:
        """Return a context in which code is compiled by something else than torch.compile."""
        self._compile_begins()
        try:
            yield
        finally:
            self._compile_ends()

    def step_waits(self) -> Waits:
        """Return the answer of the first listener that has one."""
        answers = self.notify(Listener.step_waits)
        return next((waits for _, waits in answers if waits is not None), Waits())

    def stragglers(
        self, busy: Sequence[float], device_busy: Sequence[float], step_seconds: float
    ) -> dict[int, Slow]:
        """Return the answer of the first listener that has one."""
        answers = self.notify(Listener.stragglers, busy, device_busy, step_seconds)
        return next((slow for _, slow in answers if slow is not None), {})

    def fail(self, listener: Listener, event: Callable[..., Any], error: Exception) -> None:
        """Handle an exception of a listener as its `on_error` says; only the first one is reported."""
        if listener.on_error == "raise":
            raise error
        if listener in self._failed:
            return
        self._failed.append(listener)
        self._overriding.clear()
        consequence = "is left out" if listener.on_error == "drop" else "may miss events from now on"
        report = "".join(traceback.format_exception(error))
        sys.stderr.write(
            f"{report}WARNING: rank {self.rank}: {type(listener).__name__} failed in {event.__name__} and "
            f"{consequence}; training continues: {type(error).__name__}: {error}\n"
        )
        sys.stderr.flush()

    def close(self) -> None:
        """Stop listening to torch.compile, which outlives the run in another program's process."""
        compiler = sys.modules.get("torch._dynamo.callback")
        if compiler is not None and self._compile_begins in compiler.callback_handler.start_callbacks:
            compiler.callback_handler.remove_start_callback(self._compile_begins)
            compiler.callback_handler.remove_end_callback(self._compile_ends)

    def _listen_to_compiler(self) -> None:
        """Have torch.compile report compilations, in a process that has loaded it.

        Called often, because a model may load the compiler at any time, and a reset of the compiler drops its
        listeners.
        """
        compiler = sys.modules.get("torch._dynamo.callback")
        if compiler is None or not (
            self.overriding(Listener.on_compile_begin) or self.overriding(Listener.on_compile_end)
        ):
            return
        handler = compiler.callback_handler
        if self._compile_begins not in handler.start_callbacks:
            handler.register_start_callback(self._compile_begins)
            handler.register_end_callback(self._compile_ends)

    def _compile_begins(self, *_: object) -> None:
        """Notify listeners, in any thread of this process; older PyTorch passes nothing."""
        self.notify(Listener.on_compile_begin)

    def _compile_ends(self, *_: object) -> None:
        self.notify(Listener.on_compile_end)

    def _is_dropped(self, listener: Listener) -> bool:
        return listener.on_error == "drop" and listener in self._failed
