"""The floors of the house: imports go down only, and what is kept to one place stays there.

Every import statement is read from the source, those inside functions too. A schedule can thus be planned,
plotted and checked on a machine without torch, and a change to the engine cannot reach into the model.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Rooms from the ground up. A room imports those before it and itself; rooms of one line do not import each
# other.
ROOMS = [
    ["megacore.errors"],
    ["megacore.files", "megacore.records", "megacore.caches", "megacore.rng", "megacore.distributed.axes"],
    ["megacore.section", "megacore.kernels."],
    ["megacore.optimizers."],
    ["megacore.config."],
    ["megacore.engine.alignment", "megacore.model.flow"],
    ["megacore.pipeline."],
    ["megacore.distributed."],
    ["megacore.tensor_parallel.", "megacore.context_parallel.", "megacore.data."],
    ["megacore.expert_parallel."],
    ["megacore.model."],
    ["megacore.engine.", "megacore.checkpoint."],
    ["megacore.pipeline.runtime"],
    ["megacore.train."],
    # The core ends here, and imports no tool.
    ["megacore.tools.settings."],
    [
        "megacore.tools.launchers",
        "megacore.tools.hostfile",
        "megacore.tools.error_report",
        "megacore.tools.help_text",
        "megacore.tools.output_files",
        "megacore.tools.charts",
        "megacore.tools.interrupt",
    ],
    ["megacore.tools.metrics_file", "megacore.tools.stop_request", "megacore.tools.retention"],
    ["megacore.tools.cli", "megacore.tools.processes", "megacore.tools.crowd", "megacore.tools.garbage"],
    [
        "megacore.tools.local_ranks",
        "megacore.tools.records",
        "megacore.tools.checkpoint_weights",
        "megacore.tools.folder_lock",
    ],
    ["megacore.tools.schedules.", "megacore.tools.deepspeed.", "megacore.tools.machine."],
    ["megacore.tools.corpora"],
    ["megacore.tools.drift", "megacore.tools.inputs"],
    ["megacore.tools.startup_lines"],
    ["megacore.tools.choices."],
    ["megacore.tools.planner.", "megacore.tools.text."],
    ["megacore.tools.monitoring.", "megacore.tools.prepare.", "megacore.tools.interchange."],
    ["megacore.tools.mirror", "megacore.tools.diagnosis."],
    ["megacore.tools.relaunch."],
    ["megacore.tools.verify.", "megacore.tools.preflight.", "megacore.tools.dry_run."],
    ["megacore.tools.library", "tests.drills."],
    ["megacore.tools.replay.", "megacore.tools.sweep.", "megacore.tools.scaling."],
    ["megacore.tools.versus."],
    ["megacore.launch", "megacore.__main__"],
    ["launch.", "benchmarks."],
    ["tests."],
]
FLOORS = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}

# What runs, or says its mistakes, before torch is imported; such a module imports others of them only.
TORCH_FREE = (
    "megacore.errors",
    "megacore.files",
    "megacore.records",
    "megacore.caches",
    "megacore.section",
    "megacore.config.",
    "megacore.pipeline.",
    "megacore.engine.alignment",
    "megacore.model.flow",
    "megacore.model.plain.folder",
    "megacore.tools.settings.load",
    "megacore.tools.settings.derive",
    "megacore.tools.settings.validation",
    "megacore.tools.settings.experts",
    "megacore.tools.settings.latent",
    "megacore.tools.settings.model",
    "megacore.tools.settings.ds_config",
    "megacore.tools.settings.ds_settings",
    "megacore.tools.settings.from_ds_config",
    "megacore.tools.settings.launcher_settings",
    "megacore.tools.settings.ds_keys",
    "megacore.tools.settings.other_words",
    "megacore.tools.settings.print_config",
    "megacore.tools.schedules.",
    "megacore.tools.choices.flops",
    "megacore.tools.choices.activations",
    "megacore.tools.choices.partition",
    "megacore.tools.choices.search_schedule",
    "megacore.tools.choices.resolve_auto",
    "megacore.tools.choices.context_method",
    "megacore.tools.choices.devices",
    "megacore.tools.choices.held",
    "megacore.tools.choices.layer_cost",
    "megacore.distributed.rank_info",
    "megacore.distributed.axes",
    "megacore.distributed.processes",
    "megacore.tools.launchers",
    "megacore.tools.hostfile",
    "megacore.tools.error_report",
    "megacore.tools.cli",
    "megacore.tools.help_text",
    "megacore.tools.interrupt",
    "megacore.tools.stop_request",
)
# Read before torch too, but what it does comes later: inside its functions such a module may import what its
# floor allows.
TORCH_LATE = ("megacore.optimizers.",)
# Third-party packages that they may import: those in the second set not at import time, only where something
# is drawn, or where a config.json of transformers has been read and found right.
TORCH_FREE_PACKAGES = ({"pydantic"}, {"matplotlib", "rich", "transformers", "huggingface_hub"})
KERNEL_PACKAGES = {"torch", "triton"}  # and no others in megacore.kernels

# The one module that may call torch.load, with `weights_only=True` spelt out: it then builds tensors and
# plain values, and calls nothing.
RESTRICTED_LOADER = "megacore.tools.interchange.nanogpt"

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

    def imports(self) -> tuple[Import, ...]:
        """Every imported name as written out in full: `from a import b` is a.b,
        which may or may not be a module.
        """
        return self._imports

    @cached_property
    def _imports(self) -> tuple[Import, ...]:
        return tuple(self._read_imports())

    def _read_imports(self) -> Iterator[Import]:
        not_at_import: list[ast.AST] = [
            node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        not_at_import += [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        ]
        lazy_nodes = {inner for node in not_at_import for inner in ast.walk(node)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(alias.name, node.lineno, node in lazy_nodes)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    above = self.name.split(".")[
                        : None if self.is_package and node.level == 1 else -(node.level - self.is_package)
                    ]
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


@cache
def sources(root: Path = ROOT) -> list[Source]:
    rooms = ("megacore", "kernels", "launch", "benchmarks")
    return [read_source(path, root) for room in rooms for path in sorted((root / room).rglob("*.py"))]


def resolve(name: str, known: set[str]) -> str:
    """The module that an imported name belongs to: the longest prefix that is a file of ours,
    or else its top-level package.
    """
    while name not in known and "." in name:
        name = name.rpartition(".")[0]
    return name


def room_of(name: str) -> str | None:
    """The room that a module stands in, None if nobody gave it one. A package's own file is in its room."""
    rooms = (
        room for room in FLOORS if name == room.rstrip(".") or (room.endswith(".") and name.startswith(room))
    )
    return max(rooms, key=len, default=None)


