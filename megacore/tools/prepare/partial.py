"""What a preparation has done so far, in a hidden folder beside its output: started again
after a kill, it goes on from there.
"""

import fcntl
import json
import shutil
from concurrent.futures.process import BrokenProcessPool
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from megacore.errors import ConfigError
from megacore.files import read_text, write_whole
from megacore.tools.prepare.split import Split

COMMIT_BYTES = 16 << 20  # of text, after which what is done is put on the disk
NOTHING: dict[str, Any] = {"tokens": 0, "sequences": 0, "boundaries": 1, "text_bytes": 0, "notes": {}}
STATE, LOCK = "state.json", "lock"


def folder_of(prefix: str) -> Path:
    """Where what is done lies: a hidden folder, so that no input that names a folder has it."""
    return Path(prefix).with_name(f".{Path(prefix).name}.partial")


def kept(prefix: str) -> str:
    """What an error's advice ends with if something is done."""
    folder = folder_of(prefix)
    return (
        f"; the same command then resumes from what is done, in {folder}"
        if (folder / STATE).is_file()
        else ""
    )


class Partial:
    """The folder, in a `with` statement.

    It is empty unless an earlier start with the same `key` was killed; `tasks` were done then.

    The folder is removed at the end, and by an error that the same command would meet again. After a kill, a
    full disk or a lost process it stays, if something is done.

    Raises:
        ConfigError: another process prepares the same output.
    """

    def __init__(self, prefix: str, key: Any, keeps: bool = True) -> None:
        self.prefix, self.folder, self.keeps = prefix, folder_of(prefix), keeps
        self.key = sha256(json.dumps(key, default=str).encode()).hexdigest()
        self.tasks = 0
        self._lock: IO[str] | None = None
        self._states: list[dict[str, Any]] = []

    def __enter__(self) -> "Partial":
        self.folder.mkdir(exist_ok=True)
        self._lock = (self.folder / LOCK).open("w", encoding="utf-8")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                "--output", f"another process prepares {self.prefix}", "its end, or another prefix"
            ) from None
        except OSError:  # a file system without locks
            pass
        try:
            state = json.loads(read_text(self.folder / STATE))
        except (OSError, ValueError):
            state = {}
        if self.keeps and state.get("key") == self.key:
            self.tasks, self._states = state["tasks"], state["splits"]
        else:
            self._empty()
        return self

    def _empty(self) -> None:
        """Removes what an earlier preparation has left."""
        self.tasks, self._states = 0, []
        for path in self.folder.iterdir():
            if path.name != LOCK:
                path.unlink()

    def resume(self, splits: list[Split]) -> None:
        """Goes on with the splits from where they were, or from nothing if something is missing."""
        try:
            for split, state in zip(splits, self._states or [NOTHING] * len(splits), strict=True):
                split.resume(state)
        except OSError:
            if not self.tasks:
                raise
            self._states, self.tasks = [], 0
            self.resume(splits)

    def commit(self, tasks: int, splits: list[Split]) -> None:
        """Puts what is done after so many tasks on the disk."""
        state = {"key": self.key, "tasks": tasks, "splits": [split.commit() for split in splits]}
        write_whole(self.folder / STATE, json.dumps(state))
        self.tasks = tasks

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        killed = isinstance(error, OSError | BrokenProcessPool | KeyboardInterrupt | SystemExit)
        if not (killed and self.keeps and self.tasks):
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
