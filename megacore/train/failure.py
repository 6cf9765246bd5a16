"""How a rank that cannot go on ends the job, so that the cause is the last thing on stderr."""

import os
import socket
import sys
import time
import traceback

import torch.distributed as dist

from megacore.cli import INTERRUPTED
from megacore.mesh import Mesh
from megacore.place import Place

GRACE_SECONDS = 5.0  # a rank that only lost its peer lets the peer speak first; the launcher then ends it
# What gloo and NCCL say when the other side is gone.
LOST_PEER = ("connection closed", "connection reset", "connection refused", "broken pipe", "socket error", "remote process", "timed out")


def lost_peer(error: BaseException) -> bool:
    """Whether `error` is the echo of another rank's failure."""
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in LOST_PEER)


def fail(error: BaseException, place: Place, mesh: Mesh | None) -> None:
    """Prints this rank's traceback and, last, its reason in one line; ends the process with status 1, without clean-up:
    leaving a process group would wait for ranks that may never answer. The launcher ends the other ranks.
    After Ctrl-C, which the user knows of, the status is `INTERRUPTED` and nothing is printed."""
    if isinstance(error, KeyboardInterrupt):
        os._exit(INTERRUPTED)
    if lost_peer(error):
        time.sleep(GRACE_SECONDS)
    where = "" if mesh is None else f", pp {mesh.pp_rank}, dp {mesh.dp_rank}, tp {mesh.tp_rank}"
    report = "".join(traceback.format_exception(error))
    # One write: lines of several ranks must not mix.
    first_line = (str(error).strip() or "no message").splitlines()[0]
    sys.stderr.write(f"{report}rank {place.rank} (host {socket.gethostname()}{where}) failed: {type(error).__name__}: {first_line}\n")
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(1)
