"""The supervisor, over launchers that are played: what it does with each way in which a run can end."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest

from megacore.distributed.processes import ENDED, process_state
from megacore.tools.processes import descendants
from megacore.tools.relaunch.fleet import Fleet
from megacore.tools.relaunch.supervisor import Supervisor, cause_of, environment
from megacore.tools.stop_request import STOP
from tests.pool import CONTEXT, PATIENCE
from tests.unit.test_guardians import DAMAGED

# A run of 20 steps: it logs each, saves every other, goes on from the newest, obeys STOP, and fails as its
# plan says. Its plan holds it at a step of a start until there is a file: nothing takes a certain time.
LAUNCHER = """
import json, os, pathlib, sys, time
folder, plan = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
starts = folder / "starts"
starts.write_text(starts.read_text() + " ".join(sys.argv[3:]) + "\\n" if starts.exists() else " ".join(sys.argv[3:]) + "\\n")
start = len(starts.read_text().splitlines())
saved = folder / "checkpoints"
saved.mkdir(exist_ok=True)
step = max([int(p.name[5:]) for p in saved.iterdir()], default=0)
while step < 20:
    if (folder / "STOP").exists():
        sys.exit(75)
    step += 1
    with (folder / "metrics.jsonl").open("a") as out:
        out.write(json.dumps({"step": step}) + "\\n")
    if step % 2 == 0:
        (saved / f"step_{step:08d}").mkdir(exist_ok=True)
    if step == plan.get("lost", [0])[0] and start == 1:
        failure = {"hosts": plan["lost"][1:], "reason": f"host {plan['lost'][1]} is lost"}
        (folder / "failure.json").write_text(json.dumps(failure))
    if step == plan.get("damage") and start == 1:
        with (folder / "metrics.jsonl").open("ab") as out:
            out.write((folder / "damaged").read_bytes())
        (folder / "failure.json").write_text('{"hosts": 3')
        sys.stdout.buffer.write(b"\\xff\\xfe is said" * 1000 + b"\\n")
    if step in plan.get("fail", []) and not (folder / f"failed_{step}").exists():
        (folder / f"failed_{step}").touch()
        os.kill(os.getpid(), 9)
    if step == plan.get("always"):
        for reason in plan.get("reasons", [])[start - 1 : start]:
            (folder / "failure.json").write_text(json.dumps({"hosts": [], "reason": reason}))
        sys.exit(3)
    if [step, start] == plan.get("once", [0])[:1] + [1]:
        sys.exit(plan["once"][1])
    if step == plan.get("sleep") and start == 1:
        (folder / "new").write_text(str(os.getpid()))
        (folder / "new").replace(folder / "asleep")
        time.sleep(3600)
    for *held, file in plan.get("holds", []):
        while held == [start, step] and not (folder / file).exists():
            time.sleep(0.02)
