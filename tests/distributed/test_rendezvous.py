"""Ranks meet where no other program and no other job listens; else the job ends with one line."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megacore.distributed import rendezvous
from megacore.distributed.rank_info import RankInfo
from megacore.distributed.rendezvous import meet
from megacore.errors import ConfigError
from megacore.tools.diagnosis.failure_note import FAILURE
from megacore.tools.local_ranks import free_port, rank_environment
from tests import training
from tests.distributed.test_launch import ENVIRONMENT
from tests.pool import PATIENCE, ROOT

MINUTE = timedelta(seconds=60)
# Training as the launchers start it, but with less patience for a port in use.
SCRIPT = f"""
import sys
from datetime import timedelta
sys.path.insert(0, {str(ROOT)!r})
from launch import pretrain
from megacore.distributed import rendezvous
rendezvous.IN_USE_SECONDS, rendezvous.ANSWER = 1.0, timedelta(seconds=3)
pretrain.exit_rank_with(pretrain.run)
"""


# The last rank is killed at step 2 of the first start, and the notes of all starts are kept.
KILLED_ONCE = """
import os
import signal
from pathlib import Path
from megacore.tools.diagnosis.failure_note import FAILURE, FailureNote
from tests.signals import in_step

begin = FailureNote.begin

def keep_note(note):
    begin(note)
    if not note.start:  # the ranks have not met
        return
    kept = Path(__file__).with_name(f"note_{os.environ['TORCHELASTIC_RESTART_COUNT']}.json")
    kept.write_text((note.folder / FAILURE).read_text())

FailureNote.begin = keep_note
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    in_step(2, lambda: os.kill(os.getpid(), signal.SIGKILL))
"""


def line_of(port: int) -> str:
    return (
        f"config error: MASTER_PORT: port {port} of 127.0.0.1 is in use (another job? a free port: "
        "MASTER_PORT=N, deepspeed --master_port N, torchrun --master-port N)"
    )


def rank(number: int, port: int, world: int = 2) -> RankInfo:
    return RankInfo(number, world, number, world, master_port=port)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "IN_USE_SECONDS", 0.5)
    monkeypatch.setattr(rendezvous, "ANSWER", timedelta(seconds=1))
    monkeypatch.setattr("os.environ", os.environ.copy())


@pytest.fixture
def other_program(port: int) -> Iterator[None]:
    """Listens on the port and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        yield


