"""Makes one rank of a job say why it ends, in one line, however many find the mistake and however
fast the launcher ends the others.
"""

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

from megacore.distributed.processes import stat_fields
from megacore.distributed.rank_info import RankInfo
from megacore.errors import UserError

GRACE_SECONDS = 5.0  # for a launcher to end the other ranks of a job in which one has ended
MEETING_SECONDS = 60.0  # for rank 0 of another machine to listen where the ranks meet
START_SECONDS = 5.0  # within which a launcher starts the ranks of a machine
SAID_SECONDS = 60.0  # within which the ranks of one job find the same mistake
LEFT_OVER_SECONDS = 86400.0
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def say_once(error: UserError, place: RankInfo) -> None:
    """Prints a mistake on stderr, unless another rank of the job has. Returns when it is printed.

    On a machine, the first rank that finds the mistake speaks. On other machines than rank 0's, it speaks
    only if rank 0 has found nothing wrong, or cannot be asked. Its line then names the machine, as it does
    for mistakes that may concern only one machine.
    """
    # On another machine than rank 0; or ranks were dealt to machines in turn, and rank 0, which may be here,
    # must not wait for this one.
    beside = place.rank != place.local_rank
    named = beside or (error.of_this_machine and place.local_world_size < place.world_size)
    line = f"rank {place.rank} on {socket.gethostname()}: {error}" if named else str(error)

    def speak() -> None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
        record(line)

    def speak_for_machine() -> None:
        if not rank_0_has_spoken(place):
            first_of_job(speak)

    if place.world_size == 1 and not any(name in os.environ for name in RANKS):
        speak()
    elif not (first_of_job(speak_for_machine, "-beside") if beside else first_of_job(speak)):
        # the launcher reports the rank that ended first, which should be the one that spoke
        time.sleep(GRACE_SECONDS)


def first_of_job(speak: Callable[[], None], among: str = "") -> bool:
    """Calls `speak` if no rank of this job has done so on this machine; returns whether it did.

    While another rank speaks it waits, and speaks itself if that rank is ended meanwhile. `among`: of some
    ranks, which go by a name of their own.
    """
    me = "/".join(os.environ.get(name, "") for name in RANKS)
    try:
        folder = private_folder()
        file = os.open(
            folder / f"{job_name(os.environ)}{among}",
            os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
        )
    except OSError:  # better twice than never
        speak()
        return True
    with open(file, "r+", encoding="utf-8") as said:
        fcntl.flock(said, fcntl.LOCK_EX)  # the system unlocks it when the process ends, in whatever way
        ranks = said.read().splitlines()
        # A rank ends once in a job, and begins with the others: else the list is of an earlier start.
        written = os.fstat(file).st_mtime
        another = me in ranks or own_start() - written > START_SECONDS or time.time() - written > SAID_SECONDS
        fresh = not ranks or another
        if fresh:
            speak()
        with suppress(OSError):  # a full disk
            said.seek(0)
            said.truncate()
            said.write("".join(f"{rank}\n" for rank in ([me] if fresh else [*ranks, me])))
            said.flush()
    return fresh


def own_start() -> float:
    """When this process began, in seconds since the epoch; 0 where the system does not say."""
    with suppress(OSError, AttributeError):  # not Linux
        return (
            time.time()
            - time.clock_gettime(time.CLOCK_BOOTTIME)
            + int(stat_fields(os.getpid())[19]) / os.sysconf("SC_CLK_TCK")
        )
    return 0.0


def private_folder() -> Path:
    """A folder that only this user can write, without files of earlier jobs.

    Raises `OSError` if there is none.
    """
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
    """A name for this start of ranks, unique on this machine: the launcher's own name, or its process."""
    # Open MPI: each rank's parent may be a shell of its own
    if "RANK" not in env and "PMIX_NAMESPACE" in env:
        return "mpi-" + env["PMIX_NAMESPACE"].replace("/", "_")
    if "RANK" not in env and "SLURM_STEP_ID" in env:
        return "slurm-" + "-".join(
            env.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT")
        )
    parent = os.getppid()
    began = ""
    with suppress(OSError):  # not Linux
        began = stat_fields(parent)[19]
    return (
        f"process-{parent}-{began}-{env.get('MASTER_PORT', '').replace('/', '_')}"
        f"-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    )


def rank_0_has_spoken(place: RankInfo) -> bool:
    """Whether rank 0 has found a mistake, so that it has said it and ended: it does
    not come to where the ranks meet.

    This rank then ends too, or its launcher ends it before. Where rank 0's machine cannot be reached, nobody
    knows: rather twice than never.
    """
    time.sleep(GRACE_SECONDS)  # torchrun itself listens there, until its ranks have ended
    deadline, refused = time.monotonic() + MEETING_SECONDS, False
    while True:
        try:
            socket.create_connection((place.master_address, place.master_port), timeout=1.0).close()
            return False
        except OSError as error:
            # the machine answers, and nobody listens there
            refused |= isinstance(error, ConnectionRefusedError)
        if time.monotonic() > deadline:
            return refused
        time.sleep(0.5)


def record(reason: str) -> None:
    """Writes the reason to torchrun's error file, if torchrun has started this rank."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    # torchrun takes the earliest, in whole seconds: this must not be later than those of the ranks that it
    # ends now.
    began = str(int(time.time()) - 1)
    report = {"message": {"message": reason, "extraInfo": {"py_callstack": reason, "timestamp": began}}}
    with suppress(OSError):  # it has been said on stderr
        Path(file).write_text(json.dumps(report), encoding="utf-8")
