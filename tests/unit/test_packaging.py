"""What is declared is what is used, and `megacore.kernels` is found however megacore got
there, beside PyPI's `kernels` too.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.unit.test_floors import ROOT, build, sources

# Distributions that no import statement names: why they are declared all the same.
NOT_IMPORTED = {
    "deepspeed": "its launcher starts the ranks",
    "tensorboard": "torch.utils.tensorboard writes through it",
    "mypy": "a command",
    "ruff": "a command",
    "pytest-xdist": "tests/run.sh runs three files at a time",
    "pyarrow": "tools/prepare/streams.py imports it by its name, if it is there",
    "datasets": "likewise",
    "tiktoken": "likewise",
    "nvidia-ml-py": "torch.cuda.utilization asks through it",
    "kubernetes-validate": "tests alone import it, as pytest",
}

# Modules of distributions that are called otherwise.
IMPORTED_AS = {"prometheus-client": "prometheus_client", "pyyaml": "yaml"}


@pytest.fixture
def declared() -> dict[str, Any]:
    """The table `project` of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements(declared: dict[str, Any]) -> dict[str, Requirement]:
    """All requirements by name, without the extras that an extra includes."""
    lines = declared["dependencies"] + [
        line for extra in declared["optional-dependencies"].values() for line in extra
    ]
    parsed = [Requirement(line) for line in lines]
    return {requirement.name: requirement for requirement in parsed if requirement.name != "megacore"}


def imported_names(declared: dict[str, Any]) -> set[str]:
    return {IMPORTED_AS.get(name, name) for name in requirements(declared)}


def constraints() -> dict[str, Requirement]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    return {Requirement(line).name: Requirement(line) for line in lines if line}


def test_every_third_party_import_is_declared(declared):
    """An undeclared one works here by luck, because something else brought it, and
    fails on a user's machine.
    """
    known = (
        set(sys.stdlib_module_names)
        | {"megacore", "launch", "benchmarks", "tests", "kernels"}
        | imported_names(declared)
    )
    # in environments that the benchmark makes: benchmarks/peers/environments.py
    installed_apart = {"megatron", "torchtitan"}
    strangers = {
        (source.name, imported.top)
        for source in sources()
        for imported in source.imports()
        if imported.top
        not in known | (installed_apart if source.name.startswith("benchmarks.peers.") else set())
    }
    assert strangers == set()


def test_nothing_is_declared_in_vain(declared):
    used = (
        {imported.top for source in sources() for imported in source.imports()}
        | {"pytest"}
        | set(NOT_IMPORTED)
    )
    assert imported_names(declared) - used == set()


def test_constraints_are_the_declared_ranges_made_exact(declared):
    """A constraint outside its range cannot be installed; one without `==` is no tested version; an
    address binds all to one index.
    """
    wanted, exact = requirements(declared), constraints()
    assert set(exact) == set(wanted) - {"triton"}  # which torch's GPU builds pin themselves
    for name, constraint in exact.items():
        (specifier,) = constraint.specifier
        assert specifier.operator == "==" and wanted[name].specifier.contains(specifier.version), constraint
    assert not re.search(r"://|^\s*-", (ROOT / "requirements.txt").read_text(), re.MULTILINE)


def test_versions_agree(declared):
    import megacore

    assert declared["version"] == megacore.__version__