def is_torch_free(name: str) -> bool:
    """Whether a module may be imported before torch.

    A package's own file, which every import of what is inside it runs, is no more than a docstring
    (`test_packages_hold_nothing_of_their_own`).
    """
    free = any(
        name == free or (free.endswith(".") and name.startswith(free)) for free in TORCH_FREE + TORCH_LATE
    )
    return free and name != "megacore.pipeline.runtime"


def may_wait_for_torch(file: Source, imported: Import) -> bool:
    """Whether an import comes so late that torch is there."""
    return imported.lazy and file.name.startswith(TORCH_LATE)


def violations(files: list[Source]) -> list[str]:
    """One line for each import that a floor forbids, and each module without one."""
    known = {file.name for file in files}
    found = []
    for file in files:
        room = room_of(file.name)
        if file.name in ("megacore", "megacore.tools", "launch", "benchmarks", "tests"):
            continue
        if room is None:
            found.append(f"{file.name}: stands on no floor")
            continue
        for imported in file.imports():
            where = f"{file.name}:{imported.line}"
            target = resolve(imported.module, known)
            if imported.top not in ("megacore", "launch", "benchmarks", "tests"):
                found += foreign(file, imported, where)
            elif target == "megacore":
                continue
            elif (other := room_of(target if target in known else imported.module)) is None:
                found.append(f"{where}: imports {imported.module}, which stands on no floor")
            elif other != room and FLOORS[other] >= FLOORS[room]:
                found.append(
                    f"{where}: {room.rstrip('.')} on floor {FLOORS[room]} imports {target} on floor "
                    f"{FLOORS[other]}"
                )
            elif (
                is_torch_free(file.name)
                and not is_torch_free(target)
                and not may_wait_for_torch(file, imported)
            ):
                found.append(f"{where}: comes before torch and imports {target}, which does not")
    return found


