"""Who of a job's ranks says why it ends: one line, whichever of them find the mistake and however fast the launcher ends the others."""

import fcntl
import json
import os
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from megacore.distributed.place import Place
from megacore.errors import UserError

GRACE_SECONDS = 5.0  # for a launcher to end the other ranks of a job in which one has ended
MEETING_SECONDS = 60.0  # for rank 0 of another machine to come where the ranks meet
SAID_SECONDS = 60.0  # in which the ranks of one job come with the same mistake
LEFT_OVER_SECONDS = 86400.0
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def say_once(error: UserError, place: Place) -> None:
    """Says a mistake on stderr, unless another rank of the job has said it. Returns when it has been said.

    On one machine the first rank that finds it speaks. Where there are several, that of another machine than rank 0's speaks only if
    rank 0 has found nothing wrong; the line then names its machine. So it does wherever only this machine may lack something.
    """
    beside = place.rank - place.local_rank > 0  # on another machine than rank 0
    named = beside or (error.of_this_machine and place.local_world_size < place.world_size)
    line = f"rank {place.rank} on {socket.gethostname()}: {error}" if named else str(error)

    def speak() -> None:
        if not beside or rank_0_waits(place):
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
            record(line)

    if place.world_size == 1 and not any(name in os.environ for name in RANKS):
        speak()
    elif not first_of_job(speak):
        time.sleep(GRACE_SECONDS)  # the launcher reports the rank that ended first: that shall be the one that spoke


def first_of_job(speak: Callable[[], None]) -> bool:
    """Calls `speak` if no rank of this job has done so on this machine; returns whether it was called. A rank that comes
    while another speaks waits for it, and takes its place if that one is ended meanwhile.
    """
    me = "/".join(os.environ.get(name, "") for name in RANKS)
    try:
        folder = private_folder()
        file = os.open(folder / job_name(os.environ), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:  # better twice than never
        speak()
        return True
    with open(file, "r+", encoding="utf-8") as said:
        fcntl.flock(said, fcntl.LOCK_EX)  # let go by the system when the process ends, however it does
        ranks = said.read().splitlines()
        # A rank ends once in a job: one that has been here belongs to another start.
        fresh = not ranks or me in ranks or time.time() - os.fstat(file).st_mtime > SAID_SECONDS
        if fresh:
            speak()
        with suppress(OSError):  # a full disk
            said.seek(0)
            said.truncate()
            said.write("".join(f"{rank}\n" for rank in ([me] if fresh else [*ranks, me])))
            said.flush()
    return fresh


def private_folder() -> Path:
    """A folder that only this user can write in, without what earlier jobs left there. Raises `OSError` where there is none."""
    folder = Path(tempfile.gettempdir()) / f"megacore-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not this user's alone")
    for file in folder.iterdir():
        with suppress(FileNotFoundError):  # another rank was faster
            if time.time() - file.stat().st_mtime > LEFT_OVER_SECONDS:
                file.unlink()
    return folder


def job_name(env: Mapping[str, str]) -> str:
    """What tells this start of ranks from any other on this machine: the launcher's own name for it, or else its process."""
    if "RANK" not in env and "PMIX_NAMESPACE" in env:  # Open MPI, whose ranks may each have a shell of their own as parent
        return "mpi-" + env["PMIX_NAMESPACE"].replace("/", "_")
    if "RANK" not in env and "SLURM_STEP_ID" in env:
        return "slurm-" + "-".join(env.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
    parent = os.getppid()
    began = ""
    with suppress(OSError):  # not Linux
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    return f"process-{parent}-{began}-{env.get('MASTER_PORT', '').replace('/', '_')}-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def rank_0_waits(place: Place) -> bool:
    """Whether rank 0, on another machine, has found nothing wrong: it then listens where the ranks meet.

    Where it has found something, it has said it and ended, and so does this rank, if its launcher does not end it before.
    """
    time.sleep(GRACE_SECONDS)  # torchrun itself listens there, until its ranks have ended
    deadline = time.monotonic() + MEETING_SECONDS
    while time.monotonic() < deadline:
        try:
            socket.create_connection((place.master_address, place.master_port), timeout=1.0).close()
            return True
        except OSError:
            time.sleep(0.5)
    return False


def record(reason: str) -> None:
    """Leaves the reason for torchrun's summary, if torchrun has started this rank."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    # Whole seconds, and the earliest counts: not later than those of the ranks that torchrun ends now.
    began = str(int(time.time()) - 1)
    report = {"message": {"message": reason, "extraInfo": {"py_callstack": reason, "timestamp": began}}}
    with suppress(OSError):  # it has been said on stderr
        Path(file).write_text(json.dumps(report), encoding="utf-8")