"""  # noqa: E501


def supervised(folder: Path, plan: dict, *words: str, **options: object) -> Supervisor:
    folder.mkdir(exist_ok=True)
    script = folder / "launcher.py"
    script.write_text(LAUNCHER)
    command = [sys.executable, str(script), str(folder), json.dumps(plan), *words]
    return Supervisor(command, folder, **({"backoff": 0.01} | options))  # type: ignore[arg-type]


def test_a_run_that_gets_further_is_started_again_as_often_as_it_takes(tmp_path: Path) -> None:
    supervisor = supervised(tmp_path, {"fail": [3, 7, 11, 15, 19]}, restarts=1)
    with patch.object(Supervisor, "_sleep") as pause:
        assert supervisor.run() == 0
    assert [call.args for call in pause.call_args_list] == [(0.01,)] * 5, (
        "a run that gets on does not wait longer and longer"
    )
    assert supervisor.attempts == 6 and supervisor.progress() == (20, 20)


def test_a_run_that_gets_no_further_is_given_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    supervisor = supervised(tmp_path, {"always": 5}, restarts=2)
    with patch.object(Supervisor, "_sleep") as pause:
        assert supervisor.run() == 3
    assert [call.args for call in pause.call_args_list] == [(0.01,), (0.01,), (0.02,)], (
        "doubled with each that brings nothing"
    )
    assert supervisor.attempts == 4, (
        "the first start got to step 5; two restarts and one more did not get further"
    )
    assert "given up: 2 restarts in a row brought no progress beyond step 5" in capfd.readouterr().err


STUCK = "rank 1 (host b, dp 1) is in data.py:88 (samples) for {} s (step 5, data); rank 0 waits"


@pytest.mark.parametrize(
    ("reasons", "starts", "end"),
    [
        (
            [STUCK.format(seconds) for seconds in (8, 9, 8.5, 12)],
            4,
            "3 starts in a row ended for the same reason",
        ),
        (
            [STUCK.format(8), "rank 2 is dead", STUCK.format(8), STUCK.format(9)],
            7,
            "5 restarts in a row brought no",
        ),
        ([f"rank {rank} is dead" for rank in range(7)], 7, "5 restarts in a row brought no"),
        ([], 7, "5 restarts in a row brought no"),
    ],
)
def test_the_same_end_three_times_is_given_up(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], reasons: list[str], starts: int, end: str
) -> None:
    """It would end so a fourth time, and every start holds all machines of the run for minutes. A rank that
    fails once on each of several hosts is no such case.
    """
    supervisor = supervised(tmp_path, {"always": 5, "reasons": reasons}, restarts=5, backoff=0.0)
    assert supervisor.run() == 3 and supervisor.attempts == starts
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("supervise: ")]
    assert lines[-1].startswith(f"supervise: given up: {end}")
    reason = f": {reasons[starts - 1]}" if len(reasons) >= starts else ""
    assert lines[-1].endswith(f"beyond step 5 (status 3){reason}")
    first = f": {reasons[0]}" if reasons else ""
    assert lines[0] == f"supervise: the run ended with status 3 at step 5, checkpoint 4{first}; again in 0 s"


HUNG = "{} never entered tp all_reduce #{} of [64, 32] float32 (step {}); {} in data.py:{} for {} s; {}"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ranks 4 and 5 are dead", "ranks 6 and 7 are dead"),
        ("no route to 10.0.0.1", "no route to 10.0.0.2"),
        ("data error: /data/1.bin: is cut off", "data error: /data/2.bin: is cut off"),
        ("GPU 3 has fallen off the bus", "GPU 5 has fallen off the bus"),
        (HUNG.format("rank 1", 7, 5, "it is", 8, 4, ""), HUNG.format("rank 2", 7, 5, "it is", 8, 4, "")),
    ],
)
def test_ends_with_different_causes_are_told_apart(first: str, second: str) -> None:
    """The run would be given up though each start failed on another machine or file."""
    assert cause_of(first) != cause_of(second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (
            HUNG.format("rank 1", 7, 5, "it is", 8, 4, "rank 0 waits there"),
            HUNG.format("rank 1", 1204, 60, "it is", 9, 8.5, "ranks 0 and 2 wait there"),
        ),
        (STUCK.format(8), STUCK.format(12.5)),
        ("the kernel at 0xFFa0 failed", "the kernel at 0x7fb1 failed"),
        ("allocate 2.00 GiB, 31 MiB are free", "allocate 1.50 GiB, 7 MiB are free"),
        ("failed at layers.py:88", "failed at layers.py:90"),
    ],
)
def test_ends_with_the_same_cause_are_recognized(first: str, second: str) -> None:
    """Every restart would hold all machines of the run for minutes, and fail the same way."""
    assert cause_of(first) == cause_of(second)


def test_a_reason_of_an_earlier_start_is_not_quoted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A user would repair what is not broken any more."""
    tmp_path.joinpath("failure.json").write_text('{"hosts": ["b"], "reason": "rank 7 is dead"}')
    assert supervised(tmp_path, {"always": 5, "reasons": ["rank 1 is dead"]}, restarts=0).run() == 3
    printed = capfd.readouterr().err
    assert "rank 7" not in printed and printed.count("rank 1 is dead") == 1


UNMET = """
import sys
from pathlib import Path
from megacore.tools.diagnosis.failure_note import NOT_MET, FailureNote
FailureNote(Path(sys.argv[1]), NOT_MET).add("rank 0 did not open the store")
sys.exit(1)
"""


