"""What watches a run hears all that it does, changes none of it, and costs nothing where nobody watches."""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.distributed.communicator import Communicator, Group
from megacore.distributed.events import Listener, Listeners, Operation, Slow, Waits
from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import RankInfo
from megacore.model.batch import Microbatch
from megacore.pipeline.schedule import Action
from megacore.tools.diagnosis.flight_recorder import FlightRecorder
from tests import training
from tests.build import run_of, step_of
from tests.unit.test_floors import Source, read_source, sources

CPU = torch.device("cpu")


class Witness(Listener):
    """Keeps what it hears, in words."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_phase(self, phase: str) -> None:
        self.heard.append(phase)

    def on_action_begin(self, action: Action) -> None:
        self.heard.append(("begins", action))

    def on_action_end(self, action: Action) -> None:
        self.heard.append(("ends", action))

    def on_collective(self, operation: Operation) -> str:
        self.heard.append(
            f"{operation.name} of {[tuple(x.shape) for x in operation.tensors]}, {operation.peer}"
        )
        return operation.name

    def on_started(self, token: str) -> None:
        self.heard.append(f"{token} begun")

    def on_wait_begin(self, token: str) -> None:
        self.heard.append(f"{token} waits")

    def on_wait_end(self, token: str) -> None:
        self.heard.append(f"{token} done")


class Broken(Listener):
    """Raises whatever it is told."""

    def on_phase(self, phase: str) -> None:
        raise RuntimeError("a mistake in a tool")

    def on_wait_begin(self, token: None) -> None:
        raise RuntimeError("another")


def losses(tmp_path: Path, listeners: list[Listener]) -> list[float]:
    """Of two steps on one process, which have these listeners."""
    config = run_of(training.write_config(tmp_path, "nothing"))
    mesh = Mesh(config, RankInfo(), CPU, listeners=Listeners(listeners))
    step, tokens = step_of(config, mesh), torch.arange(32).view(2, 16)
    listeners = [own for own in listeners if isinstance(own, Witness)]
    for own in listeners:
        own.heard.clear()  # of the construction
    found = [
        step(number, [Microbatch(tokens, tokens, key) for key in range(4)]).loss.item() for number in (1, 2)
    ]
    actions = [(when, action) for action in step.plans[4].actions[0] for when in ("begins", "ends")]
    heard = ["forward and backward", *actions, "loss", "optimizer step", "between steps"] * 2
    assert [own.heard for own in listeners] == [heard] * len(listeners)
    return found


def test_several_listeners_hear_every_action_and_change_nothing(tmp_path: Path) -> None:
    """In order, each once; a step that nobody watches gives the same bits."""
    assert losses(tmp_path, [Witness(), FlightRecorder(), Witness()]) == losses(tmp_path, [])


def test_what_a_listener_raises_keeps_nothing_from_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The watchdog takes silence for a hang, and would end a run for a mistake in somebody's statistics."""
    assert losses(tmp_path, [Broken(), recorder := FlightRecorder(), Witness()]) == losses(tmp_path, [])
    said = capfd.readouterr().err
    assert (
        said.count("WARNING: rank 0: Broken failed in on_phase and is left out") == 1
        and said.count("RuntimeError: a mistake in a tool") == 2  # of the traceback, and of the warning
    )
    assert recorder.phase[0] == "between steps" and recorder.events >= 2 * (4 + 8)


def test_what_a_proof_raises_ends_its_run() -> None:
    """A record with gaps would be a proof of nothing."""

    class Proof(Broken):
        on_error = "raise"

    with pytest.raises(RuntimeError, match="a mistake"):
        Listeners([Witness(), Proof()]).phase("data")


class Link(Communicator):
    """Stands for the operations of two ranks: they take no time."""

    def __init__(self, listeners: Listeners | None) -> None:
        self.key, self.listeners, self.shared, self.size = "a link", listeners, self, 2  # type: ignore[assignment]
        self.failing = False

    def carries(self, x: Tensor) -> bool:
        return True

    def reduce_scatter(self, x: Tensor, out: Tensor) -> Any:
        def wait() -> None:
            if self.failing:
                raise RuntimeError("connection reset")

        return SimpleNamespace(wait=wait)


def test_an_operation_is_heard_of_when_it_begins_and_when_it_is_waited_for() -> None:
    """With its tensors, and by each listener with what that one answered.

    Nobody waits for ever in a record: a wait that fails ends.
    """
    witness, recorder = Witness(), FlightRecorder()
    link = Link(Listeners([witness, Broken(), recorder]))
    group = Group("dp", (0, 1), 0, link)
    work = link.start_reduce_scatter(torch.zeros(4), torch.zeros(2))
    assert witness.heard == ["reduce_scatter of [(4,), (2,)], -1", "reduce_scatter begun"]
    work.wait()
    assert witness.heard[2:] == ["reduce_scatter waits", "reduce_scatter done"]
    assert recorder.channel(group.ranks).begun == 1 and list(recorder.step_waits().by_group) == ["dp"]
    link.failing = True
    with pytest.raises(RuntimeError, match="reset"):
        link.start_reduce_scatter(torch.zeros(4), torch.zeros(2)).wait()
    assert witness.heard[-2:] == ["reduce_scatter waits", "reduce_scatter done"] and recorder.waiting is None


