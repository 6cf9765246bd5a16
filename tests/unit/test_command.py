"""The `megacore` command: it lists the scripts of launch/, runs one as if it had been started itself, and
does so from an installed package too.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megacore import __main__ as command
from megacore.errors import ConfigError
from tests.documents.pages import ROOT

CONFIG = str(ROOT / "configs/gpt_tiny.json")


def run(*words: str, folder: Path = ROOT, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(path), "COLUMNS": "100", "NO_COLOR": "1"}
    environment.pop("PYTHONSAFEPATH", None)
    line = [sys.executable, "-m", "megacore", *words]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_every_script_is_listed_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.show_commands([]) == 0
    listed = capsys.readouterr().out
    scripts = {path.stem for path in (ROOT / "launch").glob("*.py")}
    assert {"plan", "pretrain", "try"} <= scripts <= set(command.scripts())
    for name, path in command.scripts().items():
        first_words = " ".join(command.purpose(path).split()[:3])
        assert f"  {name} " in listed and first_words in listed
        assert command.purpose(path)[-1] in ".?"
    assert max(map(len, listed.splitlines())) <= 110
    assert command.show_commands(["-h"]) == 0 and capsys.readouterr().out == listed


def test_an_unknown_command_is_one_line_with_the_nearest_name() -> None:
    wrong = run("plam")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "config error: COMMAND: megacore has no command plam (did you mean plan?)\n"
    with pytest.raises(ConfigError, match="megacore -h lists the commands"):
        command.show_commands(["--world"])


def test_a_command_is_its_script(tmp_path: Path) -> None:
    """From any folder, with the script's output, and its mistakes with their status."""
    words = ["--config", CONFIG, "--world", "2"]
    planned = run("plan", *words, folder=tmp_path)
    script = [sys.executable, str(ROOT / "launch/plan.py"), *words]
    same = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True)
    assert (planned.returncode, planned.stdout) == (0, same.stdout)

    wrong = run("pretrain", "--config", "nowhere.json", folder=tmp_path)
    assert wrong.returncode == 2 and len(wrong.stderr.splitlines()) == 1
    assert wrong.stderr.startswith("config error: --config: cannot read nowhere.json")


@pytest.mark.parametrize("name", ["plan", "kubernetes/render"])
def test_the_help_of_a_command_shows_its_name(name: str, tmp_path: Path) -> None:
    """The usage line and the example would show a path that the reader has not typed."""
    shown = run(name, "-h", folder=tmp_path).stdout
    assert shown.startswith(f"usage: megacore {name} --config FILE ")
    assert f"\n  megacore {name} --config " in shown


def test_the_option_of_the_deepspeed_launcher_may_precede_the_command() -> None:
    words = ["--local_rank=1", "pretrain", "--config", "a.json"]
    assert command.command_first(words) == ["pretrain", "--config", "a.json", "--local_rank=1"]


def test_help_comes_before_torch() -> None:
    """Its import takes seconds."""
    code = (
        "import sys; from megacore.__main__ import show_commands; show_commands([]); "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with megacore as a wheel would install it, far from the checkout."""
    copy = tmp_path_factory.mktemp("copy")
    for folder in ("megacore", "kernels", "launch"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.py", copy)
    built = tmp_path_factory.mktemp("built")
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(built)]
    done = subprocess.run(build, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(copy)
    return built


def test_an_installed_command_needs_no_checkout(installed: Path, tmp_path: Path) -> None:
    """supervise imports another script; -h of all would be too slow."""
    planned = run("plan", "--config", CONFIG, "--world", "2", folder=tmp_path, path=installed)
    assert planned.returncode == 0 and "parameters" in planned.stdout, planned.stderr
    for words in (["supervise", "-h"], ["replay", "-h"], ["kubernetes/render", "-h"]):
        shown = run(*words, folder=tmp_path, path=installed)
        assert shown.returncode == 0 and shown.stdout, shown.stderr
    drilled = run(
        "drill", "--config", CONFIG, "--fault", "kill:rank=0,step=7", folder=tmp_path, path=installed
    )
    assert drilled.returncode == 2 and "in a checkout" in drilled.stderr


def test_an_installed_script_hides_no_other_package(installed: Path, tmp_path: Path) -> None:
    """Were the package's own folder on the path, `import kernels` or `import data` would find its modules."""
    code = (
        "import runpy, sys; sys.argv[1:] = ['-h']\n"
        "import megacore.tools.cli as cli; cli.leave = lambda status: None\n"
        f"runpy.run_path({str(installed / 'megacore/launch/plan.py')!r}, run_name='__main__')\n"
        f"assert {str(installed / 'megacore')!r} not in sys.path, sys.path"
    )
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
