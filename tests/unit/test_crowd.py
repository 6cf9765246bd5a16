"""A CPU that other programs use too: how many threads a process has there, and how they wait."""

import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megacore.distributed import cpu
from megacore.distributed.processes import available_cores
from megacore.tools import crowd
from megacore.tools.crowd import FittingThreads, hold_team
from megacore.tools.machine import cpu as machine_cpu
from tests.build import run_of


class Machine:
    """A process's threads in the kernel's books, and time that passes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now, self.times = folder, 0.0, {"1": [0, 0, 0], "2": [0, 0, 0]}
        self.write()

    def write(self) -> None:
        for task, own in self.times.items():
            (self.folder / task).mkdir(exist_ok=True)
            (self.folder / task / "schedstat").write_text(" ".join(map(str, own)) + "\n")

    def pass_second(self, granted: float, working: float = 1.0, times: int = 7) -> None:
        """Every thread ran in this part of the second, or of the part of it in which it could
        run, and got a core so many times.
        """
        self.now += 1.0
        for own in self.times.values():
            own[0] += round(granted * working * 1e9)
            own[1] += round((1 - granted) * working * 1e9)
            own[2] += times
        self.write()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(crowd.time, "monotonic", lambda: made.now)
    return made


def nowhere(threads: int) -> None:
    """Takes a number of threads."""


def numbers(machine: Machine, most: int, granted: list[float]) -> list[int]:
    """The threads that a new process has behind each second."""
    machine.times = {task: [0, 0, 0] for task in machine.times}
    set_numbers = [most]
    fitting = FittingThreads(most, set_numbers.append, machine.folder)
    found = []
    for part in granted:
        machine.pass_second(part)
        fitting.fit()
        assert fitting.threads == set_numbers[-1]
        found.append(fitting.threads)
    return found


def test_threads_leave_when_cores_are_taken_and_come_back(machine: Machine) -> None:
    """Two threads that share a core with others wait for each other: beside 15 busy loops a step took
    three times as long as with one.
    """
    assert numbers(machine, 2, [1.0, 0.97, 0.12, 0.3, 0.12, 1.0, 1.0, 1.0]) == [2, 2, 1, 1, 1, 2, 2, 2]
    assert numbers(machine, 64, [0.95, 0.79, 0.79]) == [64, 50, 50], (
        "a large machine's threads all left for a few others"
    )


def test_more_threads_that_are_too_many_again_are_tried_ever_less_often(machine: Machine) -> None:
    """One busy loop beside two threads: alone the one thread waits for nobody, and would
    call the other back at each look.
    """
    fitting, found = FittingThreads(2, nowhere, machine.folder), []
    for _ in range(40):
        machine.pass_second(0.66 if fitting.threads == 2 else 1.0)
        fitting.fit()
        found.append(fitting.threads)
    assert found.count(2) <= 5 and 2 in found[20:]


def test_a_short_look_is_not_believed_alone(machine: Machine) -> None:
    """A contender of a benchmark works for a fraction of a second a turn.

    What was before its turn, or while it began, gave up half of its cores for seconds that hold few turns.
    """
    fitting, found = FittingThreads(2, nowhere, machine.folder), []
    for granted in (1.0, 0.5, 1.0, 0.5, 0.5, 1.0, 1.0):
        machine.pass_second(granted, working=0.3)
        fitting.fit()
        found.append(fitting.threads)
    assert found == [2, 2, 2, 2, 1, 2, 2]


def test_a_core_that_wakes_up_is_not_somebody_elses(machine: Machine) -> None:
    """Threads that sleep between operations wait some hundredths of a millisecond each time for
    an idle core: a third of the time in which they could run, on a machine that is theirs. So
    they would sleep for ever, and leave.
    """
    fitting, books = FittingThreads(2, nowhere, machine.folder), crowd.Books(machine.folder)
    for _ in range(4):
        machine.pass_second(0.66, times=5000)
        fitting.fit()
        assert fitting.threads == 2 and (granted := books.granted()) is not None and granted > crowd.GRANTED
    machine.pass_second(0.66, times=300)  # a core that is taken comes back after a millisecond or more
    fitting.fit()
    assert fitting.threads == 1


@pytest.mark.parametrize("kept", ["0 0 0\n", None], ids=["zeros", "no file"])
def test_threads_stay_where_the_kernel_keeps_no_books(machine: Machine, kept: str | None) -> None:
    """Without delay accounting Linux writes zeros, and some containers' kernels have no such file:
    that is no word of others' load.
    """
    for file in machine.folder.glob("*/schedstat"):
        file.unlink() if kept is None else file.write_text(kept)
    fitting = FittingThreads(2, nowhere, machine.folder)
    machine.now += 2.0
    fitting.fit()
    assert fitting.threads == 2


def test_a_look_is_taken_once_a_second(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look reads a file for each thread."""
    fitting = FittingThreads(2, nowhere, machine.folder)
    fitting.fit()
    monkeypatch.setattr(crowd, "run_and_waited", pytest.fail)
    machine.now += 0.9
    fitting.fit()


