"""Output files are looked at before the work whose result would be lost."""

import ast
import os
import re
from pathlib import Path

import pytest

from megacore.errors import ConfigError
from megacore.tools.output_files import check_json, check_output, report_unless_json, write_results
from tests.pool import ROOT

WRITTEN = {"--json", "--output", "--plot", "--heat-map", "--gpu-file", "--cluster-file"}


@pytest.mark.parametrize("path", ["/proc/x", "/proc/self/x.json", "/sys/x", "nowhere/x", "/dev/fd/nowhere/x"])
def test_a_folder_that_takes_no_file_is_found_first(path: str) -> None:
    """/proc has permissions that let root write, and takes no file."""
    with pytest.raises(ConfigError, match=f"^config error: --json: cannot write {path}: "):
        check_output("--json", path)


def test_looking_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.json").write_text("old")
    for path in ("old.json", "new.json", str(tmp_path / "other.json"), os.devnull, "/dev/stdout"):
        check_output("--json", path)
    assert os.listdir() == ["old.json"] and Path("old.json").read_text() == "old"


def written_options(path: Path) -> set[str]:
    """The options of a script that name a file to write."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "add_json":
            found.add("--json")
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            values = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            names = {str(argument.value) for argument in node.args if isinstance(argument, ast.Constant)}
            if values.get("metavar", "").startswith("'FILE"):
                found |= names & WRITTEN
    return found


SCRIPTS = [*(ROOT / "launch").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
WRITING = [path for path in SCRIPTS if written_options(path)]


@pytest.mark.parametrize("path", WRITING, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_script_looks_before_it_works(path: Path) -> None:
    """An hour's measurement would be lost for a mistyped folder."""
    assert re.search(r"check_(output|plot|json)\(", path.read_text()), written_options(path)


def test_scripts_are_found() -> None:
    assert len(WRITING) > 20


def test_json_on_the_terminal_replaces_the_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`--json -` prints nothing but JSON, a file leaves the report, and None writes nothing."""
    path = str(tmp_path / "results.json")
    for target in ("-", path, None):
        check_json(target)
        with report_unless_json(target):
            print("the report")
        write_results(target, {"loss": 1.5})
        printed = capsys.readouterr().out
        assert printed == ('{\n  "loss": 1.5\n}\n' if target == "-" else "the report\n")
    assert Path(path).read_text() == '{\n  "loss": 1.5\n}\n'
    with pytest.raises(ConfigError, match="^config error: --json: cannot write"):
        check_json(str(tmp_path))
