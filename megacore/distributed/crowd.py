"""Waiting and threads on a CPU that other programs use too.

OpenMP's threads meet at the end of every operation. A thread that spins there loses nothing on a quiet machine, and takes a core from
the one it waits for if cores are short. So threads spin for milliseconds, as OpenMP does by itself, until this process has to wait for
cores; then they sleep at once. What is left to lose is that one thread of several always stands in a queue. A process that trains alone
therefore has as many threads as the system gives it cores, as it finds between steps.
"""

import ctypes
import math
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from math import floor
from pathlib import Path

SPIN_COUNT = "GOMP_SPINCOUNT"  # of GCC's OpenMP, which PyTorch's wheels for Linux bring along; it reads it when it is loaded
OPENMPS_OWN = {SPIN_COUNT: "300000"}  # what a process has without the variable: some milliseconds
WATCHED = 0.5  # seconds between two looks at how threads are to wait
EVERY = 1.0  # seconds between two looks at how many there are to be
GRANTED = 0.8  # of the time that its threads could run, from which a process has all of its cores: some program always runs for a moment
ENOUGH = 0.05  # seconds that threads could run, from which that part says something
TASKS = Path("/proc/self/task")


@cache
def spin_while_cores_are_free() -> None:
    """Keeps this process's OpenMP threads from spinning while cores are short, unless the user has said how they wait."""
    if SPIN_COUNT not in os.environ and "OMP_WAIT_POLICY" not in os.environ and TASKS.is_dir():
        watch(Books(TASKS), short=False)


def watch(books: "Books", *, short: bool) -> None:
    """Starts a thread that looks whether cores are short until that has changed; another one then goes on. While they are short, the
    thread holds a team, which ends with it."""

    def look() -> None:
        if short:
            hold_team()
        while (granted := books.granted()) is None or (granted <= GRANTED) == short:
            time.sleep(WATCHED)
        watch(books, short=not short)

    threading.Thread(target=look, name="waiting", daemon=True).start()


def hold_team() -> None:
    """Gives the calling thread an OpenMP team that sleeps. With it the process has more OpenMP threads than the machine has cores, and
    so long as it has, GCC's OpenMP lets none of them spin (``GOMP_SPINCOUNT`` in its manual). Without room for that many it does nothing:
    GCC's OpenMP ends the process if it cannot start a thread."""
    team = len(os.sched_getaffinity(0)) + 1
    if threads_left() < 2 * team:  # others start threads meanwhile
        return
    mapped = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    for library in {line.split(maxsplit=5)[-1] for line in mapped if "libgomp" in line}:
        nothing = ctypes.CDLL(None).free  # of a null pointer
        ctypes.CDLL(library).GOMP_parallel(nothing, None, team, 0)


def threads_left(groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup"), processes: Path = Path("/proc")) -> float:
    """The threads that this process may still start: by its user's limit, and by each control group above the process."""
    found = [math.inf]
    if (most := resource.getrlimit(resource.RLIMIT_NPROC)[0]) != resource.RLIM_INFINITY:
        found += [most - threads_of(os.getuid(), processes)]
    for folder, _ in control_groups("pids", groups, mount):
        if (folder / "pids.max").is_file() and (limit := (folder / "pids.max").read_text().strip()) != "max":
            found += [int(limit) - int((folder / "pids.current").read_text())]
    return min(found)


def threads_of(user: int, processes: Path) -> int:
    """The threads of all processes of a user."""
    found = 0
    for process in processes.glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            found += len(os.listdir(process / "task")) if process.stat().st_uid == user else 0
    return found


def available_cores(groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """The cores that this process may use, at least 1: its affinity's, or as many as its control groups' quotas pay for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS has no affinity
    return max(1, floor(min([cores, *quotas(groups, mount)])))


def quotas(groups: Path, mount: Path) -> list[float]:
    """The cores that each control group above this process is allowed, where any is limited (Linux; containers are such groups)."""
    found = []
    for folder, first_version in control_groups("cpu", groups, mount):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if first_version else ("cpu.max",)
        if all((folder / name).is_file() for name in names):
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            found += [int(quota) / int(period)] if quota not in ("max", "-1") else []
    return found


def control_groups(controller: str, groups: Path, mount: Path) -> Iterator[tuple[Path, bool]]:
    """The folder of each control group above this process that may limit what `controller` counts, and whether it is one of version 1."""
    for line in groups.read_text().splitlines() if groups.is_file() else []:
        _, controllers, own = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = mount / controllers  # of version 1; version 2 has one tree and names no controllers
        for folder in [base / own.lstrip("/"), *(base / own.lstrip("/")).parents]:
            yield folder, bool(controllers)
            if folder == mount:
                break


class Books:
    """The kernel's books of this process's threads."""

    def __init__(self, tasks: Path) -> None:
        self.tasks, self.before = tasks, dict[str, tuple[int, int]]()  # the first look is back at all that was since the process began

    def granted(self) -> float | None:
        """The part of the time in which its threads could run that they had a core, since this was last asked. None: they hardly wanted
        one, or the kernel keeps no such books, as some containers' do not."""
        now = run_and_waited(self.tasks)
        ran, waited = (sum(now[task][i] - self.before.get(task, (0, 0))[i] for task in now) for i in range(2))
        self.before = now
        return ran / (ran + waited) if ran + waited > ENOUGH * 1e9 else None


class FittingThreads:
    """Sets a process's number of threads between steps, by how long its threads had to wait for a core since the last look."""

    def __init__(self, most: int, set_threads: Callable[[int], object], tasks: Path = TASKS) -> None:
        """`most`: the threads where nobody else wants a core. `set_threads`: PyTorch's, which every script's help can do without."""
        self.set_threads = set_threads
        self.most, self.threads = most, most
        self.looked, self.books = float("-inf"), Books(tasks)
        self.rest, self.patience = 0, 1  # looks to pass until more threads are tried; how many that will be next time

    def fit(self) -> None:
        """Looks, if it is time to, and sets the number."""
        if time.monotonic() - self.looked < EVERY:
            return
        self.looked = time.monotonic()
        granted = self.books.granted()
        if granted is not None:
            self._set(self._next(granted))

    def _next(self, granted: float) -> int:
        """The number of threads, after one that ran in this part of the time. Where more turn out too many again, they are tried ever less
        often."""
        wanted = self.most if granted > GRANTED else max(1, floor(self.most * granted))
        if wanted < self.threads:
            self.rest, self.patience = self.patience, min(2 * self.patience, 32)
        elif wanted == self.threads:
            self.patience = 1
        elif self.rest:
            self.rest -= 1
            return self.threads
        return wanted

    def _set(self, threads: int) -> None:
        if threads != self.threads:
            self.threads = threads
            self.set_threads(threads)


def run_and_waited(tasks: Path) -> dict[str, tuple[int, int]]:
    """For each thread of this process, how long it has run so far, and how long it could have run and had no core; nanoseconds."""
    found = {}
    for task in os.listdir(tasks):
        try:
            ran, waited, _ = (tasks / task / "schedstat").read_text().split()
        except OSError:
            continue  # it has ended meanwhile
        found[task] = int(ran), int(waited)
    return found
