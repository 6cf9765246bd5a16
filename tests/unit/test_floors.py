"""The floors of the house: imports go down only, and what is kept to one place stays there.

Every import statement is read from the source, those inside functions too. A schedule can thus be planned, plotted and
checked on a machine without torch, and a change to the engine cannot reach into the model.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The longest matching prefix counts. A new file in a room is on the room's floor; a new room needs a line here.
FLOORS = {
    "megacore": 0, "megacore.caches": 0, "megacore.cli": 0, "megacore.errors": 0, "megacore.place": 0, "megacore.processes": 0,
    "megacore.reasons": 0, "megacore.files": 0,
    "megacore.config.": 0, "megacore.plan.": 0,
    "megacore.pipeline.schedule": 0, "megacore.pipeline.simulate": 0, "megacore.pipeline.partition": 0, "megacore.pipeline.plot": 0,
    "megacore.kernels.": 0,
    "megacore.mesh": 1, "megacore.comm": 1, "megacore.rng": 1, "megacore.ledger": 1, "megacore.shared_memory": 1,
    "megacore.tensor_parallel.": 2,
    "megacore.model.": 3, "megacore.data.": 3, "megacore.train.meters": 3,
    "megacore.pipeline.runtime": 4, "megacore.checkpoint.": 4, "megacore.generation.": 4,
    "megacore.engine.protocol": 4, "megacore.engine.reduce": 4, "megacore.engine.optimizer": 4, "megacore.engine.stepper": 4,
    "megacore.engine.guard": 4,
    "megacore.engine.": 5, "megacore.interchange.": 5,
    "megacore.train.": 6,
    "megacore.verify.": 6, "megacore.survive.": 6,
    "launch.": 7, "benchmarks.": 7, "tests.": 7,
}  # fmt: skip

# Third-party packages of floor 0; those in the second set not at import time, only where something is drawn.
FLOOR_0_PACKAGES: dict[str, tuple[set[str], set[str]]] = {"megacore.kernels.": ({"torch", "triton"}, set())}
FLOOR_0_DEFAULT = ({"pydantic"}, {"matplotlib", "rich"})

# The one module that may call torch.load, with `weights_only=True` spelt out: it then builds tensors and plain values, and calls nothing.
RESTRICTED_LOADER = "megacore.interchange.nanogpt"

PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    lazy: bool  # inside a function, or for the type checker alone

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


@dataclass(frozen=True)
class Source:
    name: str  # "megacore.kernels.softmax"
    path: Path
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    def imports(self) -> Iterator[Import]:
        """Every imported name as written out in full: `from a import b` is a.b, which may or may not be a module."""
        not_at_import: list[ast.AST] = [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        not_at_import += [node for node in ast.walk(self.tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
        lazy_nodes = {inner for node in not_at_import for inner in ast.walk(node)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(alias.name, node.lineno, node in lazy_nodes)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    above = self.name.split(".")[: None if self.is_package and node.level == 1 else -(node.level - self.is_package)]
                    base = ".".join([*above, base] if base else above)
                for alias in node.names:
                    yield Import(f"{base}.{alias.name}", node.lineno, node in lazy_nodes)


def read_source(path: Path, root: Path = ROOT) -> Source:
    parts = list(path.relative_to(root).with_suffix("").parts)
    if parts[0] == "kernels":
        parts.insert(0, "megacore")
    if parts[-1] == "__init__":
        parts.pop()
    return Source(".".join(parts), path, ast.parse(path.read_text(encoding="utf-8")))


def sources(root: Path = ROOT) -> list[Source]:
    rooms = ("megacore", "kernels", "launch", "benchmarks")
    return [read_source(path, root) for room in rooms for path in sorted((root / room).rglob("*.py"))]


def resolve(name: str, known: set[str]) -> str:
    """The module that an imported name belongs to: the longest prefix that is a file of ours, or else its top-level package."""
    while name not in known and "." in name:
        name = name.rpartition(".")[0]
    return name


def floor_of(name: str, packages: set[str]) -> int | None:
    """A module's floor, None if nobody gave it one. A package's own file is run by every import of anything inside it:
    it stands on the lowest floor of its room."""
    if name in packages and name != "megacore":
        inside = [floor for prefix, floor in FLOORS.items() if prefix.startswith(name + ".")]
        return min(inside) if inside else floor_of(name + ".", set())
    if name in FLOORS:
        return FLOORS[name]
    prefixes = [prefix for prefix in FLOORS if prefix.endswith(".") and name.startswith(prefix)]
    return FLOORS[max(prefixes, key=len)] if prefixes else None


def violations(files: list[Source]) -> list[str]:
    """One line for each import that a floor forbids, and each module without a floor."""
    known, packages = {file.name for file in files}, {file.name for file in files if file.is_package}
    found = []
    for file in files:
        floor = floor_of(file.name, packages)
        if floor is None:
            found.append(f"{file.name}: stands on no floor")
            continue
        eager, lazy = next((sets for prefix, sets in FLOOR_0_PACKAGES.items() if file.name.startswith(prefix)), FLOOR_0_DEFAULT)
        for imported in file.imports():
            where = f"{file.name}:{imported.line}"
            target, top = resolve(imported.module, known), imported.top
            if top in ("megacore", "launch", "benchmarks", "tests"):
                below = floor_of(target, packages) if target in known else floor_of(imported.module, packages)
                if below is None:
                    found.append(f"{where}: imports {imported.module}, which stands on no floor")
                elif below > floor:
                    found.append(f"{where}: floor {floor} imports {target} on floor {below}")
            elif floor == 0 and top not in sys.stdlib_module_names and top not in eager and not (imported.lazy and top in lazy):
                found.append(f"{where}: floor 0 imports {top}{', even if lazily' if imported.lazy else ''}")
    return found


def test_imports_go_down_only():
    assert violations(sources()) == []


def test_every_room_is_read():
    """If a folder moved, the test above would pass because it reads nothing."""
    names = {source.name for source in sources()}
    assert {"megacore.errors", "megacore.kernels.softmax", "megacore.pipeline.schedule", "megacore.config.schema"} <= names
    assert any(name.startswith("launch.") for name in names)


def test_deepspeed_is_imported_in_one_module_lazily():
    """Everything else must run where DeepSpeed is broken or absent, and start without its slow import."""
    ours = [source for source in sources() if source.name != "benchmarks.peers.deepspeed_loop"]  # which is what megacore is held against
    uses = [(source.name, imported) for source in ours for imported in source.imports() if imported.top == "deepspeed"]
    assert len({name for name, _ in uses}) <= 1 and all(imported.lazy for _, imported in uses), uses


def unpickling(source: Source) -> list[str]:
    """Where a source could run code out of a file that it loads."""
    found = [f"{source.name}:{imported.line}: {imported.module}" for imported in source.imports() if imported.top in PICKLES]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "torch.serialization.load"):
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if source.name == RESTRICTED_LOADER and options.get("weights_only") == "True":
                continue
            found.append(f"{source.name}:{node.lineno}: torch.load")
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            found.append(f"{source.name}:{node.value.lineno}: allow_pickle")
    return found


def test_nothing_unpickles():
    """A checkpoint or token file from elsewhere must not be able to run code."""
    assert [line for source in sources() for line in unpickling(source)] == []


def build(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    "path, code, complaint",
    [
        ("megacore/model/gpt.py", "from megacore.engine.native import step", "floor 3 imports megacore.engine.native on floor 5"),
        ("megacore/model/gpt.py", "def f():\n    import megacore.engine.native", "floor 3 imports megacore.engine.native on floor 5"),
        ("megacore/model/gpt.py", "from ..engine import native", "floor 3 imports megacore.engine.native on floor 5"),
        ("megacore/model/__init__.py", "from ..engine.native import step", "floor 3 imports megacore.engine.native on floor 5"),
        ("megacore/engine/__init__.py", "from .native import step", "floor 4 imports megacore.engine.native on floor 5"),
        ("megacore/data/order.py", "import launch.pretrain", "floor 3 imports launch.pretrain on floor 7"),
        ("megacore/attic.py", "", "stands on no floor"),
        ("megacore/pipeline/attic.py", "", "stands on no floor"),
        ("megacore/pipeline/schedule.py", "import torch", "floor 0 imports torch"),
        ("megacore/pipeline/plot.py", "import matplotlib.pyplot", "floor 0 imports matplotlib"),
        ("megacore/plan/memory.py", "def f():\n    import numpy", "floor 0 imports numpy, even if lazily"),
        ("kernels/softmax.py", "import numpy", "floor 0 imports numpy"),
        ("kernels/softmax.py", "from megacore.comm import all_reduce", "floor 0 imports megacore.comm on floor 1"),
    ],
)  # fmt: skip
def test_planted_imports_are_reported(tmp_path, path, code, complaint):
    """Each fault is planted alone among harmless files; a check that reads less than it claims would stay silent."""
    harmless = ["megacore/__init__.py", "megacore/comm.py", "launch/pretrain.py"]
    harmless += ["megacore/engine/__init__.py", "megacore/engine/native.py"]
    build(tmp_path, dict.fromkeys(harmless, "") | {path: code})
    found = violations(sources(tmp_path))
    assert len(found) == 1 and complaint in found[0], found


def test_allowed_imports_pass(tmp_path):
    """The check forbids no more than the floors do: downwards, sideways, lazily drawn, standard library."""
    gpt = """