def foreign(file: Source, imported: Import, where: str) -> Iterator[str]:
    """A package that is neither Python's nor ours, where it may not be imported."""
    top, late = imported.top, ", even if lazily" if imported.lazy else ""
    if top in sys.stdlib_module_names or may_wait_for_torch(file, imported):
        return
    if file.name.startswith("megacore.kernels.") and top not in KERNEL_PACKAGES:
        yield f"{where}: a kernel imports {top}{late}"
    if (
        is_torch_free(file.name)
        and top not in TORCH_FREE_PACKAGES[0]
        and not (imported.lazy and top in TORCH_FREE_PACKAGES[1])
    ):
        yield f"{where}: comes before torch and imports {top}{late}"


def test_packages_hold_nothing_of_their_own():
    """A package's own file is run by every import of anything inside it: code there
    would stand on every floor at once.
    """
    allowed = {"megacore", "megacore.kernels", "megacore.config", "megacore.checkpoint", "benchmarks"}
    allowed.add("megacore.launch")
    for file in sources():
        if file.is_package and file.name not in allowed:
            assert all(isinstance(node, ast.Expr) for node in file.tree.body), file.name


def test_imports_go_down_only():
    assert violations(sources()) == []


def test_the_core_imports_no_tool():
    """A run can do without them; what it needs of one would have to be kept for it."""
    core = [
        source
        for source in sources()
        if source.name.startswith("megacore.")
        and not source.name.startswith(("megacore.tools", "megacore.__main__"))
    ]
    assert len(core) > 100
    for source in core:
        tools = {
            imported.module for imported in source.imports() if imported.module.startswith("megacore.tools")
        }
        assert not tools, (source.name, tools)


def test_every_room_is_read():
    """If a folder moved, the test above would pass because it reads nothing."""
    names = {source.name for source in sources()}
    assert {
        "megacore.errors",
        "megacore.kernels.softmax",
        "megacore.pipeline.schedule",
        "megacore.config.schema",
    } <= names
    assert any(name.startswith("launch.") for name in names)


def test_deepspeed_is_imported_in_one_module_lazily():
    """Everything else must run where DeepSpeed is broken or absent, and start without its slow import."""
    # which is what megacore is held against
    ours = [source for source in sources() if source.name != "benchmarks.peers.deepspeed_loop"]
    uses = [
        (source.name, imported)
        for source in ours
        for imported in source.imports()
        if imported.top == "deepspeed"
    ]
    assert len({name for name, _ in uses}) <= 1 and all(imported.lazy for _, imported in uses), uses


