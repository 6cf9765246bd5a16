"""Waiting and threads on a CPU that other programs use too.

OpenMP's threads meet at the end of every operation. A thread that spins there loses nothing on a quiet
machine, and takes a core from the one it waits for if cores are short. So threads spin for milliseconds, as
OpenMP does by itself, until this process has to wait for cores; then they sleep at once. What is left to lose
is that one thread of several always stands in a queue. A process that trains alone therefore has as many
threads as the system gives it cores, as it finds between steps.
"""

import ctypes
import math
import os
import resource
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from math import floor
from pathlib import Path

import torch

from megacore.config import Config
from megacore.config.implied import compiles
from megacore.distributed.events import Listener
from megacore.distributed.processes import control_groups

# of GCC's OpenMP, which PyTorch's wheels for Linux bring along; it reads it when it is loaded
SPIN_COUNT = "GOMP_SPINCOUNT"
OPENMPS_OWN = {SPIN_COUNT: "300000"}  # what a process has without the variable: some milliseconds
WATCHED = 0.5  # seconds between two looks at how threads are to wait
EVERY = 1.0  # seconds between two looks at how many there are to be
# of the time that its threads could run, from which a process has all of its cores: some program always runs
# for a moment
GRANTED = 0.8
ENOUGH = 0.05  # seconds that threads could run, from which that part says something
# such seconds from which one look is believed that cores are short: a shorter one may have met what ends with
# it
SURE = 1.0
# seconds that a thread may wait each time it gets a core: an idle one has to wake up, which is nobody's load
WAKING = 1e-4
TASKS = Path("/proc/self/task")


def share_cores(config: Config, world_size: int, device: torch.device) -> list["FittingThreads"]:
    """Lets this process, whose device is set up, share its machine's cores with other programs.

    Whoever starts a run calls it, and attaches the listeners that it returns.
    """
    if device.type != "cpu":
        return []
    if torch.get_num_threads() > 1:
        spin_while_cores_are_free()
    fitting = fitting_threads(config, world_size)
    return [] if fitting is None else [fitting]


def fitting_threads(config: Config, world_size: int) -> "FittingThreads | None":
    """What fits this process's number of threads to the machine's load, where nothing speaks against it:
    the user has set the number; sums must come in one order, among all ranks or in every start of a run;
    or code was compiled for a number.
    """
    fixed = (
        "OMP_NUM_THREADS" in os.environ or world_size > 1 or config.train.deterministic or compiles(config)
    )
    most = torch.get_num_threads()
    return None if fixed or most == 1 or not TASKS.is_dir() else FittingThreads(most)


@cache
def spin_while_cores_are_free() -> None:
    """Keeps this process's OpenMP threads from spinning while cores are short, unless
    the user has said how they wait.
    """
    if SPIN_COUNT not in os.environ and "OMP_WAIT_POLICY" not in os.environ and TASKS.is_dir():
        watch(Books(TASKS), short=False)


def watch(books: "Books", *, short: bool) -> None:
    """Starts a thread that looks whether cores are short until that has changed; another one then goes on.

    While they are short, the thread holds a team, which ends with it.
    """

    def look() -> None:
        if short:
            hold_team()
        while (granted := books.granted()) is None or (granted <= GRANTED) == short:
            time.sleep(WATCHED)
        watch(books, short=not short)

    threading.Thread(target=look, name="waiting", daemon=True).start()


def hold_team() -> None:
    """Gives the calling thread an OpenMP team that sleeps.

    With it the process has more OpenMP threads than the machine has cores, and so long as it has, GCC's
    OpenMP lets none of them spin (``GOMP_SPINCOUNT`` in its manual). Without room for that many it does
    nothing: GCC's OpenMP ends the process if it cannot start a thread.
    """
    team = len(os.sched_getaffinity(0)) + 1
    if threads_left() < 2 * team:  # others start threads meanwhile
        return
    mapped = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    for library in {line.split(maxsplit=5)[-1] for line in mapped if "libgomp" in line}:
        nothing = ctypes.CDLL(None).free  # of a null pointer
        ctypes.CDLL(library).GOMP_parallel(nothing, None, team, 0)


def threads_left(
    groups: Path = Path("/proc/self/cgroup"),
    mount: Path = Path("/sys/fs/cgroup"),
    processes: Path = Path("/proc"),
) -> float:
    """The threads that this process may still start: by its user's limit, and by each
    control group above the process.
    """
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


class Books:
    """The kernel's books of this process's threads."""

    def __init__(self, tasks: Path) -> None:
        # the first look is back at all that was since the process began
        self.tasks, self.before = tasks, dict[str, tuple[int, int, int]]()
        self.doubted = False  # whether the last look said that cores are short

    def granted(self) -> float | None:
        """The part of the time in which its threads could run that they had a core, since this was last
        asked. None: they hardly wanted one; or cores were short, and a longer or a second look is to say so
        too; or the kernel keeps no such books, as some containers' do not.
        """
        now = run_and_waited(self.tasks)
        ran, waited, times = (
            sum(now[task][i] - self.before.get(task, (0, 0, 0))[i] for task in now) for i in range(3)
        )
        self.before, waited = now, max(0, waited - round(times * WAKING * 1e9))
        if (wanted := (ran + waited) / 1e9) <= ENOUGH:
            return None
        granted, doubted = ran / (ran + waited), self.doubted
        self.doubted = granted <= GRANTED
        return None if self.doubted and not doubted and wanted < SURE else granted


class FittingThreads(Listener):
    """Sets a process's number of threads between steps, by how long its threads had to wait
    for a core since the last look.
    """

    def __init__(
        self, most: int, set_threads: Callable[[int], object] = torch.set_num_threads, tasks: Path = TASKS
    ) -> None:
        """`most`: the threads where nobody else wants a core."""
        self.set_threads = set_threads
        self.most, self.threads = most, most
        self.looked, self.books = float("-inf"), Books(tasks)
        # looks to pass until more threads are tried; how many that will be next time
        self.rest, self.patience = 0, 0

    def on_step_begin(self, step: int, logged: bool) -> None:
        """Between two steps."""
        self.fit()

    def fit(self) -> None:
        """Looks, if it is time to, and sets the number."""
        if time.monotonic() - self.looked < EVERY:
            return
        self.looked = time.monotonic()
        granted = self.books.granted()
        if granted is not None:
            self._set(self._next(granted))

    def _next(self, granted: float) -> int:
        """The number of threads, after one that ran in this part of the time.

        Where more turn out too many again, they are tried ever less often.
        """
        wanted = self.most if granted > GRANTED else max(1, floor(self.most * granted))
        if wanted < self.threads:
            self.rest, self.patience = self.patience, min(2 * self.patience + 1, 32)
        elif wanted == self.threads:
            self.patience = 0
        elif self.rest:
            self.rest -= 1
            return self.threads
        return wanted

    def _set(self, threads: int) -> None:
        if threads != self.threads:
            self.threads = threads
            self.set_threads(threads)


def run_and_waited(tasks: Path) -> dict[str, tuple[int, int, int]]:
    """For each thread of this process, how long it has run so far, how long it could have run and had no
    core, in nanoseconds; and how often it got one.
    """
    found = {}
    for task in os.listdir(tasks):
        try:
            ran, waited, times = (tasks / task / "schedstat").read_text().split()
        except OSError:
            continue  # it has ended meanwhile
        found[task] = int(ran), int(waited), int(times)
    return found