@pytest.fixture
def other_job(port: int) -> Iterator[dist.Store]:
    """The store of a job of two ranks that have met on the port."""
    with subprocess.Popen(
        [sys.executable, "-c", OTHER_JOB, str(port)],
        env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "met\n"
        yield dist.TCPStore("127.0.0.1", port, 2, False, MINUTE, wait_for_workers=False)
        process.stdin.close()


OTHER_JOB = """
import sys
from datetime import timedelta
from megacore.distributed.rank_info import RankInfo
from megacore.distributed.rendezvous import meet
places = [RankInfo(rank, 2, rank, 2, master_port=int(sys.argv[1])) for rank in range(2)]
stores = [meet(place, timedelta(seconds=60)) for place in places]
print("met", flush=True)
sys.stdin.read()
"""


def ended(
    command: list[str], tmp_path: Path, environments: list[dict[str, str]], preparation: str = ""
) -> tuple[list[int], str]:
    """The statuses of processes of a job, and what they printed on stderr."""
    config = training.write_config(tmp_path, training.write_corpus(tmp_path))
    script = tmp_path / "pretrain.py"
    script.write_text(preparation + SCRIPT)
    arguments = [*command, str(script), "--config", config, f"log.dir={tmp_path}/run"]
    processes = [
        subprocess.Popen(
            arguments,
            env=ENVIRONMENT | {"TMPDIR": str(tmp_path)} | environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for environment in environments
    ]
    try:
        printed = "".join(process.communicate(timeout=PATIENCE)[1] for process in processes)
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], printed


@pytest.mark.usefixtures("other_program")
def test_ranks_without_a_launcher_say_once_that_the_port_is_in_use(port: int, tmp_path: Path) -> None:
    """Rank 0 printed a traceback, and rank 1 waited for ever for an answer of the program that listens."""
    environments = [rank_environment(number, 2, port) for number in range(2)]
    statuses, printed = ended([sys.executable], tmp_path, environments)
    assert (statuses, printed) == ([2, 2], f"{line_of(port)}\n")


def test_ranks_without_a_launcher_do_not_join_another_job(
    port: int, tmp_path: Path, other_job: dist.Store
) -> None:
    """Rank 1 took the other job's store for its own, and wrote there: its watchdog's alarm could end the
    other job.
    """
    keys = other_job.num_keys()
    environments = [rank_environment(number, 2, port) for number in range(2)]
    statuses, printed = ended([sys.executable], tmp_path, environments)
    assert (statuses, printed) == ([2, 2], f"{line_of(port)}\n")
    assert other_job.num_keys() == keys, "nothing is written for the other job to read"


@pytest.mark.usefixtures("other_program")
def test_the_deepspeed_launcher_ends_with_the_line(port: int, tmp_path: Path) -> None:
    """With status 2, by which a supervisor sees that starting again is of no use."""
    command = ["deepspeed", "--hostfile=", "--num_gpus", "2", "--master_port", str(port)]
    statuses, printed = ended(command, tmp_path, [{}])
    assert statuses == [2] and printed.count("config error") == 1 and line_of(port) in printed.splitlines()
    assert "Traceback" not in printed


def test_ranks_that_torchrun_restarts_meet_anew(port: int, tmp_path: Path) -> None:
    """All restarts failed: they found the addresses and the alarm of the first start in torchrun's store."""
    command = ["torchrun", "--nproc-per-node", "2", "--max-restarts", "1", "--master-port", str(port)]
    environment = {"PYTHONPATH": str(ROOT)}
    statuses, printed = ended(command, tmp_path, [environment], KILLED_ONCE)
    assert statuses == [0], printed
    notes = [json.loads((tmp_path / f"note_{start}.json").read_text()) for start in range(2)]
    assert notes[0]["start"] != notes[1]["start"], "a rank of the first start could write into the second's"
    assert json.loads((tmp_path / "run" / FAILURE).read_text()) == notes[1]


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_does_not_join_a_job_that_has_its_rank(port: int, world: int, other_job: dist.Store) -> None:
    """Nor one of another size, which may not have a rank of this number yet."""
    for number in range(world):
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use"):
            meet(rank(number, port, world), MINUTE)


def test_a_process_may_meet_again_on_the_same_port(port: int) -> None:
    """A program that trains twice, or tests two layouts, keeps its port."""
    first = [meet(rank(number, port), MINUTE) for number in range(2)]
    again = [meet(rank(number, port, 4), MINUTE) for number in range(4)]
    assert None not in [*first, *again]


def test_a_port_that_is_freed_is_waited_for(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is started again finds the port in use while the processes of the last start end."""
    monkeypatch.setattr(rendezvous, "IN_USE_SECONDS", PATIENCE)
    previous = socket.socket()
    previous.bind(("127.0.0.1", port))
    previous.listen()
    sleep = time.sleep

    def end_previous(seconds: float) -> None:
        previous.close()
        sleep(seconds)

    monkeypatch.setattr(rendezvous.time, "sleep", end_previous)
    assert meet(rank(0, port), MINUTE) is not None


def test_a_rank_waits_for_rank_0_as_long_as_it_may(port: int) -> None:
    """And no longer: a rank 0 that was not started is reported by the others."""
    with pytest.raises(
        TimeoutError, match=f"rank 0 did not open the store of the ranks at 127.0.0.1:{port} within 1"
    ):
        meet(rank(1, port), MINUTE, timedelta(seconds=1))