def unpickling(source: Source) -> list[str]:
    """Where a source could run code out of a file that it loads."""
    found = [
        f"{source.name}:{imported.line}: {imported.module}"
        for imported in source.imports()
        if imported.top in PICKLES
    ]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "torch.load",
            "torch.serialization.load",
        ):
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if source.name == RESTRICTED_LOADER and options.get("weights_only") == "True":
                continue
            found.append(f"{source.name}:{node.lineno}: torch.load")
        if (
            isinstance(node, ast.keyword)
            and node.arg == "allow_pickle"
            and ast.unparse(node.value) != "False"
        ):
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
        (
            "megacore/model/gpt.py",
            "from megacore.engine.native import step",
            "megacore.model on floor 10 imports megacore.engine.native",
        ),
        (
            "megacore/model/gpt.py",
            "def f():\n    import megacore.engine.native",
            "imports megacore.engine.native on floor 11",
        ),
        (
            "megacore/model/gpt.py",
            "from ..engine import native",
            "imports megacore.engine.native on floor 11",
        ),
        (
            "megacore/model/__init__.py",
            "from ..engine.native import step",
            "imports megacore.engine.native on floor 11",
        ),
        (
            "megacore/checkpoint/read.py",
            "import megacore.engine.native",
            "on floor 11 imports megacore.engine.native on floor 11",
        ),
        (
            "megacore/data/shuffle.py",
            "import launch.pretrain",
            "megacore.data on floor 8 imports launch.pretrain on floor 33",
        ),
        ("megacore/attic.py", "", "stands on no floor"),
        ("megacore/attic/old.py", "", "stands on no floor"),
        ("megacore/pipeline/schedule.py", "import torch", "comes before torch and imports torch"),
        (
            "megacore/pipeline/plot.py",
            "import matplotlib.pyplot",
            "comes before torch and imports matplotlib",
        ),
        (
            "megacore/pipeline/memory.py",
            "def f():\n    import numpy",
            "comes before torch and imports numpy, even if lazily",
        ),
        ("megacore/optimizers/sgd.py", "import torch", "comes before torch and imports torch"),
        (
            "megacore/tools/cli.py",
            "from megacore.distributed import collectives",
            "comes before torch and imports megacore.distributed.collectives",
        ),
        ("kernels/softmax.py", "import numpy", "a kernel imports numpy"),
        (
            "kernels/softmax.py",
            "from megacore.distributed.collectives import all_reduce",
            "imports megacore.distributed.collectives on floor 7",
        ),
    ],
)
def test_planted_imports_are_reported(tmp_path, path, code, complaint):
    """Each fault is planted alone among harmless files; a check that reads less
    than it claims would stay silent.
    """
    harmless = ["megacore/__init__.py", "megacore/distributed/collectives.py", "launch/pretrain.py"]
    harmless += ["megacore/engine/__init__.py", "megacore/engine/native.py"]
    build(tmp_path, dict.fromkeys(harmless, "") | {path: code})
    found = violations(sources(tmp_path))
    assert len(found) == 1 and complaint in found[0], found


def test_allowed_imports_pass(tmp_path):
    """The check forbids no more than the floors do: downwards, sideways, lazily drawn, standard library."""
    gpt = """
import json, torch, triton
from megacore.distributed.collectives import all_reduce
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
    files = ("__init__", "errors", "distributed/comm", "model/__init__", "model/block")
    empty = [f"megacore/{name}.py" for name in files]
    full = {
        "megacore/model/gpt.py": gpt,
        "kernels/softmax.py": "import torch",
        "megacore/pipeline/plot.py": plot,
    }
    build(tmp_path, dict.fromkeys(empty, "") | full)
    assert violations(sources(tmp_path)) == []


UNPICKLING = [
    "import pickle",
    "def f():\n    from shelve import open",
    "torch.load(path)",
    "numpy.load(path, allow_pickle=True)",
]


@pytest.mark.parametrize("code", UNPICKLING)
def test_planted_unpickling_is_reported(tmp_path, code):
    build(tmp_path, {"megacore/distributed/collectives.py": code})
    assert len(unpickling(read_source(tmp_path / "megacore/distributed/collectives.py", tmp_path))) == 1


@pytest.mark.parametrize(
    "path, code, allowed",
    [
        ("megacore/tools/interchange/nanogpt.py", "torch.load(path, weights_only=True)", True),
        ("megacore/tools/interchange/nanogpt.py", "torch.load(path)", False),
        ("megacore/tools/interchange/nanogpt.py", "torch.load(path, weights_only=False)", False),
        ("megacore/tools/interchange/nanogpt.py", "torch.load(path, weights_only=trusted)", False),
        ("megacore/distributed/collectives.py", "torch.load(path, weights_only=True)", False),
    ],
)
def test_only_one_module_loads_torch_files_and_only_without_code(tmp_path, path, code, allowed):
    build(tmp_path, {path: code})
    assert (unpickling(read_source(tmp_path / path, tmp_path)) == []) is allowed