def test_a_reason_is_quoted_though_rank_0_was_not_started(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 empties the file, so the others could not record that they have waited for it in vain."""
    assert Supervisor([sys.executable, "-c", UNMET, str(tmp_path)], tmp_path, restarts=0).run() == 1
    assert "rank 0 did not open the store" in capfd.readouterr().err


@pytest.fixture
def time_flies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the played run sleeps, hours pass between two looks at the clock."""
    now, asleep, flown = time.monotonic, tmp_path / "asleep", 0.0

    def later() -> float:
        nonlocal flown
        if asleep.exists() and process_state(int(asleep.read_text())) not in ENDED:
            flown += 7200.0
        return now() + flown

    monkeypatch.setattr(time, "monotonic", later)


@pytest.mark.usefixtures("time_flies")
def test_a_run_that_stands_still_is_ended_and_started_again(tmp_path: Path) -> None:
    supervisor = supervised(tmp_path, {"sleep": 4}, stall=3600.0)
    assert supervisor.run() == 0 and supervisor.attempts == 2


@pytest.mark.usefixtures("time_flies")
def test_nothing_that_a_run_writes_ends_the_watch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The run went on without anybody who would see it stand still, start it again, or
    read what it prints.
    """
    heard: list[str] = []
    (tmp_path / "damaged").write_bytes(b"\n".join(DAMAGED))
    supervisor = supervised(tmp_path, {"damage": 3, "sleep": 6}, stall=3600.0, listener=heard.append)
    assert supervisor.run() == 0 and supervisor.attempts == 2 and supervisor.progress() == (20, 20)
    assert any("is said" in line for line in heard)
    said = capfd.readouterr().err
    assert (
        "nothing new in" in said
        and "failure.json does not say why the run has ended: " in said
        and "Traceback" not in said
    )


@pytest.mark.parametrize("status", [0, 2])
def test_what_a_launcher_says_of_a_run_that_went_well_until_then_is_not_its_end(
    tmp_path: Path, status: int
) -> None:
    """0 of a launcher that was killed, 2 of a run whose disk was full; and it goes on from
    what it saved, however it began.
    """
    supervisor = supervised(tmp_path, {"once": [5, status]}, "checkpoint.resume=never", steps=20)
    assert supervisor.run() == 0
    starts = (tmp_path / "starts").read_text().splitlines()
    assert starts == ["checkpoint.resume=never", "checkpoint.resume=never checkpoint.resume=auto"]


def test_a_request_made_while_the_supervisor_asks_stays(tmp_path: Path) -> None:
    supervisor = supervised(tmp_path, {})
    supervisor._ask()
    os.utime(tmp_path / STOP)
    supervisor._withdraw()
    assert (tmp_path / STOP).exists()


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGHUP, signal.SIGHUP]])
def test_a_signal_becomes_a_file_that_is_taken_away_again(tmp_path: Path, numbers: list[int]) -> None:
    """A launcher that got it would give its ranks no time.

    Of a closed terminal both the kernel and the shell tell.
    """
    supervisor = supervised(tmp_path, {"holds": [[1, 7, "released"]]})
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever these tests were started from
    note, noted = supervisor._note, list[int]()

    def count(number: int, frame: FrameType | None) -> None:
        note(number, frame)
        noted.append(number)

    def ask() -> None:
        try:
            wait_for(lambda: supervisor.progress()[1] == 7)
            for which, number in enumerate(numbers, 1):
                os.kill(os.getpid(), number)
                wait_for(lambda which=which: len(noted) == which)  # type: ignore[misc]
        finally:
            (tmp_path / "released").touch()

    supervisor._note = count  # type: ignore[method-assign]
    thread = threading.Thread(target=ask)
    thread.start()
    assert supervisor.run() == 75
    thread.join()
    signal.signal(signal.SIGHUP, before)
    assert supervisor.attempts == 1 and not (tmp_path / STOP).exists() and supervisor.progress()[1] == 7
    assert supervised(tmp_path, {}).run() == 0


def test_somebody_elses_stop_stays(tmp_path: Path) -> None:
    (tmp_path / STOP).touch()
    assert supervised(tmp_path, {}).run() == 75
    assert (tmp_path / STOP).exists()


def test_other_machines_take_over_while_it_runs(tmp_path: Path) -> None:
    """4 ranks, then 2, then 4 again: each time asked to stop at a step, saved, and laid out anew."""
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {"train": {"global_batch_size": 8}, "model": {"num_layers": 4, "hidden_size": 64, "num_heads": 4}}
        )
    )
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=4\n")
    fleet = Fleet(hostfile, str(config), ["parallel.tensor=2", "parallel.pipeline=2"])
    plan = {"holds": [[1, 5, STOP], [2, 9, STOP]]}
    supervisor = supervised(tmp_path / "run", plan, "--hostfile", str(hostfile), fleet=fleet)

    def resize() -> None:
        for slots, step in ((2, 5), (4, 9)):
            wait_for(lambda step=step: supervisor.progress()[1] == step)  # type: ignore[misc]
            (tmp_path / "new").write_text(f"localhost slots={slots}\n")
            (tmp_path / "new").replace(hostfile)

    thread = threading.Thread(target=resize)
    thread.start()
    assert supervisor.run() == 0
    thread.join()
    starts = [line.split() for line in (tmp_path / "run/starts").read_text().splitlines()]
    shapes = [
        [word.partition("=")[2] for word in line if word.startswith(("parallel.tensor", "parallel.pipeline"))]
        for line in starts
    ]
    assert shapes == [["2", "2"], ["2", "1"], ["2", "2"]]
    assert (tmp_path / "run/hostfile").read_text() == "localhost slots=4\n" and not (
        tmp_path / "run" / STOP
    ).exists()


def test_a_spare_takes_the_place_of_a_lost_host(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A host that was lost may answer again, and be lost again: one that has not failed comes first."""
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {"train": {"global_batch_size": 8}, "model": {"num_layers": 4, "hidden_size": 64, "num_heads": 4}}
        )
    )
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=2\nb slots=2\nc slots=2\n")
    fleet = Fleet(hostfile, str(config), [], "true {host}", spares=1)
    run = tmp_path / "run"
    supervisor = supervised(run, {"fail": [3], "lost": [3, "b"]}, "--hostfile", str(hostfile), fleet=fleet)
    used = []
    command = fleet.command

    def noted(*args: Any) -> list[str]:
        words = command(*args)
        used.append((run / "hostfile").read_text().split()[::2])
        return words

    fleet.command = noted  # type: ignore[method-assign]
    assert supervisor.run() == 0
    assert used == [["a", "b"], ["a", "c"]]
    said = capfd.readouterr()
    assert (
        "supervise: the run ended with status -9 at step 3, checkpoint 2: host b is lost; again in 0 s\n"
        in said.err
        and "; spare: c\n" in said.out
        and "; spare: b\n" in said.out
    )


