"""Ends a job when a rank cannot go on, so that the cause is the last line on stderr."""

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable

import torch.distributed as dist

from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import RankInfo
from megacore.errors import UserError
from megacore.tools.diagnosis.watchdog import Watchdog, say
from megacore.tools.error_report import GRACE_SECONDS, record, say_once
from megacore.tools.interrupt import interrupted_status, signal_of

# What gloo and NCCL say when the other side is gone.
LOST_PEER = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "socket error",
    "remote process",
    "timed out",
)


def lost_peer(error: BaseException) -> bool:
    """Whether `error` is the echo of another rank's failure."""
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in LOST_PEER)


def fail(
    error: BaseException,
    place: RankInfo,
    mesh: Mesh | None,
    watchdog: Watchdog | None = None,
    report: Callable[[str], None] | None = None,
) -> None:
    """Prints this rank's traceback, then its reason in one line, and ends the process with status 1.

    It does not clean up, because leaving a process group would wait for ranks that may never answer. The
    launcher ends the other ranks. If this rank only lost its peer, the watchdog prints its verdict instead,
    if there is one. `report` is called with the line before the process ends. A `UserError` is one line and
    status 2. After a signal the status is 128 + signal, and the line is not printed.

    In another program's process it returns, so that the program gets the exception.
    """
    where = "" if mesh is None else f", {mesh.coordinates_text}"
    rank_text = f"rank {place.rank} (host {socket.gethostname()}{where})"
    if isinstance(error, KeyboardInterrupt):
        if report is not None:
            report(f"{rank_text} was ended by {signal_of(error).name}")
        os._exit(interrupted_status(error))
    if isinstance(error, UserError):  # as before the ranks had met: one line and status 2
        error.of_this_machine = True
        if report is not None:
            report(str(error))
        if place.guest:
            return
        say_once(error, place)
        sys.stdout.flush()
        os._exit(2)
    first_line = (str(error).strip() or "no message").splitlines()[0]
    if lost_peer(error):
        if watchdog is not None:
            watchdog.ask(f"{type(error).__name__}: {first_line}")
        time.sleep(GRACE_SECONDS)  # the peer speaks first; the launcher then ends this rank
    trace = "".join(traceback.format_exception(error))
    reason = f"{rank_text} failed: {type(error).__name__}: {first_line}"
    say(trace + reason)
    record(reason)
    if report is not None:
        report(reason)
    if watchdog is not None:
        watchdog.last_words(reason)
    sys.stdout.flush()
    if not place.guest:
        os._exit(1)
