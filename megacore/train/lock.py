"""Lets only one run at a time write in a folder: two would delete each other's checkpoints."""

import errno
import fcntl
import logging
import os
import socket
import time
from pathlib import Path
from typing import IO

from megacore.errors import ConfigError

logger = logging.getLogger(__name__)

WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)  # from file systems that are mounted without locks
PATIENCE = 5.0  # seconds for a run that was just killed to release it


class FolderLock:
    """A lock on a run's folder. The system releases it when the process ends, in whatever way, so no lock is left behind."""

    def __init__(self, folder: Path, patience: float = PATIENCE) -> None:
        self.folder, self.patience = folder, patience
        self.file: IO[str] | None = None

    def take(self) -> None:
        """Takes the lock once the folder exists. Raises `ConfigError` if another run has it, or if the folder cannot be written."""
        try:
            self._take()
        except OSError as error:
            right = "a folder with room, that can be written"
            raise ConfigError("log.dir", f"cannot write in {self.folder}: {error.strerror}", right) from None

    def _take(self) -> None:
        if self.file is not None or not self.folder.is_dir() or not os.access(self.folder, os.W_OK):
            return
        file = (self.folder / "lock").open("a+", encoding="utf-8")
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
                    wrong = f"{self.folder} belongs to a run that is going on ({file.read().strip()})"
                    file.close()
                    raise ConfigError("log.dir", wrong, "its end, or another log.dir") from None
                time.sleep(0.1)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self.file = file