import json, torch, triton
from megacore.comm import all_reduce
from megacore import errors
from megacore.kernels.softmax import causal_softmax
from . import block
"""
    plot = """
from typing import TYPE_CHECKING
from pydantic import Field
if TYPE_CHECKING:
    from matplotlib.axes import Axes
def draw():
    from matplotlib import pyplot
"""
    empty = ("megacore/__init__.py", "megacore/errors.py", "megacore/comm.py", "megacore/model/__init__.py", "megacore/model/block.py")
    full = {"megacore/model/gpt.py": gpt, "kernels/softmax.py": "import torch", "megacore/pipeline/plot.py": plot}
    build(tmp_path, dict.fromkeys(empty, "") | full)
    assert violations(sources(tmp_path)) == []


UNPICKLING = ["import pickle", "def f():\n    from shelve import open", "torch.load(path)", "numpy.load(path, allow_pickle=True)"]


@pytest.mark.parametrize("code", UNPICKLING)
def test_planted_unpickling_is_reported(tmp_path, code):
    build(tmp_path, {"megacore/comm.py": code})
    assert len(unpickling(read_source(tmp_path / "megacore/comm.py", tmp_path))) == 1


@pytest.mark.parametrize(
    "path, code, allowed",
    [
        ("megacore/interchange/nanogpt.py", "torch.load(path, weights_only=True)", True),
        ("megacore/interchange/nanogpt.py", "torch.load(path)", False),
        ("megacore/interchange/nanogpt.py", "torch.load(path, weights_only=False)", False),
        ("megacore/interchange/nanogpt.py", "torch.load(path, weights_only=trusted)", False),
        ("megacore/comm.py", "torch.load(path, weights_only=True)", False),
    ],
)
def test_only_one_module_loads_torch_files_and_only_without_code(tmp_path, path, code, allowed):
    build(tmp_path, {path: code})
    assert (unpickling(read_source(tmp_path / path, tmp_path)) == []) is allowed
