"""Asks the kernel about processes of this machine, and about the cores that this one may use (Linux)."""

import os
from collections.abc import Iterator
from math import floor
from pathlib import Path

# states: ended, though its parent may not have noticed; stopped by a signal, or traced
ENDED, STOPPED = ("gone", "Z", "X"), ("T", "t")


def stat_fields(pid: int | str) -> list[str]:
    """Of ``/proc/<pid>/stat``, from the process's state on.

    What stands before, a name in parentheses, may hold anything.

    Raises:
        OSError: there is no such process (any more), or the system is not Linux.
    """
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def process_state(pid: int) -> str:
    """The state of a process as Linux writes it (R, S, D, T, Z, …), or gone. On other systems it is ?."""
    if not Path("/proc/self/stat").exists():
        return "?"
    try:
        return stat_fields(pid)[0]
    except OSError:
        return "gone"


def available_cores(groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """The cores that this process may use, at least 1: its affinity's, or as many as its
    control groups' quotas pay for.
    """
    # macOS has no affinity
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, floor(min([cores, *quotas(groups, mount)])))


def quotas(groups: Path, mount: Path) -> list[float]:
    """The cores that each control group above this process is allowed, where any is limited
    (Linux; containers are such groups).
    """
    found = []
    for folder, first_version in control_groups("cpu", groups, mount):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if first_version else ("cpu.max",)
        if all((folder / name).is_file() for name in names):
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            found += [int(quota) / int(period)] if quota not in ("max", "-1") else []
    return found


def control_groups(controller: str, groups: Path, mount: Path) -> Iterator[tuple[Path, bool]]:
    """The folder of each control group above this process that may limit what `controller` counts, and
    whether it is one of version 1.
    """
    for line in groups.read_text().splitlines() if groups.is_file() else []:
        _, controllers, own = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = mount / controllers  # of version 1; version 2 has one tree and names no controllers
        for folder in [base / own.lstrip("/"), *(base / own.lstrip("/")).parents]:
            yield folder, bool(controllers)
            if folder == mount:
                break
