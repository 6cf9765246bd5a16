"""Fixtures shared by all tests."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import costs
from tests.kernel_checks import interpret
from tests.plain_modules import PRELOAD
from tests.pool import CONTEXT, Pool

if TYPE_CHECKING:
    from megacore.tools.verify.workers import ProofWorkers


def pytest_addoption(parser: pytest.Parser) -> None:
    """What is asked of the suite itself."""
    parser.addoption(
        "--quick", action="store_true", help="only unit tests that do not take long, and those marked quick"
    )
    parser.addoption(
        "--costs",
        type=int,
        default=0,
        metavar="N",
        help="afterwards, the N costliest files and tests, by processor time",
    )
    parser.addoption(
        "--write-slow", action="store_true", help="note in tests/slow.txt which of these tests take long"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Counts only where somebody wants to know."""
    config.addinivalue_line(
        "markers", "quick: one of those that `--quick` runs, though it starts processes or takes long"
    )
    if config.option.costs or config.option.write_slow:
        config.pluginmanager.register(costs.Costs(config.option.costs, config.option.write_slow))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Does not import files of which no test is quick, which takes seconds."""
    if not config.option.quick or collection_path.suffix != ".py" or "unit" in collection_path.parts:
        return None
    return "mark.quick" not in collection_path.read_text(encoding="utf-8") or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is not quick."""
    if not config.option.quick:
        return
    slow = costs.slow()

    def quick(item: pytest.Item) -> bool:
        fast = item.nodeid.startswith("tests/unit/") and costs.function_of(item.nodeid) not in slow
        return fast or item.get_closest_marker("quick") is not None

    config.hook.pytest_deselected(items=[item for item in items if not quick(item)])
    items[:] = filter(quick, items)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Before the first test.

    DeepSpeed and transformers take many seconds to import: once for all workers that will need them.
    """
    if any("deepspeed" in item.nodeid for item in session.items):
        CONTEXT.set_forkserver_preload(
            ["tests.preload", "deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "tests.frozen"]
        )
    elif any("test_plain_" in item.nodeid for item in session.items):
        CONTEXT.set_forkserver_preload(PRELOAD)
    import tests.frozen  # noqa: F401  (all that tests import is there)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Worker processes that live as long as a test file: engines leave threads behind that would slow
    down whoever comes after them.
    """
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def workers() -> Iterator["ProofWorkers"]:
    """The ranks of proofs, which `prove` takes; they live as long as a test file."""
    from tests.commands import provers  # seconds to import: only where it is wanted

    with provers() as workers:
        yield workers


@pytest.fixture
def run_ranks(pool: Pool) -> Callable[..., list[Any]]:
    """`run_ranks(world, function, *args, timeout=PATIENCE)`: the results of a
    module-level function on that many ranks.
    """
    return pool.run


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[..., Any]]:
    """`interpreted(function, *args)`: its result where Triton kernels are interpreted on
    the CPU, for the kernels' tests.
    """
    pool = Pool(bare=True)
    yield partial(interpret, pool)
    pool.close()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, a corpus and its config, and beside them what is none (`tests/bad_inputs.py`)."""
    from tests.bad_inputs import write_tree  # seconds to import: only where it is wanted

    tree = tmp_path_factory.mktemp("tree")
    write_tree(tree)
    return tree


Refused = Callable[[str, tuple[str, ...], str], None]


@pytest.fixture
def refused(tree: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Refused:
    """`refused(script, arguments, line)`: the script's body raises a `UserError` of one line with that text,
    in bounded time and memory, and says, writes and starts nothing.
    """
    from megacore.errors import UserError
    from tests.bad_inputs import SCRIPTS, bounded, files_in

    def check(script: str, arguments: tuple[str, ...], line: str) -> None:
        monkeypatch.chdir(tree)
        before = files_in(tree)
        with bounded(), pytest.raises(UserError) as caught:
            SCRIPTS[script]([word.replace("@", f"{tree}/") for word in arguments])
        assert (
            line.replace("@", f"{tree}/") in str(caught.value)
            and "\n" not in str(caught.value)
            and len(str(caught.value)) < 2000
        )
        assert capfd.readouterr() == ("", ""), "a script says more than the line, or begins before it looks"
        assert files_in(tree) == before
        shutil.rmtree(tree / "new", ignore_errors=True)  # of a supervisor that found nobody to start

    return check
