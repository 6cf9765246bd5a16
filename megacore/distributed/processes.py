"""Asks the kernel about other processes of this machine (Linux)."""

import os
import socket
from contextlib import suppress
from pathlib import Path

ENDED, STOPPED = ("gone", "Z", "X"), ("T", "t")  # states: ended, though its parent may not have noticed; stopped by a signal, or traced


def stat_fields(pid: int | str) -> list[str]:
    """Of ``/proc/<pid>/stat``, from the process's state on. What stands before, a name in parentheses, may hold anything.

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


def descendants(pid: int) -> list[int]:
    """The processes below a process (Linux). Launchers give ranks sessions of their own, so sessions do not show it."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat_fields(stat.parent.name)[1])
        except OSError:
            continue  # it has ended meanwhile
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[1:]


def machine() -> str:
    """A name for this machine that no other has: two may have one host name, and containers share a boot."""
    names = [socket.gethostname()]
    with suppress(OSError):  # not Linux
        names += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), str(os.stat("/proc/self/ns/net").st_ino)]
    return "/".join(names)