def test_a_process_that_starts_in_a_crowd_has_fewer_threads_from_its_first_step(machine: Machine) -> None:
    """What it waited for while it was starting says so; a first step of a large model can take minutes."""
    machine.pass_second(0.3)
    fitting = FittingThreads(2, nowhere, machine.folder)
    fitting.fit()
    assert fitting.threads == 1


def test_a_process_that_hardly_runs_says_nothing(machine: Machine) -> None:
    """It waits for its turn, as a benchmark's contender does: a millisecond in a queue is no shortage."""
    fitting = FittingThreads(2, nowhere, machine.folder)
    machine.now += 10.0
    machine.times["1"] = [1_000_000, 9_000_000, 1]
    machine.write()
    fitting.fit()
    assert fitting.threads == 2


def test_threads_that_come_and_go_are_counted(machine: Machine) -> None:
    fitting = FittingThreads(2, nowhere, machine.folder)
    machine.pass_second(0.99)
    (machine.folder / "2" / "schedstat").unlink()
    (machine.folder / "3").mkdir()
    (machine.folder / "3" / "schedstat").write_text("10 4000000000 1\n")
    fitting.fit()
    assert fitting.threads == 1


@pytest.mark.parametrize(
    ("settings", "world", "given", "fits"),
    [
        ({}, 1, None, True),
        ({}, 1, "2", False),
        ({"deterministic": True}, 1, None, False),
        ({"compile": True}, 1, None, False),
        ({}, 2, None, False),
    ],
    ids=[
        "alone",
        "a number that the user set",
        "the same bits again",
        "code for a number of threads",
        "ranks that sum alike",
    ],
)
def test_who_fits_threads(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, bool], world: int, given: str | None, fits: bool
) -> None:
    """The order of sums depends on the number of threads: what must come out alike keeps it."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(crowd, "TASKS", Path("/"))
    monkeypatch.setattr(crowd, "run_and_waited", lambda tasks: {})
    config = run_of({"train": settings}, world=world)
    assert (crowd.fitting_threads(config, world) is not None) == fits


def available(folder: Path, groups: str, files: dict[str, str]) -> int:
    """The cores of a process in these control groups."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    (folder / "groups").write_text(groups)
    return available_cores(folder / "groups", folder)


