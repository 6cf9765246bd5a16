"""Why a job ends is said once: by the first rank that finds it, on another machine than rank 0's
only if rank 0 has found nothing.
"""

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megacore.distributed.rank_info import RankInfo
from megacore.errors import DataError
from megacore.tools import error_report as reasons
from megacore.tools.local_ranks import free_port, rank_environment
from tests.pool import PATIENCE, ROOT

MISTAKE = "from megacore.errors import DataError; error = DataError('corpus', 'is missing', 'a corpus')"
SAY = f"""
from megacore.tools import error_report as reasons
from megacore.tools.launchers import place_from_environment
{MISTAKE}
reasons.GRACE_SECONDS, reasons.MEETING_SECONDS = 0.0, 1.0
reasons.START_SECONDS, reasons.SAID_SECONDS = 1e4, 1e5  # however late the next rank of these tests starts
reasons.say_once(error, place_from_environment())
"""
SPEAK_FOR_EVER = """
import time
from megacore.tools import error_report as reasons
reasons.first_of_job(lambda: (print("speaking", flush=True), time.sleep(3600)))
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of ranks that keep what they tell each other in a folder of the test's own."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")} | {
        "TMPDIR": str(tmp_path)
    }


def start(
    code: str,
    rank: int,
    environment: dict[str, str],
    port: int = 29500,
    machine: tuple[int, ...] = (0, 1, 2, 3),
    world: int = 4,
) -> subprocess.Popen[str]:
    """A rank of four, whose launcher is this process. `machine`: the ranks on its machine."""
    local = {"LOCAL_RANK": str(machine.index(rank)), "LOCAL_WORLD_SIZE": str(len(machine))}
    env = environment | rank_environment(rank, world, port) | local
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=env,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(ranks: list[subprocess.Popen[str]]) -> list[str]:
    return "".join(rank.communicate(timeout=PATIENCE)[1] for rank in ranks).splitlines()


def test_whichever_rank_is_first_says_it_for_all(environment: dict[str, str]) -> None:
    """A launcher that ends the others at the first one's end must find the line said."""
    line = ["data error: corpus: is missing (a corpus)"]
    assert said([start(SAY, 2, environment)]) == line, "rank 0 may never come that far"
    assert said([start(SAY, rank, environment) for rank in (0, 1, 3)]) == []
    assert said([start(SAY, rank, environment) for rank in range(4)]) == line, "a second start is another job"


def test_a_start_by_hand_with_another_rank_is_not_silent(environment: dict[str, str], tmp_path: Path) -> None:
    """Who sets RANK in a shell, and tries the next one half a minute later, would
    get status 2 without a word.
    """
    assert len(said([start(SAY, 0, environment)])) == 1
    (list_of_ranks,) = (tmp_path / f"megacore-{os.getuid()}").iterdir()
    earlier = time.time() - 2e4  # the ranks of one start come closer together
    os.utime(list_of_ranks, (earlier, earlier))
    assert len(said([start(SAY, 1, environment)])) == 1


def test_rank_0_waits_for_no_rank_that_waits_for_it(environment: dict[str, str]) -> None:
    """srun --distribution=cyclic deals ranks to machines in turn, so rank 2 is beside rank 0.

    It waited for rank 0 to say the mistake or to go on, and rank 0 for it: the job ended without a word.
    """
    machine, port = (0, 2), free_port()
    later = start(SAY, 2, environment, port, machine)
    deadline = time.monotonic() + PATIENCE
    while not list(Path(environment["TMPDIR"]).glob("megacore-*/*")):  # rank 2 has begun to wait
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert said([start(SAY, 0, environment, port, machine)]) == ["data error: corpus: is missing (a corpus)"]
    assert said([later]) == []


