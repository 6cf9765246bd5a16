"""SIGTERM and Ctrl-C end a command within seconds in every phase, also where it waits in C++.

Nothing is half-written, and the exit status is the documented one. `python -m tests.signals` prints the
whole table; here are those of its rows that differ in what waits for what.
"""

import signal
import subprocess
from pathlib import Path

import pytest

from megacore.checkpoint.folder import locate
from megacore.checkpoint.read import Reader
from tests.signals import PHASES, End, end_in, write_inputs

SECONDS = 30.0  # of a busy machine; on an idle one it is 3


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def check_end(end: End, phase: str, number: signal.Signals, folder: Path) -> None:
    """Check what a command leaves: its status, its processes and its checkpoints."""
    assert end.seconds < SECONDS and end.left == []
    expected = 75 if PHASES[phase].saves else 128 + number
    assert set(end.rank_statuses.values()) == {expected}, end.output
    checkpoints = [path.name for path in (folder / "run" / "checkpoints").glob("*")]
    if PHASES[phase].saves:
        Reader(locate(folder / "run")).verify()
        assert all(name.startswith("step_") for name in checkpoints)
    else:
        assert checkpoints == []


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        ("importing", signal.SIGINT),
        ("meeting", signal.SIGTERM),  # in Python, for rank 0 to open the store
        ("connecting", signal.SIGINT),  # in gloo's C++, for a rank that does not come
        ("compiling", signal.SIGTERM),
        ("first step", signal.SIGINT),
        ("saving", signal.SIGTERM),
        ("evaluating", signal.SIGTERM),
        ("hanging", signal.SIGINT),  # the second Ctrl-C ends it
    ],
)
def test_a_command_alone(inputs: Path, tmp_path: Path, phase: str, number: signal.Signals) -> None:
    """A scheduler kills what does not end in time, and a user closes the terminal."""
    end = end_in(phase, number, "alone", inputs, tmp_path / "folder")
    assert "Traceback" not in end.output
    assert end.status == (75 if PHASES[phase].saves else 128 + number)
    check_end(end, phase, number, tmp_path / "folder")


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        ("meeting", signal.SIGTERM),  # a rank in the store's C++
        ("connecting", signal.SIGINT),
        ("step", signal.SIGINT),  # torchrun passes it on: not a second Ctrl-C
    ],
)
def test_two_ranks_under_torchrun(inputs: Path, tmp_path: Path, phase: str, number: signal.Signals) -> None:
    """torchrun kills ranks 30 s after a signal, whatever they are writing then."""
    end = end_in(phase, number, "torchrun", inputs, tmp_path / "folder")
    check_end(end, phase, number, tmp_path / "folder")
    assert len(end.rank_statuses) == 2


def test_a_second_ctrl_c_ends_a_collective_that_hangs(inputs: Path, tmp_path: Path) -> None:
    """torchrun passes the second one on as SIGTERM, and would kill the ranks 30 s later."""
    end = end_in("hanging", signal.SIGINT, "torchrun", inputs, tmp_path / "folder")
    check_end(end, "hanging", signal.SIGTERM, tmp_path / "folder")
    assert end.output.count("once more ends it at once") == 1


def test_without_the_thread_a_rank_that_waits_in_cpp_goes_on(inputs: Path, tmp_path: Path) -> None:
    """The planted fault: nothing hears the signal while the main thread is in gloo."""
    with pytest.raises(subprocess.TimeoutExpired):
        end_in("connecting", signal.SIGTERM, "alone", inputs, tmp_path / "folder", 6.0, PLANTED="1")
