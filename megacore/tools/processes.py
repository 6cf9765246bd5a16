"""Other processes of this machine, which machine it is (Linux), and processes that Ctrl-C must not reach."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megacore.distributed.processes import stat_fields


def descendants(pid: int) -> list[int]:
    """The processes below a process (Linux).

    Launchers give ranks sessions of their own, so sessions do not show it.
    """
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
        names += [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            str(os.stat("/proc/self/ns/net").st_ino),
        ]
    return "/".join(names)


@contextmanager
def shield_from_interrupts() -> Iterator[None]:
    """Start processes in this context that Ctrl-C, which a terminal sends to all, never reaches.

    They inherit a signal mask that blocks SIGINT, so they need no handler and print no traceback of their
    imports. A Ctrl-C that comes meanwhile reaches this process when the context ends. Ending the processes is
    left to the caller.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
