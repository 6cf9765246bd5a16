"""The file that says why a run ended: the supervisor quotes it, and leaves out the hosts in it."""

import json
import threading
import time
from pathlib import Path

import pytest

from megacore.tools.diagnosis import failure_note
from megacore.tools.diagnosis.failure_note import FAILURE, FailureNote
from tests.pool import PATIENCE


def recorded(folder: Path) -> tuple[str, list[str]]:
    note = json.loads((folder / FAILURE).read_text())
    return note["reason"], note["hosts"]


def test_the_first_reason_stays_and_hosts_are_added(tmp_path: Path) -> None:
    """What fails later is a consequence: it would send the user to a healthy machine."""
    note = FailureNote(tmp_path, "now")
    note.begin()
    assert recorded(tmp_path) == ("", [])
    note.add("rank 1 is stopped")
    note.add("rank 0 failed: RuntimeError", ["b"])
    note.add("rank 2 failed: RuntimeError", ["b", "c"])
    assert recorded(tmp_path) == ("rank 1 is stopped", ["b", "c"])


def test_the_decision_of_rank_0s_host_is_the_last_word(tmp_path: Path) -> None:
    """A host that is cut off blames rank 0's host, which is healthy: the next start would do without both."""
    note = FailureNote(tmp_path, "now")
    note.begin()
    note.add("host b hears nothing from host a", ["a"])
    note.add("nothing was heard from host b", ["b"], is_decision=True)
    note.add("host b hears nothing from host a", ["a"])
    assert recorded(tmp_path) == ("nothing was heard from host b", ["b"])


def test_an_earlier_start_writes_nothing_into_a_later_one(tmp_path: Path) -> None:
    """A host that was cut off ends late, when the run has started again without it."""
    earlier, later = FailureNote(tmp_path, "earlier"), FailureNote(tmp_path, "later")
    earlier.begin()
    later.begin()
    earlier.add("rank 1 is stopped", ["b"])
    assert recorded(tmp_path) == ("", [])
    (tmp_path / FAILURE).unlink()  # by a supervisor, before the next start
    later.add("rank 1 is stopped", ["b"])
    assert not (tmp_path / FAILURE).exists()


def test_a_file_system_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what ended the run, perhaps: the rank must end, and the host's heartbeats must continue."""
    note, answers = FailureNote(tmp_path, "now"), threading.Event()
    note.begin()
    monkeypatch.setattr(failure_note, "WRITE_SECONDS", 0.05)
    monkeypatch.setattr(failure_note, "write_whole", lambda path, text: answers.wait(PATIENCE))
    began = time.monotonic()
    note.add("rank 1 is stopped")
    answers.set()
    assert time.monotonic() - began < PATIENCE / 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "7",
        "{",
        '{"start": "now"}',
        '{"start": "now", "reason": 1, "hosts": 2, "is_decision": false}',
    ],
)
def test_a_damaged_note_ends_nobody(tmp_path: Path, text: str) -> None:
    """Ranks and heartbeats write it while they end, and must end."""
    (tmp_path / FAILURE).write_text(text)
    FailureNote(tmp_path, "now").add("rank 1 is stopped", ["b"])
    assert (tmp_path / FAILURE).read_text() == text
    FailureNote(tmp_path / "none", "now").begin()
