"""Waiting and threads on a CPU that other programs use too.

OpenMP's threads meet at the end of every operation. A thread that spins there takes a core from the one it waits for, if cores are
short; so all spin for some tens of microseconds at most, and then sleep. What is left to lose is that one thread of several always
stands in a queue. A process that trains alone therefore has as many threads as the system gives it cores, as it finds between steps.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from math import floor
from pathlib import Path

SPIN_COUNT = "GOMP_SPINCOUNT"  # of GCC's OpenMP, which PyTorch's wheels for Linux bring along; it reads it when it is loaded
WAITING = {SPIN_COUNT: "3000"}  # bridges the gaps between one operation and the next; by itself it spins for milliseconds
OPENMPS_OWN = {SPIN_COUNT: "300000"}  # what a process has without the variable
EVERY = 1.0  # seconds between two looks
GRANTED = 0.8  # of the time that its threads could run, from which a process has all of its cores: some program always runs for a moment
TASKS = Path("/proc/self/task")


def wait_briefly() -> None:
    """Keeps the OpenMP threads of this process from spinning for long, unless the user has said how they wait.

    To be called before torch is imported; later it changes nothing, and leaves the environment alone.
    """
    if "torch" not in sys.modules and SPIN_COUNT not in os.environ and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.update(WAITING)


def available_cores(groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """The cores that this process may use, at least 1: its affinity's, or as many as its control groups' quotas pay for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS has no affinity
    return max(1, floor(min([cores, *quotas(groups, mount)])))


def quotas(groups: Path, mount: Path) -> list[float]:
    """The cores that each control group above this process is allowed, where any is limited (Linux; containers are such groups)."""
    found = []
    for line in groups.read_text().splitlines() if groups.is_file() else []:
        _, controllers, own = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = mount / controllers  # of version 1; version 2 has one tree and names no controllers
        for folder in [base / own.lstrip("/"), *(base / own.lstrip("/")).parents]:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
            if all((folder / name).is_file() for name in names):
                quota, period = " ".join((folder / name).read_text() for name in names).split()
                found += [int(quota) / int(period)] if quota not in ("max", "-1") else []
            if folder == mount:
                break
    return found


class FittingThreads:
    """Sets a process's number of threads between steps, by how long its threads had to wait for a core since the last look."""

    def __init__(self, most: int, set_threads: Callable[[int], object], tasks: Path = TASKS) -> None:
        """`most`: the threads where nobody else wants a core. `set_threads`: PyTorch's, which every script's help can do without."""
        self.set_threads = set_threads
        self.most, self.threads, self.tasks = most, most, tasks
        self.looked, self.before = time.monotonic(), run_and_waited(tasks)
        self.rest, self.patience = 0, 1  # looks to pass until more threads are tried; how many that will be next time

    def fit(self) -> None:
        """Looks, if it is time to, and sets the number."""
        if time.monotonic() - self.looked < EVERY:
            return
        now = run_and_waited(self.tasks)
        ran, waited = (sum(now[task][i] - self.before.get(task, (0, 0))[i] for task in now) for i in range(2))
        self.looked, self.before = time.monotonic(), now
        if ran + waited:  # else the kernel keeps no such books, as some containers' do not
            self._set(self._next(ran / (ran + waited)))

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


def run_and_waited(tasks: Path) -> Mapping[str, tuple[int, int]]:
    """For each thread of this process, how long it has run so far, and how long it could have run and had no core; nanoseconds."""
    found = {}
    for task in os.listdir(tasks):
        try:
            ran, waited, _ = (tasks / task / "schedstat").read_text().split()
        except OSError:
            continue  # it has ended meanwhile
        found[task] = int(ran), int(waited)
    return found