@pytest.mark.parametrize("listeners", [None, Listeners()], ids=["none", "an empty list"])
def test_where_nobody_watches_the_librarys_own_handle_is_returned(listeners: Listeners | None) -> None:
    """And one who comes later is heard: an empty list is not replaced by another."""
    link = Link(listeners)
    group = Group("dp", (0, 1), 0, link)
    assert isinstance(link.start_reduce_scatter(torch.zeros(4), torch.zeros(2)), SimpleNamespace)
    if listeners is not None:
        listeners.add(witness := Witness())
        link.start_reduce_scatter(torch.zeros(4), torch.zeros(2)).wait()
        assert len(witness.heard) == 4 and group.size == 2


def test_who_knows_nothing_is_passed_over() -> None:
    """Of several, the first who knows how long the rank has waited answers; of none, nobody has waited."""

    class Knowing(Listener):
        def step_waits(self) -> Waits:
            return Waits(2.0)

        def stragglers(self, *_: Any) -> dict[int, Slow]:
            return {3: Slow(1.5, 1.0)}

    both = Listeners([Witness(), Knowing()])
    assert both.step_waits() == Waits(2.0) and both.stragglers([1.0], [0.0], 1.0) == {3: Slow(1.5, 1.0)}
    assert Listeners().step_waits() == Waits() and Listeners().stragglers([1.0], [0.0], 1.0) == {}


PATCHES = "megacore.tools.choices.torch_patches"  # the one module that may replace what is another library's
# Where attributes of others are set else, how many such lines there are, and why.
KNOWN = {
    PATCHES: 1,  # imports mock
    "megacore.tools.verify.trace": 2,  # a head's logits and loss are methods, which no hook shows
    # its own model computes the loss, and whatever has a plain version, in plain code
    "megacore.tools.verify.reference": 2,
    "megacore.model.plain.pieces": 1,  # divides a number of features that a user's module keeps, no method
    "megacore.model.layers": 1,  # gives a layer what its class declares, which is no method
}


def replacing(source: Source, methods: set[str]) -> Iterator[str]:
    """Where a module replaces a method of an object that is not its own, or a function of a library."""
    functions = {node.name for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef)}
    aliases = [
        alias
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    imported = {(alias.asname or alias.name).partition(".")[0] for alias in aliases}
    for node in ast.walk(source.tree):
        found = False
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            found = (
                function in ("setattr", "delattr") and ast.unparse(node.args[0]) != "self"
            ) or function.endswith(".methods.update")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found = "mock" in ast.unparse(node)
        elif isinstance(node, ast.Assign):
            found = any(replaced(target, node.value, functions, methods, imported) for target in node.targets)
        if found:
            yield f"{source.name}:{node.lineno}: {ast.unparse(node)}"


def replaced(
    target: ast.expr, value: ast.expr, functions: set[str], methods: set[str], imported: set[str]
) -> bool:
    """Whether an assignment gives another's attribute a function, or another's table of methods an entry."""
    if isinstance(target, ast.Subscript):
        return ast.unparse(target.value).endswith(".methods")
    if not isinstance(target, ast.Attribute) or ast.unparse(target.value) == "self":
        return False
    inside = list(ast.walk(value))
    called = [node.func for node in inside if isinstance(node, ast.Call)]
    given = [node for node in inside if node not in called]
    function = any(
        isinstance(node, ast.Lambda) or (isinstance(node, ast.Name) and node.id in functions)
        for node in given
    )
    wrapped = any(ast.unparse(node) == ast.unparse(target) for node in given)
    return (function and ast.unparse(target).partition(".")[0] in imported) or (
        (function or wrapped) and target.attr in methods
    )


def methods_of(files: list[Source]) -> set[str]:
    """The names of all methods, but for properties."""
    classes = [node for file in files for node in ast.walk(file.tree) if isinstance(node, ast.ClassDef)]
    functions = [inner for node in classes for inner in node.body if isinstance(inner, ast.FunctionDef)]
    return {function.name for function in functions if not function.decorator_list}


def test_nobody_replaces_a_method() -> None:
    """A reader of the loop would not know what runs: who wants to see it is a listener."""
    files = [source for source in sources() if source.name.startswith("megacore.")]
    methods = methods_of(files)
    found = {source.name: lines for source in files if (lines := list(replacing(source, methods)))}
    assert {name: len(lines) for name, lines in found.items()} == KNOWN, found


@pytest.mark.parametrize(
    "code",
    [
        "setattr(wire, 'send', traced)",
        "def note(wire):\n    def sent(x): pass\n    watched = wire\n    watched.send = sent",
        "from unittest import mock",
        "import torch.distributed as dist\ndist.all_reduce = lambda x: x",
        "runtime.methods.update({op: marked})",
        "runtime.methods[op] = marked",
        "trainer.engine.send = partial(noted, trainer.engine.send)",
    ],
)
def test_a_replaced_method_is_found(code: str, tmp_path: Path) -> None:
    (tmp_path / "megacore").mkdir()
    path = tmp_path / "megacore/tool.py"
    path.write_text(code)
    assert len(list(replacing(read_source(path, tmp_path), {"send"}))) == 1
