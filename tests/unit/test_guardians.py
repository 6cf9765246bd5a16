"""Whoever watches over a run goes on, whatever stands in its folder, whoever else runs on the
machine, and whoever reads stderr.
"""

import errno
import io
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from launch.pretrain import train
from launch.ray_train import figures
from megacore.distributed.init import joined
from megacore.distributed.processes import stat_fields
from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError, UserError
from megacore.tools.diagnosis import heartbeat, watchdog
from megacore.tools.diagnosis.beats import RankStates
from megacore.tools.diagnosis.failure import fail
from megacore.tools.diagnosis.failure_note import FAILURE, FailureNote
from megacore.tools.diagnosis.guardians import Guardians
from megacore.tools.diagnosis.heartbeat_client import HeartbeatClient
from megacore.tools.metrics_file import LINE_BYTES, recorded
from megacore.tools.processes import descendants
from megacore.tools.records import open_metrics
from megacore.tools.relaunch import supervisor
from megacore.tools.relaunch.supervisor import Supervisor
from megacore.tools.stop_request import StopRequest
from tests import training
from tests.build import run_of
from tests.drills import drills
from tests.pool import PATIENCE

# What may stand in metrics.jsonl: lines cut off, joined, overwritten, of another program, of somebody who
# means harm.
DAMAGED = [
    b'{"broken": }',
    b'{"step": "7", "loss": 1.0}',
    b'{"step": null}',
    b'{"step": true}',
    b'{"step": 1.5}',
    b'{"step": [1]}',
    b'{"step": {}}',
    b'{"step": -1}',
    b'{"step": 1e999}',
    b'{"step": ' + b"9" * 5000 + b"}",
    b'{"loss": 1.0}',
    b"[1]",
    b"7",
    b'"step"',
    b"null",
    b"{}",
    b"",
    b'{"step": 3',
    b'{"step": 3}{"step": 4}',
    b"\xff\xfe\x00{}",
    b'{"step": 3, "a": "\xff"}',
    b"\0" * 100,
    b"[" * 5000,
    b'{"a":' * 5000,
    b'{"step": 3, "a": "\r"}',
    b"x" * 70000,
]
ENDLESS = b'{"step": 77}' + b" " * LINE_BYTES + b'{"step": 78}'


def test_records_are_read_among_whatever_else_stands_there(tmp_path: Path) -> None:
    """And only what is a record, whole: a step that nobody has done would end the
    supervisor's work, or a resume's.
    """
    file = tmp_path / "metrics.jsonl"
    good = [json.dumps({"step": step, "loss": step / 2}).encode() for step in (1, 2, 3)]
    for last in ([], [b'{"step": 4']):
        file.write_bytes(b"\n".join([good[0], *DAMAGED, good[1], ENDLESS, good[2] + b"\r", *last]))
        with file.open("rb") as lines:
            assert list(recorded(lines)) == list(zip((1, 2, 3), good, strict=True))
        with file.open("rb") as lines:
            assert list(recorded(lines, len(good[2]) + 20)) == [(3, good[2])], (
                "the first line there is a part of one"
            )
        assert Supervisor([], tmp_path).progress() == (0, 3)
        assert drills.last_loss(tmp_path) == 1.5
        assert figures(tmp_path, tmp_path / "step_00000003") == {"step": 3, "loss": 1.5}
        assert figures(tmp_path, tmp_path / "step_00000077") == {"step": 77}
        with open_metrics(file, 3) as records:
            records.write("then")
        assert file.read_bytes() == good[0] + b"\n" + good[1] + b"\nthen"


def test_the_last_record_is_found_however_long_it_is(tmp_path: Path) -> None:
    """A healthy run of 15,000 experts would be taken for one that does not move, and be ended;
    Ray would get all their loads.
    """
    file = tmp_path / "metrics.jsonl"
    long = {"expert_load/blocks.1": [1.2345] * 15_000}
    lines = [{"step": step, "loss": 1.5} | long for step in range(1, 6)]
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"step": 5, "valid_loss": 1}]))
    assert Supervisor([], tmp_path).progress() == (0, 5)
    assert figures(tmp_path, tmp_path / "step_00000005") == {"step": 5, "loss": 1.5}
    file.write_bytes(file.read_bytes().rpartition(b'{"step": 5, "v')[0])
    assert len(file.read_bytes()) > 5 * 100_000 and Supervisor([], tmp_path).progress() == (0, 5)