def test_ssh_is_told_to_notice_a_host_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """pdsh would wait for ever for it.

    What the user says comes first: of two settings ssh takes the first.
    """
    monkeypatch.delenv("PDSH_SSH_ARGS_APPEND", raising=False)
    assert environment(unbuffered=False)["PDSH_SSH_ARGS_APPEND"].startswith("-o ConnectTimeout")
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-p 2222")
    assert environment(unbuffered=True)["PDSH_SSH_ARGS_APPEND"].startswith("-p 2222 -o ConnectTimeout")


def test_a_supervisor_that_is_killed_lets_its_run_stop(tmp_path: Path) -> None:
    """Nobody would start it again, nor leave out a machine that is gone; a new
    supervisor would find the folder taken.
    """
    supervisor = CONTEXT.Process(target=run_supervised, args=(tmp_path, {"holds": [[1, 1, STOP]]}))
    supervisor.start()
    metrics, stop = tmp_path / "metrics.jsonl", tmp_path / STOP
    wait_for(metrics.exists)
    launcher = next(
        pid
        for pid in descendants(supervisor.pid or 0)
        if b"launcher.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    supervisor.kill()
    supervisor.join()
    wait_for(lambda: process_state(launcher) in ENDED and not stop.exists())
    assert len(metrics.read_text().splitlines()) == 1


def run_supervised(folder: Path, plan: dict) -> None:
    supervised(folder, plan).run()


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)