@pytest.mark.parametrize(
    ("machines", "lines"),
    [(((0, 2, 4, 6), (1, 3, 5, 7)), 1), (((0, 1, 2, 3), (4, 5, 6, 7)), 2), (((0, 1, 7), (2, 3, 4, 5, 6)), 2)],
)
def test_each_machine_says_once_what_some_of_its_ranks_find(
    environment: dict[str, str],
    listening: int,
    tmp_path: Path,
    machines: tuple[tuple[int, ...], ...],
    lines: int,
) -> None:
    """Ranks 1, 3 and 7 of eight find a mistake, and rank 0 nothing: it waits for the others.

    A machine without rank 0 is named.
    """
    ranks = []
    for number, machine in enumerate(machines):
        (tmp_path / str(number)).mkdir()
        own = environment | {"TMPDIR": str(tmp_path / str(number))}
        ranks += [start(SAY, rank, own, listening, machine, world=8) for rank in machine if rank in (1, 3, 7)]
    found = said(ranks)
    assert len(found) == lines and all(
        line.endswith("data error: corpus: is missing (a corpus)") for line in found
    ), found
    assert any(
        line.startswith(tuple(f"rank {rank} on {socket.gethostname()}: " for rank in machines[1]))
        for line in found
    )


def test_a_rank_that_is_ended_while_it_speaks_is_replaced(environment: dict[str, str]) -> None:
    speaker = start(SPEAK_FOR_EVER, 1, environment)
    assert speaker.stdout is not None and speaker.stdout.readline() == "speaking\n"
    waiting = start(SAY, 0, environment)
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(1.0)
    speaker.send_signal(signal.SIGTERM)
    speaker.communicate()
    assert len(said([waiting])) == 1


def test_a_folder_of_somebody_else_is_not_used(environment: dict[str, str], tmp_path: Path) -> None:
    """Who could write there could silence a job, or have a file opened through a link."""
    folder = tmp_path / f"megacore-{os.getuid()}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    assert len(said([start(SAY, rank, environment) for rank in range(2)])) == 2, (
        "each for itself, and none is silent"
    )
    assert not any(folder.iterdir())


@pytest.fixture
def listening() -> Iterator[int]:
    """The port where a rank 0 waits for the others."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def of_second_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, port: int) -> None:
    """Rank 2 of four, the first on its machine, finds a mistake."""
    for name, value in (("RANK", "2"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(reasons, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(reasons, "MEETING_SECONDS", 0.2)
    reasons.say_once(DataError("corpus", "is missing", "a corpus"), RankInfo(2, 4, 0, 2, "127.0.0.1", port))


def test_a_machine_that_alone_lacks_something_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, listening: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 has found all that it needs, and waits."""
    of_second_machine(monkeypatch, tmp_path, listening)
    assert (
        capsys.readouterr().err
        == f"rank 2 on {socket.gethostname()}: data error: corpus: is missing (a corpus)\n"
    )


def test_what_rank_0_has_said_no_other_machine_repeats(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 has ended; a launcher such as srun lets the others go on."""
    of_second_machine(monkeypatch, tmp_path, free_port())
    assert capsys.readouterr().err == ""


GONE = [
    OSError(errno.EHOSTUNREACH, "No route to host"),
    TimeoutError("timed out"),
    socket.gaierror(-2, "unknown"),
]


@pytest.mark.parametrize("gone", GONE)
def test_where_rank_0s_machine_is_gone_another_speaks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], gone: OSError
) -> None:
    """Whether rank 0 has said it nobody knows then; the other machines ended with
    status 2 and without a word.
    """

    def unreachable(*_: object, **__: object) -> None:
        raise gone

    monkeypatch.setattr(socket, "create_connection", unreachable)
    of_second_machine(monkeypatch, tmp_path, free_port())
    assert (
        capsys.readouterr().err
        == f"rank 2 on {socket.gethostname()}: data error: corpus: is missing (a corpus)\n"
    )


def test_rank_0s_machine_is_named_where_it_may_lack_something_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its user would otherwise look for the corpus on a machine that has it."""
    monkeypatch.setattr(reasons, "first_of_job", lambda speak: speak() or True)
    error = DataError("corpus", "is missing", "a corpus")
    for own, machines, named in ((True, 2, True), (True, 1, False), (False, 2, False)):
        error.of_this_machine = own
        reasons.say_once(error, RankInfo(0, 4, 0, 4 // machines))
        assert capsys.readouterr().err.startswith("rank 0 on ") is named