def test_records_that_cannot_be_read_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder, a pipe that nobody fills, a file system that does not answer: behind a launch a
    failure would leave the run alone.
    """
    (tmp_path / "metrics.jsonl").mkdir()
    assert Supervisor([], tmp_path).progress() == (0, 0)
    (tmp_path / "metrics.jsonl").rmdir()
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert Supervisor([], tmp_path).progress() == (0, 0)

    def stale(path: Path, pattern: str) -> NoReturn:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "glob", stale)
    assert Supervisor([], tmp_path).progress() == (0, 0)


def test_a_look_that_fails_is_said_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Anything may fail once, on a machine that is busy with a failure."""
    looks, enough = list[int](), tmp_path / "enough"

    def look(self: Supervisor, launcher: int, note: Path) -> None:
        looks.append(launcher)
        if len(looks) == 3:
            enough.touch()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Supervisor, "_look", look)
    run = f"import pathlib, time\nwhile not pathlib.Path({str(enough)!r}).exists(): time.sleep(0.02)"
    assert Supervisor([sys.executable, "-c", run], tmp_path).run() == 0 and len(looks) > 2
    assert capfd.readouterr().err.count("could not look after the run, and tries on: OSError") == 1


def test_a_folder_that_cannot_be_written_does_not_end_the_supervisor(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is asked to stop in a signal's handler, where an exception would leave the run alone."""
    (tmp_path / "file").touch()
    watched = Supervisor([], tmp_path / "file" / "run")
    watched._note(15, None)
    assert (
        watched.asked()
        and "STOP cannot be written, so the run does not hear of it: Not a directory"
        in capfd.readouterr().err
    )


def test_what_a_run_prints_is_read_though_nobody_hears_it(tmp_path: Path) -> None:
    """A run waits for ever once its pipe is full."""

    def deaf(line: str) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    code = "for _ in range(20000): print('a line of a run')"
    command = [sys.executable, "-c", code]
    assert Supervisor(command, tmp_path, listener=deaf, stall=PATIENCE, restarts=0).run() == 0


def test_a_file_system_that_does_not_answer_is_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank looks for the file STOP between steps."""

    def fail(path: Path) -> NoReturn:
        raise OSError(errno.ESTALE, "Stale file handle")

    request = StopRequest(tmp_path)
    monkeypatch.setattr(Path, "exists", fail)
    assert not request.requested


NAMELESS = (
    # PR_SET_NAME
    "import ctypes, time; ctypes.CDLL(None).prctl(15, b'\\xff) Z 1 \\xfe', 0, 0, 0); print(flush=True); "
    "time.sleep(60)"
)


def test_other_processes_may_have_any_name() -> None:
    """Whoever ends a launcher's ranks reads the names of all processes on the
    machine, and strangers choose theirs.
    """
    with subprocess.Popen([sys.executable, "-c", NAMELESS], stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None and stranger.stdout.readline()
        assert stat_fields(stranger.pid)[1] == str(os.getpid()) and stranger.pid in descendants(os.getpid())
        stranger.kill()


class Lost(io.StringIO):
    """A stderr whose reader has ended."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.mark.parametrize("say", [watchdog.say, heartbeat.say, supervisor.say])
def test_a_guardian_that_nobody_reads_goes_on(say: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that has ended took their stderr with it; their ranks may still hang."""
    monkeypatch.setattr(sys, "stderr", Lost())
    say("a line")


def test_a_run_on_one_host_records_why_it_failed(tmp_path: Path) -> None:
    """It has no heartbeats, and a supervisor would say only that the run has ended. A start that does not
    fail leaves no reason.
    """
    config = run_of(training.write_config(tmp_path, "nothing"))
    place, cpu = RankInfo(guest=True), torch.device("cpu")
    with joined(config, place, cpu, Guardians(config, place, cpu, tmp_path)):
        pass
    assert json.loads((tmp_path / FAILURE).read_text())["reason"] == ""
    with pytest.raises(ValueError), joined(config, place, cpu, Guardians(config, place, cpu, tmp_path)):
        raise ValueError("no such thing\nat all")
    reason = json.loads((tmp_path / FAILURE).read_text())["reason"]
    assert reason.startswith("rank 0 (host ") and reason.endswith("failed: ValueError: no such thing")


def test_a_start_that_never_trains_leaves_no_reason_of_an_earlier_run(tmp_path: Path) -> None:
    """A user who mistypes a path would look for a rank that was killed last week."""
    (tmp_path / FAILURE).write_text('{"start": "earlier", "reason": "rank 7 is dead", "hosts": []}')
    config = run_of(training.write_config(tmp_path, "/nonexistent"), f"log.dir={tmp_path}")
    with pytest.raises(UserError, match="/nonexistent"):
        train(config, RankInfo(), StopRequest())
    assert json.loads((tmp_path / FAILURE).read_text())["reason"] == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_meeting_that_fails_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """A supervisor would restart the run again and again, and never print why it cannot start."""

    def meet(*_: object) -> NoReturn:
        raise TimeoutError("rank 0 did not open the store")

    monkeypatch.setattr("megacore.distributed.init.meet", meet)
    config, cpu = run_of(training.write_config(tmp_path, "nothing")), torch.device("cpu")
    places = [RankInfo(number, 2, number, 2, guest=True) for number in range(2)]
    guards = [Guardians(config, place, cpu, tmp_path) for place in places]
    with pytest.raises(TimeoutError), joined(config, places[rank], cpu, guards[rank]):
        pass
    reason = json.loads((tmp_path / FAILURE).read_text())["reason"]
    assert reason.startswith(f"rank {rank} (host ") and reason.endswith("rank 0 did not open the store")


def test_all_ranks_record_under_one_identifier(tmp_path: Path) -> None:
    """A rank with another one would count as a process of an earlier start, and its reason would be lost."""
    overrides = ["parallel.hang_seconds=null"]
    config = run_of(training.write_config(tmp_path, "nothing"), *overrides, world=2)
    store, cpu = dist.HashStore(), torch.device("cpu")
    guards = [Guardians(config, RankInfo(rank, 2, rank, 2), cpu, tmp_path) for rank in range(2)]
    for guard in reversed(guards):
        guard.met(store)
    guards[1]._report("rank 1 failed")
    note = json.loads((tmp_path / FAILURE).read_text())
    assert note["start"] and note["reason"] == "rank 1 failed"


def test_a_rank_reports_to_its_hosts_process_or_to_the_folder(tmp_path: Path) -> None:
    """The host's process passes the reason on to other hosts. If that has ended, it must not be lost."""
    note = FailureNote(tmp_path, "now")
    note.begin()
    client = HeartbeatClient(dist.HashStore(), RankInfo(), None, note)
    client.connection, process = socket.socketpair()
    client.report("a reason\n" + "🔥" * 9000, range(1000))
    line = process.recv(1 << 16)
    assert line.endswith(b"\n") and len(line) < heartbeat.LINE_BYTES
    message = json.loads(line)
    assert message["reason"].startswith("a reason\\n🔥") and message["ranks"][:3] == [0, 1, 2]
    assert json.loads((tmp_path / FAILURE).read_text())["reason"] == ""

    process.close()
    client.report("another reason", [0])
    assert json.loads((tmp_path / FAILURE).read_text())["reason"] == "another reason"
    client.connection.close()


def test_heartbeats_that_end_while_the_watchdog_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog asks in its own thread: an exception there would take the place of its verdict."""
    answers: list[RankStates | None] = []
    states = property(lambda _: answers.pop(0), lambda _, value: None)
    monkeypatch.setattr(HeartbeatClient, "states", states, raising=False)
    client = HeartbeatClient(dist.HashStore(), RankInfo(), None)
    answers[:] = [RankStates(gone=[3]), None]
    assert client.state(3) == "gone"


@pytest.mark.parametrize(
    ("error", "name", "status"),
    [(KeyboardInterrupt(15), "SIGTERM", 143), (KeyboardInterrupt(), "SIGINT", 130)],
)
def test_a_rank_that_a_signal_ends_reports_the_signal(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: KeyboardInterrupt,
    name: str,
    status: int,
) -> None:
    """It would count as killed, perhaps for want of memory, where a scheduler has ended it. It stays quiet,
    because all ranks of a job get the signal.
    """
    reasons = list[str]()
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        fail(error, RankInfo(3, 4, 3, 4), None, report=reasons.append)
    assert ended.value.code == status
    assert reasons == [f"rank 3 (host {socket.gethostname()}) was ended by {name}"]
    assert capfd.readouterr() == ("", "")


def test_the_watchdog_continues_though_its_output_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread ended without a word, and a hang after that had no end."""
    ours: Any = object.__new__(watchdog.Watchdog)
    ours.device, ours.rank, ours.tick, ours.round, ours.alarmed, ours.first = (
        torch.device("cpu"),
        0,
        0.0,
        0,
        False,
        None,
    )
    ours.closed, ours.asked, looks = threading.Event(), threading.Event(), []

    def is_there(key: str) -> bool:
        looks.append(key)
        if len(looks) == 5:
            ours.closed.set()
        raise ValueError("half a message")

    ours.notices = SimpleNamespace(is_there=is_there)
    monkeypatch.setattr(sys, "stderr", Lost())
    ours._watch()
    assert len(looks) == 5


def test_a_supervisor_passes_a_mistake_on_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`supervise: config error: …` is not the line that scripts look for."""
    supervising = Supervisor(["nothing"], tmp_path)

    def attempt() -> int:
        supervising.attempts += 1
        if supervising.attempts == 1:
            supervising.attempts += 1
            raise ConfigError("--hostfile", "nobody answers", "machines that do")
        return 0

    monkeypatch.setattr(supervising, "_attempt", attempt)
    supervising.run()
    assert (
        "config error: --hostfile: nobody answers (machines that do)" in capsys.readouterr().err.splitlines()
    )
