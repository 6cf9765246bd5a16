"""Fills a rank's ledger by wrapping the groups' operations, the runtime's methods and the trainer's work between steps.

The wrapped code does not know of the ledger. A run without it executes the same code.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megacore.distributed.communicator import Group, Work
from megacore.distributed.mesh import Mesh
from megacore.pipeline.runtime import Runtime
from megacore.pipeline.schedule import TRANSFERS, Op
from megacore.tools.diagnosis.flight_recorder import DATA, FOR_DEVICE, Channel, FlightRecorder
from megacore.tools.diagnosis.stragglers import Stragglers
from megacore.train.async_metrics import AsyncMetrics
from megacore.train.loader import Loader
from megacore.train.trainer import Trainer

REDUCTIONS = (Op.REDUCE_GRADIENTS, Op.REDUCE_TIED)  # in which a rank waits for others
STARTS = {f"start_{operation}": operation for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift")}


class Begun:
    """The handle of an operation whose waits are noted."""

    __slots__ = ("channel", "name", "number", "work")

    def __init__(self, work: Work, channel: Channel, number: int, name: str, *_: Tensor) -> None:
        """The operation's tensors come last: for a proof, which notes where they lie (`tools/verify/flight.py`). They are not held here."""
        self.work, self.channel, self.number, self.name = work, channel, number, name

    def wait(self) -> None:
        """Returns when the result can be used."""
        device = self.channel.ledger.device
        with self.channel.waiting_for(self.number, self.name):
            if device is None:
                self.work.wait()
            else:
                device.wait(self.name, self.work.wait)


def note_mesh(mesh: Mesh, ledger: FlightRecorder | None = None) -> FlightRecorder:
    """Records every operation of the mesh's groups in a ledger, a new one unless it is given."""
    ledger = ledger or FlightRecorder()
    for group in {id(group): group for group in (mesh.world, mesh.tied, *mesh.groups.values()) if group is not None}.values():
        note_group(group, ledger)
    mesh.progress = ledger.mark
    return ledger


def note_group(group: Group, ledger: FlightRecorder) -> None:
    """Notes the operations that a rank begins over a group and waits for. Groups with equal ranks have one channel."""
    wire, name = group.communicator, group.name
    if wire is None:
        return
    channel = ledger.channel(group.ranks)

    def started(operation: str, method: Callable[..., Work]) -> Callable[..., Work]:
        def noted(x: Tensor, *rest: Any) -> Work:
            number = channel.begin(name, operation, x)
            return Begun(method(x, *rest), channel, number, name, x, *rest)

        return noted

    def done(operation: str, method: Callable[..., None]) -> Callable[..., None]:
        def noted(x: Any, *rest: Any) -> None:
            with channel.during(name, operation, x if isinstance(x, Tensor) else torch.empty(0)):
                method(x, *rest)

        return noted

    def transferred(method: Callable[..., Work], *, sends: bool) -> Callable[..., Work]:
        def noted(x: Tensor, peer: int) -> Work:
            own = group.ranks[group.rank]
            link = ledger.link(own, peer) if sends else ledger.link(peer, own)
            number = link.begin(name, "transfer", x)
            return Begun(method(x, peer), link, number, name, x)

        return noted

    watched: Any = wire
    for method, operation in STARTS.items():
        setattr(watched, method, started(operation, getattr(wire, method)))
    for method in ("all_reduce", "broadcast", "barrier"):
        setattr(watched, method, done(method, getattr(wire, method)))
    watched.send, watched.receive = transferred(wire.send, sends=True), transferred(wire.receive, sends=False)


def note_runtime(runtime: Runtime, ledger: FlightRecorder) -> None:
    """Notes each action of the plan that a rank runs, but transfers. On a GPU, what it computes for a microbatch is a piece of work."""

    def marked(method: Callable[[Any], None]) -> Callable[[Any], None]:
        def noted(action: Any) -> None:
            ledger.mark(action.op.value, action.microbatch, action.chunk)
            device = None if action.op in REDUCTIONS else ledger.device
            began = None if device is None else device.begin()
            method(action)
            if device is not None and began is not None:
                device.end(f"{action.op.value} of microbatch {action.microbatch} (step {ledger.step})", began)

        return noted

    runtime.methods.update({op: marked(method) for op, method in runtime.methods.items() if op not in TRANSFERS})


def note_trainer(trainer: Trainer, ledger: FlightRecorder) -> Trainer:
    """Notes what a trainer does between its microbatches; returns it."""
    note_runtime(trainer.train_step.runtime, ledger)
    note_loader(trainer.loader, ledger)
    note_mailbox(trainer.async_metrics, ledger)
    noted: Any = trainer
    watch = noted.watch
    watch.waited, watch.waits, watch.stragglers = ledger.take_waited, ledger.take_spent, Stragglers(trainer.mesh.pp.size).named
    if ledger.device is not None:
        watch.worked, watch.device_waits = ledger.device.take_seconds, ledger.device.take_waits
    next_batch, step = trainer.next_batch, trainer.engine.step

    def data() -> Any:
        ledger.step = trainer.step
        if ledger.device is not None:  # the logged steps alone, on whose figures the host waits in any case
            ledger.device.samples = trainer.step % trainer.config.log.every == 0
        ledger.mark("data")
        return next_batch()

    def update(*args: Any) -> Any:
        ledger.mark("optimizer step")
        result = step(*args)
        ledger.mark("between steps")
        return result

    def aside(phase: str, method: Callable[[], Any]) -> Callable[[], Any]:
        def marked() -> Any:
            waited, spent = ledger.waited, dict(ledger.spent)
            ledger.mark(phase)
            if ledger.device is not None:
                ledger.device.timed = ledger.device.samples = False
            result = method()
            ledger.waited, ledger.spent = waited, spent  # only waiting within steps counts
            if ledger.device is not None:
                ledger.device.timed = True
            return result

        return marked

    noted.next_batch, noted.engine.step = data, update
    noted.validate, noted.save = aside("validation", trainer.validate), aside("saving", trainer.save)
    return trainer


def note_loader(loader: Loader, ledger: FlightRecorder) -> None:
    """Notes the reading thread while the main thread waits for it: if it hangs, its line of code is named."""
    noted: Any = loader
    wait = loader.wait

    def waited(reading: Any) -> Any:
        ledger.worker, started = loader.thread, time.perf_counter()
        batch = wait(reading)
        ledger.worker = None
        ledger.spent[DATA] = ledger.spent.get(DATA, 0.0) + time.perf_counter() - started
        return batch

    noted.wait = waited


def note_mailbox(async_metrics: AsyncMetrics, ledger: FlightRecorder) -> None:
    """Notes when the host waits for its device. A host that is late does not wait here."""
    noted: Any = async_metrics
    wait = async_metrics.wait

    def waited(arrived: Any) -> None:
        started, phase = time.perf_counter(), ledger.phase
        ledger.mark(FOR_DEVICE)
        wait(arrived)
        ledger.mark(*phase)
        ledger.waited += time.perf_counter() - started

    noted.wait = waited
