"""Lets only one run at a time write in a folder: two would delete each other's checkpoints."""

import errno
import fcntl
import logging
import os
import socket
import time
from pathlib import Path
from typing import IO

from megacore.checkpoint import Ranks
from megacore.distributed.collectives import broadcast_text
from megacore.distributed.mesh import Mesh
from megacore.errors import ConfigError
from megacore.files import read_text

logger = logging.getLogger(__name__)

# from file systems that are mounted without locks
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
LOCK = "lock"
SHARING_PATIENCE = 5.0  # seconds for another machine to see what rank 0 has written
PATIENCE = 5.0  # seconds for a run that was just killed to release it


class FolderLock:
    """A lock on a run's folder.

    The system releases it when the process ends, in whatever way, so no lock is left behind.
    """

    def __init__(self, folder: Path, patience: float = PATIENCE) -> None:
        self.folder, self.patience = folder, patience
        self.file: IO[str] | None = None

    def take(self) -> None:
        """Takes the lock once the folder exists.

        Raises `ConfigError` if another run has it, or if the folder cannot be written.
        """
        try:
            self._take()
        except OSError as error:
            right = "a folder with room, that can be written"
            raise ConfigError("log.dir", f"cannot write in {self.folder}: {error.strerror}", right) from None

    def _take(self) -> None:
        if self.file is not None or not self.folder.is_dir() or not os.access(self.folder, os.W_OK):
            return
        file = (self.folder / LOCK).open("a+", encoding="utf-8")
        deadline = time.monotonic() + self.patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in WITHOUT_LOCKS:
                    logger.warning("%s has no locks: a second run in it would not be noticed", self.folder)
                    break
                if not isinstance(error, BlockingIOError):
                    raise
                if time.monotonic() > deadline:
                    file.seek(0)
                    wrong = f"{self.folder} belongs to a run that is still running ({file.read().strip()})"
                    file.close()
                    raise ConfigError("log.dir", wrong, "its end, or another log.dir") from None
                time.sleep(0.1)
        file.truncate(0)
        file.write(
            f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
        )
        file.flush()
        # a network file system would keep it on this machine: `apart_from_owner` reads it on the others
        os.fsync(file.fileno())
        self.file = file


def apart_from_owner(folder: Path, mesh: Mesh, patience: float = SHARING_PATIENCE) -> str:
    """What is wrong if the machines of a job do not share `folder`, which rank 0 has locked; empty if they
    do. Collective: each machine looks for what rank 0 wrote into the lock.
    """
    place, file = mesh.place, folder / LOCK
    if place.local_world_size >= place.world_size:
        return ""
    owner = broadcast_text(read_owner(file) if place.rank == 0 else "", mesh.world, mesh.device)
    apart, deadline = "", time.monotonic() + patience
    if owner and place.local_rank == 0:
        while read_owner(file) != owner and not apart:
            time.sleep(0.2)  # a network file system may show a new file late
            if time.monotonic() > deadline:
                apart = (
                    f"{folder.absolute()} on {socket.gethostname()} is not the folder that rank 0's "
                    "machine has"
                )
    return Ranks(mesh).first(apart)


def read_owner(file: Path) -> str:
    """What a lock says of its owner; empty if there is none."""
    try:
        return read_text(file, most=1000).strip()
    except (OSError, UnicodeDecodeError):
        return ""
