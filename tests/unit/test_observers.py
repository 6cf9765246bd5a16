"""What watches a run hears all that it does, changes none of it, and costs nothing where nobody watches."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.config import load
from megacore.distributed.communicator import Communicator, Group
from megacore.distributed.mesh import Mesh
from megacore.distributed.observer import Observer, Observers, Operation, Waits
from megacore.distributed.rank_info import RankInfo
from megacore.model.batch import Microbatch
from megacore.pipeline.schedule import Action
from megacore.tools.diagnosis.flight_recorder import FlightRecorder
from megacore.train.step import TrainStep
from tests import training

CPU = torch.device("cpu")


class Listener(Observer):
    """Keeps what it hears, in words."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def phase_begins(self, phase: str) -> None:
        self.heard.append(phase)

    def action_begins(self, action: Action) -> None:
        self.heard.append(("begins", action))

    def action_ends(self, action: Action) -> None:
        self.heard.append(("ends", action))

    def collective_begins(self, operation: Operation) -> str:
        self.heard.append(f"{operation.name} of {[tuple(x.shape) for x in operation.tensors]}, {operation.peer}")
        return operation.name

    def collective_begun(self, token: str) -> None:
        self.heard.append(f"{token} begun")

    def wait_begins(self, token: str) -> None:
        self.heard.append(f"{token} waits")

    def wait_ends(self, token: str) -> None:
        self.heard.append(f"{token} done")


class Broken(Observer):
    """Raises whatever it is told."""

    def phase_begins(self, phase: str) -> None:
        raise RuntimeError("a mistake in a tool")

    def wait_begins(self, token: None) -> None:
        raise RuntimeError("another")


def losses(tmp_path: Path, observers: list[Observer]) -> list[float]:
    """Of two steps on one process, which have these observers."""
    config = load(training.write_config(tmp_path, "nothing"), [], 1).config
    mesh = Mesh(config, RankInfo(), CPU, observers=Observers(observers))
    step, tokens = TrainStep(config, mesh), torch.arange(32).view(2, 16)
    listeners = [own for own in observers if isinstance(own, Listener)]
    for own in listeners:
        own.heard.clear()  # of the construction
    found = [step(number, [Microbatch(tokens, tokens, key) for key in range(4)]).loss.item() for number in (1, 2)]
    actions = [(when, action) for action in step.plan.actions[0] for when in ("begins", "ends")]
    assert [own.heard for own in listeners] == [[*actions, "loss", "optimizer step", "between steps"] * 2] * len(listeners)
    return found


def test_several_observers_hear_every_action_and_change_nothing(tmp_path: Path) -> None:
    """In order, each once; a step that nobody watches gives the same bits."""
    assert losses(tmp_path, [Listener(), FlightRecorder(), Listener()]) == losses(tmp_path, [])


def test_what_an_observer_raises_keeps_nothing_from_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The watchdog takes silence for a hang, and would end a run for a mistake in somebody's statistics."""
    assert losses(tmp_path, [Broken(), recorder := FlightRecorder(), Listener()]) == losses(tmp_path, [])
    said = capfd.readouterr().err
    assert said.count("WARNING: Broken failed, and may see less") == 1 and "RuntimeError: a mistake in a tool" in said
    assert recorder.phase[0] == "between steps" and recorder.events >= 2 * (3 + 8)


def test_what_a_proof_raises_ends_its_run() -> None:
    """A record with gaps would be a proof of nothing."""

    class Proof(Broken):
        vital = True

    with pytest.raises(RuntimeError, match="a mistake"):
        Observers([Listener(), Proof()]).phase("data")


class Link(Communicator):
    """Stands for the operations of two ranks: they take no time."""

    def __init__(self, observers: Observers | None) -> None:
        self.key, self.observers, self.shared, self.size = "a link", observers, self, 2  # type: ignore[assignment]
        self.failing = False

    def carries(self, x: Tensor) -> bool:
        return True

    def reduce_scatter(self, x: Tensor, out: Tensor) -> Any:
        def wait() -> None:
            if self.failing:
                raise RuntimeError("connection reset")

        return SimpleNamespace(wait=wait)


def test_an_operation_is_heard_of_when_it_begins_and_when_it_is_waited_for() -> None:
    """With its tensors, and by each observer with what that one answered. Nobody waits for ever in a record: a wait that fails ends."""
    listener, recorder = Listener(), FlightRecorder()
    link = Link(Observers([listener, Broken(), recorder]))
    group = Group("dp", (0, 1), 0, link)
    work = link.start_reduce_scatter(torch.zeros(4), torch.zeros(2))
    assert listener.heard == ["reduce_scatter of [(4,), (2,)], -1", "reduce_scatter begun"]
    work.wait()
    assert listener.heard[2:] == ["reduce_scatter waits", "reduce_scatter done"]
    assert recorder.channel(group.ranks).begun == 1 and list(recorder.waits().by_group) == ["dp"]
    link.failing = True
    with pytest.raises(RuntimeError, match="reset"):
        link.start_reduce_scatter(torch.zeros(4), torch.zeros(2)).wait()
    assert listener.heard[-2:] == ["reduce_scatter waits", "reduce_scatter done"] and recorder.waiting is None


@pytest.mark.parametrize("observers", [None, Observers()], ids=["none", "an empty list"])
def test_where_nobody_watches_the_librarys_own_handle_is_returned(observers: Observers | None) -> None:
    """And one who comes later is heard: an empty list is not replaced by another."""
    link = Link(observers)
    group = Group("dp", (0, 1), 0, link)
    assert isinstance(link.start_reduce_scatter(torch.zeros(4), torch.zeros(2)), SimpleNamespace)
    if observers is not None:
        observers.append(listener := Listener())
        link.start_reduce_scatter(torch.zeros(4), torch.zeros(2)).wait()
        assert len(listener.heard) == 4 and group.size == 2


def test_who_knows_nothing_is_passed_over() -> None:
    """Of several, the first who knows how long the rank has waited answers; of none, nobody has waited."""

    class Knowing(Observer):
        def waits(self) -> Waits:
            return Waits(2.0)

        def stragglers(self, *_: Any) -> dict[int, float]:
            return {3: 1.5}

    both = Observers([Listener(), Knowing()])
    assert both.waits() == Waits(2.0) and both.stragglers([1.0], [0.0], 1.0) == {3: 1.5}
    assert Observers().waits() == Waits() and Observers().stragglers([1.0], [0.0], 1.0) == {}