def test_what_the_documents_write_is_ignored():
    """Models and corpora that its commands write would be committed with `git add .`, gigabytes of them."""
    ignored = (ROOT / ".gitignore").read_text().split()
    texts = [path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    # whose results are kept
    written = {folder for text in texts for folder in re.findall(r"--output (\w+)/", text)} - {"benchmarks"}
    assert {"data", "models", "runs"} <= written and {f"/{folder}/" for folder in written} <= set(ignored)


# --- megacore.kernels ---------------------------------------------------------------------------------------

PROBE = """
import importlib.util, sys
import kernels
assert kernels.THEIRS, kernels
print(importlib.util.find_spec("megacore.kernels.softmax").origin)
"""


def found_softmax(path: list[Path], folder: Path) -> Path:
    """Where a fresh interpreter in `folder`, with `path`, finds megacore.kernels.softmax;
    it must find PyPI's kernels too.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    run = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return Path(run.stdout.strip())


@pytest.fixture
def site(tmp_path) -> Path:
    """A folder of installed packages with a stand-in for the package on PyPI called `kernels`."""
    build(tmp_path, {"site/kernels/__init__.py": "THEIRS = True", "site/kernels/README.md": "theirs"})
    return tmp_path / "site"


@pytest.mark.parametrize("ours_first", [True, False])
def test_checkout_beside_the_package_called_kernels(site, ours_first):
    """An `__init__.py` in our kernels/ would take PyPI's name; without ours being
    found, fused attention is gone.
    """
    path = [ROOT, site] if ours_first else [site, ROOT]
    assert found_softmax(path, ROOT) == ROOT / "kernels/softmax.py"


def test_wheel_beside_the_package_called_kernels(site, tmp_path):
    """What setup.py would install holds the kernels under megacore, and no top-level
    `kernels` to overwrite PyPI's.
    """
    copy = tmp_path / "copy"  # building leaves its traces there
    for room in ("megacore", "kernels", "launch"):
        shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.py", copy)
    built = tmp_path / "built"
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(built)]
    run = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert [path.name for path in built.iterdir()] == ["megacore"]
    assert found_softmax([built, site], tmp_path) == built / "megacore/kernels/softmax.py"
    assert (built / "megacore/py.typed").is_file(), "type checkers would take all of megacore for Any"
    modules = {path.relative_to(ROOT / "megacore") for path in (ROOT / "megacore").rglob("*.py")}
    assert modules - {path.relative_to(built / "megacore") for path in built.rglob("*.py")} == {
        Path("kernels/__init__.py"),
        Path("launch/__init__.py"),
    }
    for script in (ROOT / "launch").rglob("*.py"):
        assert (built / "megacore" / script.relative_to(ROOT)).is_file()


# --- launch/environment.sh ----------------------------------------------------------------------------------

# Stands for python3, and, once "installed" in a virtual environment, for that one's: logs what it is asked to
# do.
FAKE_PYTHON = """#!/bin/sh
echo "$*" >>"$CALLS"
case "$*" in
    *version_info*) exit "${TOO_OLD:-0}" ;;
    --version) echo "Python 3.9.2" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip install "*) exit "${BROKEN:-0}" ;;
esac
"""


INSTALL = "-m pip install --no-compile -c requirements.txt -e ."


@pytest.fixture
def checkout(tmp_path):
    """A copy of what environment.sh reads, with an interpreter that only pretends;
    returns a function that sources it.
    """
    (tmp_path / "launch").mkdir()
    for name in ("launch/environment.sh", "pyproject.toml", "setup.py", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    calls = tmp_path / "calls"

    def enter(extras: str = "", **extra: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        calls.write_text("")
        environment = {"PATH": os.environ["PATH"], "CALLS": str(calls), "PYTHON": str(python)} | extra
        script = "set -euo pipefail; source launch/environment.sh; command -v python"
        command = ["bash", "-c", f"megacore_extras={extras}; {script}"]
        run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return run, [
            line for line in calls.read_text().splitlines() if " install " in line or "-m venv" in line
        ]

    return enter


def test_environment_installs_once_and_again_after_a_change(checkout, tmp_path):
    """A second start must cost nothing and need no network; a changed requirement must not be overlooked."""
    first, calls = checkout()
    assert first.returncode == 0 and first.stdout.splitlines()[-1] == str(tmp_path / ".venv/bin/python")
    assert calls == [
        f"-m venv {tmp_path}/.venv",
        INSTALL,
    ]
    second, calls = checkout()
    assert (second.returncode, second.stdout, calls) == (0, f"{tmp_path}/.venv/bin/python\n", [])
    (tmp_path / "requirements.txt").write_text("torch==2.14.0\n")
    assert checkout()[1] == [INSTALL]


def test_tests_add_their_packages_and_the_quickstart_leaves_them(checkout, tmp_path):
    """The quickstart would install linters; after it the tests would lack them; after a change the
    quickstart would leave the tests' packages at old versions.
    """
    assert checkout()[1][-1] == INSTALL
    assert checkout(extras="[test]")[1] == [f"{INSTALL}[test]"]
    assert checkout()[1] == [] and checkout(extras="[test]")[1] == []
    (tmp_path / "requirements.txt").write_text("torch==2.14.0\n")
    assert checkout()[1] == [f"{INSTALL}[test]"]


def test_a_failed_installation_is_tried_again(checkout):
    failed, _ = checkout(BROKEN="1")
    assert failed.returncode == 2 and failed.stderr.splitlines()[-1].startswith(
        "the installation failed (log: "
    )
    again, calls = checkout()
    assert again.returncode == 0 and calls == [INSTALL]


def test_an_old_python_is_one_clear_line(checkout):
    run, calls = checkout(TOO_OLD="1")
    assert run.returncode == 2 and calls == [] and len(run.stderr.splitlines()) == 1
    assert run.stderr.startswith("megacore needs Python 3.11 or newer, found: Python 3.9.2")


def test_a_missing_python_is_one_clear_line(checkout):
    run, _ = checkout(PYTHON="/nowhere/python3")
    assert run.returncode == 2 and len(run.stderr.splitlines()) == 1 and "needs Python 3.11" in run.stderr


def test_the_environment_can_live_elsewhere(checkout, tmp_path):
    run, _ = checkout(MEGACORE_VENV=str(tmp_path / "else where"))
    assert run.returncode == 0 and run.stdout.splitlines()[-1] == str(tmp_path / "else where/bin/python")
