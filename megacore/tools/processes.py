"""Other processes of this machine, and which machine it is (Linux); signals that have to wait."""

import os
import signal
import socket
import threading
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
def hold_signals(*numbers: signal.Signals) -> Iterator[None]:
    """Let this process handle these signals only at the end of the context.

    Processes that are started in it inherit the signal mask and never receive them. With SIGINT, Ctrl-C,
    which a terminal sends to all processes, is left to this one, and they print no traceback of imports.
    """
    # The mask is this thread's alone. Another thread may receive the signal, and Python still runs its
    # handler in the main thread, so the handlers are replaced too.
    held: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {
            number: signal.signal(number, lambda number, _: held.append(number)) for number in numbers
        }
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if held:
            signal.raise_signal(held[0])