def test_a_containers_quota_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container of 3 cores sees all 64 of its host; with as many threads the kernel would stop
    them for most of every period.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    v2 = {"cpu.max": "max 100000\n", "pods/cpu.max": "350000 100000\n", "pods/one/cpu.max": "max 100000\n"}
    assert available(tmp_path / "v2", "0::/pods/one\n", v2) == 3
    v1 = {"cpu,cpuacct/cpu.cfs_quota_us": "50000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}
    assert available(tmp_path / "v1", "4:memory:/x\n1:cpu,cpuacct:/docker/x\n0::/\n", v1) == 1
    assert (
        available(
            tmp_path / "none",
            "1:cpu:/\n0::/\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
        )
        == 64
    )
    assert available_cores(tmp_path / "absent", tmp_path) == 64


SRUN = {"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "64", "SLURM_CPUS_PER_TASK": "6"}


@pytest.mark.parametrize(
    ("environment", "cores", "threads"),
    [
        ({}, 64, 8),
        (SRUN, 6, 6),  # bound to its own cores
        (SRUN, 64, 6),  # not bound
        (SRUN | {"RANK": "9", "WORLD_SIZE": "64", "LOCAL_WORLD_SIZE": "8"}, 64, 8),  # srun torchrun
        (SRUN | {"OMP_NUM_THREADS": "3"}, 6, 1),
    ],
)
def test_cores_of_a_slurm_task_are_not_divided_again(
    environment: dict[str, str], cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `srun --cpus-per-task 6` and 8 ranks on a node, each rank would compute with one thread of six."""
    monkeypatch.setattr(os, "environ", environment)
    for module in (machine_cpu, cpu):
        monkeypatch.setattr(module, "available_cores", lambda: cores)
    chosen = [1]
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    machine_cpu.divide_cores(local_world_size=8)
    assert chosen[-1] == threads


def test_threads_spin_until_cores_are_short_and_again_when_they_are_free(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who always sleeps at once loses a twentieth on a quiet machine; who always spins is ten times slower
    beside busy loops. By the kernel's books alone a thread takes a team, and ends with it.
    """
    passed, looks, teams, waits = (
        iter([1.0, 0.97, 0.4, 0.3, 1.0, 0.99]),
        list[Callable[[], None]](),
        list[int](),
        list[bool](),
    )

    class Later:
        """A thread that the test runs."""

        def __init__(self, target: Callable[[], None], **_: object) -> None:
            self.start = lambda: looks.append(target)

    def pass_look(_: float) -> None:
        waits.append(len(looks) in teams)
        machine.pass_second(next(passed))

    monkeypatch.setattr(crowd.threading, "Thread", Later)
    monkeypatch.setattr(crowd.time, "sleep", pass_look)
    monkeypatch.setattr(crowd, "hold_team", lambda: teams.append(len(looks)))
    crowd.watch(crowd.Books(machine.folder), short=False)
    with pytest.raises(StopIteration):
        for look in looks:
            look()
    assert waits == [False, False, False, True, True, False, False] and len(teams) == 1


def test_no_team_is_held_where_threads_run_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GCC's OpenMP ends the process if it cannot start a thread, and a run would
    be lost to be a little faster.
    """
    (tmp_path / "groups").write_text("0::/pods/one\n3:pids:/x\n")
    (tmp_path / "none").mkdir()
    for name, content in {
        "pods/pids.max": "100",
        "pods/pids.current": "70",
        "pods/one/pids.max": "max",
        "pids/x/pids.max": "50",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content + "\n")
    (tmp_path / "pids/x/pids.current").write_text("10\n")
    for process in ("1", "22", "self"):
        for task in "ab":
            (tmp_path / "proc" / process / "task" / task).mkdir(parents=True)
    places, limit = (tmp_path / "groups", tmp_path, tmp_path / "proc"), [resource.RLIM_INFINITY]
    monkeypatch.setattr(crowd.resource, "getrlimit", lambda kind: (limit[0], resource.RLIM_INFINITY))
    assert (
        crowd.threads_left(*places) == 30 and crowd.threads_left(tmp_path / "absent", *places[1:]) == math.inf
    )
    limit[0] = 9
    assert crowd.threads_left(*places) == 5, "two processes of two threads"
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    assert crowd.threads_left(*places) == 9, "another user's count for him"

    began = list[str]()
    monkeypatch.setattr(
        crowd.ctypes,
        "CDLL",
        lambda library: began.append(library) or SimpleNamespace(free=0, GOMP_parallel=lambda *_: 0),
    )
    monkeypatch.setattr(crowd.Path, "read_text", lambda path, **_: "1-2 r 0 0 0 /lib/libgomp.so.1\n")
    team = len(os.sched_getaffinity(0)) + 1
    for left in (2 * team - 1, 2 * team):
        monkeypatch.setattr(crowd, "threads_left", lambda left=left: left)
        assert not began
        hold_team()
    assert began


SPINNING = """
import os, threading, time
from pathlib import Path
import torch
from megacore.tools.crowd import hold_team

TASKS = Path("/proc/self/task")

def states():  # of each of the team's threads: whether it sleeps or could run, and the hundredths of a second that it ran
    fields = [(TASKS / task / "stat").read_text().rpartition(")")[2].split() for task in team]
    return [own[0] for own in fields], sum(int(own[11]) + int(own[12]) for own in fields)

def spin():  # whether an operation's threads go on working when it is done, which they then do for ever, or sleep
    others = set(os.listdir(TASKS))
    torch.ones(1 << 20).add_(1)
    team.update(set(os.listdir(TASKS)) - others)
    before = states()[1]
    while True:
        now, ran = states()
        if ran > before + 20:
            return True
        if set(now) == {"S"}:
            return False
        time.sleep(0.01)

def holding():
    hold_team()
    held.set()
    free.wait()

team, held, free = set(), threading.Event(), threading.Event()
found = [spin()]
holder, before = threading.Thread(target=holding), len(os.listdir(TASKS))
holder.start()
held.wait()
found.append(spin())
free.set()
while len(os.listdir(TASKS)) > before:  # its team ends with it, which Python does not wait for
    time.sleep(0.01)
print(*found, spin(), len(team))
"""  # noqa: E501


def test_a_team_that_sleeps_keeps_openmp_from_spinning() -> None:
    """It is GCC's OpenMP that decides: with more threads than cores nobody spins, even
    where they otherwise spin for ever.
    """
    cores = len(os.sched_getaffinity(0))
    if cores == 1 or not libgomp_mapped():
        pytest.skip("one core, or torch brings along another OpenMP than GCC's")
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_NUM_THREADS": str(cores), crowd.SPIN_COUNT: "infinite"}
    found = subprocess.check_output([sys.executable, "-c", SPINNING], env=environment, text=True).split()
    assert found == ["True", "False", "True", str(cores - 1)]


def libgomp_mapped() -> bool:
    """Whether torch has loaded GCC's OpenMP."""
    return "libgomp" in Path("/proc/self/maps").read_text(errors="replace")


@pytest.mark.parametrize(
    ("name", "value", "watched"),
    [("X", "1", 1), ("OMP_WAIT_POLICY", "active", 0), (crowd.SPIN_COUNT, "7", 0)],
)
def test_a_user_who_says_how_threads_wait_is_heard(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, watched: int
) -> None:
    """Nobody watches then. Otherwise one thread does, however many runs a process does."""
    for variable in ("OMP_WAIT_POLICY", crowd.SPIN_COUNT):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(crowd, "TASKS", Path("/"))
    started = list[bool]()
    monkeypatch.setattr(crowd, "watch", lambda books, short: started.append(short))
    monkeypatch.setattr(
        crowd, "spin_while_cores_are_free", again := cache(crowd.spin_while_cores_are_free.__wrapped__)
    )
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    config = run_of({"train": {"deterministic": True}})
    for _ in range(2):
        assert crowd.share_cores(config, 1, torch.device("cpu")) == []
    assert started == [False] * watched and again.cache_info().currsize == 1
