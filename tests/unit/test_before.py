"""`tests.before`: equal checkouts have equal pictures, and other behaviour shows in them."""

import json
from pathlib import Path

import pytest

from megacore.errors import ConfigError
from tests import before

HELP = """\
print("usage: launch/NAME.py", "{option}")
print("a file in", __file__)
"""
METRICS = {"step": 1, "loss": 5.543944358825684, "step_seconds": 0.25, "memory_bytes": 100}


def fake_checkout(folder: Path, option: str = "--config") -> Path:
    """Write two scripts that print a help text and their own path."""
    (folder / "launch").mkdir(parents=True)
    (folder / "megacore").mkdir()
    (folder / "benchmarks").mkdir()
    (folder / "megacore" / "__main__.py").write_text("print('usage: megacore COMMAND')\n")
    (folder / "launch" / "plan.py").write_text(HELP.format(option="--world"))
    (folder / "launch" / "pretrain.py").write_text(HELP.format(option=option))
    return folder


def picture_of(folder: Path) -> dict[str, str]:
    """Return the files of a picture by name."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_checkouts_in_other_folders_have_equal_pictures(tmp_path: Path) -> None:
    """Otherwise every picture would differ from every other, and no real difference would be noticed."""
    pictures = []
    for name in ("a", "a_longer_name"):
        checkout = fake_checkout(tmp_path / name)
        assert before.main([str(tmp_path / f"{name}_out"), str(checkout), "--only", "help"]) == 0
        pictures.append(picture_of(tmp_path / f"{name}_out"))
    assert pictures[0] == pictures[1]
    assert set(pictures[0]) == {"help/megacore.txt", "help/launch_plan.txt", "help/launch_pretrain.txt"}
    assert "CHECKOUT/launch/plan.py" in pictures[0]["help/launch_plan.txt"]


def test_another_help_text_shows(tmp_path: Path) -> None:
    """Otherwise a refactoring could rename an option of a script, and its picture would stay the same."""
    old = fake_checkout(tmp_path / "old")
    new = fake_checkout(tmp_path / "new", option="--setup")
    before.main([str(tmp_path / "old_out"), str(old), "--only", "help"])
    before.main([str(tmp_path / "new_out"), str(new), "--only", "help"])
    old_files, new_files = picture_of(tmp_path / "old_out"), picture_of(tmp_path / "new_out")
    assert [name for name in old_files if old_files[name] != new_files[name]] == ["help/launch_pretrain.txt"]


def test_a_failed_command_is_recorded_and_the_rest_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise a script that a refactoring has broken would have an empty picture, or stop the others."""
    checkout = fake_checkout(tmp_path / "checkout")
    (checkout / "launch" / "plan.py").write_text("import os\nraise OSError(os.getcwd() + ' took 3.2 s')\n")
    assert before.main([str(tmp_path / "out"), str(checkout), "--only", "help"]) == 1
    files = picture_of(tmp_path / "out")
    assert files["help/launch_plan.txt"] == "exit status 1\nOSError: CHECKOUT took TIME s\n"
    assert "usage" in files["help/launch_pretrain.txt"]
    assert "1 failed" in capsys.readouterr().out


def test_times_and_their_table_column_are_replaced() -> None:
    """Otherwise two simulations of the same code would differ; traffic itself must stay."""
    table = [
        " rank  calls  seconds ",
        " ──────────────────── ",
        "    0  1,207     22.2 ",
        "    7    848      0.8 ",
        "",
    ]
    text = "\n".join([*table, "8 ranks post 848 calls: matched. 14 s.", "2026-11-28 03:17:04,120 done"])
    assert before.without_times(text).splitlines() == [
        " rank  calls",
        " ─────────────",
        "    0  1,207",
        "    7    848",
        "",
        "8 ranks post 848 calls: matched. TIME s.",
        "DATE TIME done",
    ]


def test_losses_stay_and_times_are_replaced_in_metrics() -> None:
    """Otherwise a loss whose last digit changed would be taken for the same, or times for differences."""
    line = json.dumps(METRICS)
    slower = json.dumps(METRICS | {"step_seconds": 0.5, "memory_bytes": 200, "stragglers": [1]})
    other_loss = json.dumps(METRICS | {"loss": 5.543944358825685})
    assert before.stable_metrics(line) == before.stable_metrics(slower)
    assert before.stable_metrics(line) != before.stable_metrics(other_loss)
    assert json.loads(before.stable_metrics(line))["step_seconds"] == "VARIES"  # a lost metric shows


def test_every_byte_of_a_tensor_counts(tmp_path: Path) -> None:
    """Otherwise a refactoring could change weights or optimizer state that the losses do not show yet."""
    header = {
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
    }
    encoded = json.dumps(header).encode()
    lines = []
    for content in (bytes(12), bytes(11) + b"\x01"):
        file = tmp_path / "rank_00000.safetensors"
        file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content)
        lines.append(list(before.tensor_digests(file)))
    assert lines[0][0] == lines[1][0]
    assert lines[0][1] != lines[1][1]
    assert lines[0][1].startswith("rank_00000.safetensors b F32 [2] ")


def test_folders_that_cannot_hold_a_picture_are_rejected(tmp_path: Path) -> None:
    """Otherwise files of an earlier picture would be mixed with new ones, or a picture be committed."""
    checkout = str(fake_checkout(tmp_path / "checkout"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("kept")
    with pytest.raises(ConfigError, match="OUT: .* is not empty"):
        before.main([str(tmp_path / "full"), checkout])
    with pytest.raises(ConfigError, match="OUT: .* is in a git repository"):
        before.main([str(before.ROOT / "tests" / "picture"), checkout])
    before.check_folder(before.ROOT / "runs" / "picture")  # ignored by git
    assert picture_of(tmp_path / "full") == {"notes.txt": "kept"}


def test_wrong_arguments_are_rejected(tmp_path: Path) -> None:
    """Otherwise a picture without the part that was asked for would look complete."""
    for arguments, message in (
        (["--only", "help,losses"], "--only: losses is unknown"),
        (["--before", str(before.ROOT)], "--before: needs --times"),
        ([str(tmp_path)], "CHECKOUT: .* has no launch/pretrain.py"),
    ):
        with pytest.raises(ConfigError, match=message):
            before.parse([str(tmp_path / "out"), *arguments])
    assert not (tmp_path / "out").exists()
