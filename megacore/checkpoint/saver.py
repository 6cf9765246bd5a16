"""Saves checkpoints of all ranks together, in the training loop or in a thread beside it.

Every rank writes its file and its index. When all have, rank 0 writes the manifest and renames the folder. Ranks communicate only in
the loop, when a save begins and when it is finished. What happens between needs only the shared file system, so a thread can do it.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.checkpoint.commit import clear_leftovers, commit, folder_of, partial_of, prune, wait_for_indexes
from megacore.checkpoint.disk import FULL, free_bytes, remove, size_text
from megacore.checkpoint.ranks import Ranks
from megacore.checkpoint.staging import Staging
from megacore.checkpoint.write import LocalTensor, bytes_of, places_of, write_rank
from megacore.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole and on disk."""

    path: Path
    nbytes: int  # of all tensors
    seconds: float  # from when it began until it was committed


class _Save:
    """One rank's part of one checkpoint."""

    def __init__(
        self, directory: Path, step: int, token: str, state: dict[str, Any], ranks: Ranks, prune: Callable[[Path], None], needed: int
    ) -> None:
        self.final, self.partial = folder_of(directory, step), partial_of(directory, step, token)
        self.step, self.state, self.rank, self.world, self.prune = step, state, ranks.rank, ranks.world, prune
        self.needed, self.started = needed, time.monotonic()
        self.saved: Saved | None = None
        self.error: Exception | None = None
        self.reason = ""  # the error, for people
        self.written, self.abandoned = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None

    def write(self, places: dict[str, Any], tensors: Iterator[Tensor], ready: Callable[[], None]) -> None:
        """Writes this rank's file and index when `ready` returns. Keeps the error."""
        free, own = 0, bytes_of(places)
        try:
            ready()
            if self.rank == 0:
                clear_leftovers(self.final.parent, but=self.partial)
            self.partial.mkdir(parents=True, exist_ok=True)
            free = free_bytes(self.partial)
            write_rank(self.partial, self.rank, places, tensors)
        except Exception as error:
            self._fail(error)
            if isinstance(error, OSError) and error.errno in FULL:
                sizes = (self.needed, own, free)
                self.reason += "; it needs {} in all and {} for this rank, and {} was free".format(*map(size_text, sizes))
            for file in self.partial.glob(f"rank_{self.rank:05d}.*"):  # at once: others need the room on a full disk
                file.unlink(missing_ok=True)
        self.written.set()

    def commit(self) -> None:
        """Waits on rank 0 until all ranks have written, and commits. Keeps the error."""
        try:
            if not wait_for_indexes(self.partial, self.world, self.abandoned.is_set):
                return
            commit(self.partial, self.step, self.state, self.world)
            self.saved = Saved(self.final, self.needed, time.monotonic() - self.started)
            self.prune(self.final)
        except Exception as error:
            self._fail(error)

    def run(self, places: dict[str, Any], tensors: Iterator[Tensor], ready: Callable[[], None]) -> None:
        """Does all of this rank's part, in a thread."""
        self.write(places, tensors, ready)
        if self.rank == 0 and self.error is None:
            self.commit()

    def _fail(self, error: Exception) -> None:
        what = f"{error.wrong} ({error.right})" if isinstance(error, CheckpointError) else getattr(error, "strerror", None) or error
        self.error, self.reason = error, f"rank {self.rank} of {self.world}: {what}"


class Saver:
    """Saves a run's checkpoints, one at a time. `start`, `finish` are collective.

    With `background`, `start` returns before the tensors are copied: call `hold_update` before they change.
    """

    def __init__(
        self, directory: Path, ranks: Ranks, *, keep: int, keep_every: int = 0, background: bool = False, device: torch.device | None = None
    ) -> None:
        """`keep`, `keep_every`: see `commit.prune`. `device`: where the tensors are, if they are not on the CPU."""
        self.directory, self.ranks = directory, ranks
        self.prune: Callable[[Path], None] = lambda newest: prune(directory, newest, keep, keep_every)
        self.staging = Staging(device or torch.device("cpu")) if background else None
        self.current: _Save | None = None

    def start(self, step: int, tensors: Mapping[str, LocalTensor], state: dict[str, Any]) -> None:
        """Begin the checkpoint of `step`. The one before must be finished.

        Args:
            tensors: this rank's pieces by logical name (see `shard.piece_key`). Ranks that hold copies deal them out (see `write.dealt`).
            state: JSON values (step, samples, seed, …; `model`: the config's model section). Rank 0's is written.
        """
        assert self.current is None, "finish the save before"
        places = places_of(tensors)
        needed = self.ranks.total(bytes_of(places))
        token = self.ranks.first(secrets.token_hex(4) if self.ranks.rank == 0 else "")
        save = self.current = _Save(self.directory, step, token, state, self.ranks, self.prune, needed)
        own = [tensors[key][0] for key in places]
        if self.staging is None:
            save.write(places, iter(own), ready=lambda: None)
            return
        copies = self.staging.copy(own)
        # A daemon: a run that fails does not wait for its checkpoint, which nobody will have seen.
        save.thread = threading.Thread(target=save.run, args=(places, iter(copies), self.staging.wait), name="checkpoint", daemon=True)
        save.thread.start()

    def hold_update(self) -> None:
        """Call it before each optimizer step: tensors must not change while they are copied."""
        if self.staging is not None:
            self.staging.hold_update()

    @property
    def committed(self) -> Saved | None:
        """On rank 0, the checkpoint that `start` began, as soon as it is whole and on disk. `finish` forgets it."""
        return None if self.current is None else self.current.saved

    @property
    def failed(self) -> bool:
        """Whether this rank's part of the save has failed so far. `finish` then says why, on all ranks."""
        return self.current is not None and self.current.error is not None

    def finish(self) -> Saved | None:
        """Wait until the checkpoint that `start` began is whole and on disk, and return it; None if none was begun.

        Raises:
            CheckpointError: it could not be saved. Every rank gets the reason of the first that failed. Nothing is left of it.
        """
        save, self.current = self.current, None
        if save is None:
            return None
        save.written.wait()
        self._agree(save)
        if save.thread is not None:
            save.thread.join()
        elif save.rank == 0:
            save.commit()
        self._agree(save)
        return save.saved or Saved(save.final, save.needed, time.monotonic() - save.started)

    def _agree(self, save: _Save) -> None:
        """Raise on every rank if any has failed."""
        reason = self.ranks.first(save.reason)
        if not reason:
            return
        save.abandoned.set()
        if save.thread is not None:
            save.thread.join()
        if save.rank == 0:
            try:
                remove(save.partial)
            except OSError as error:
                logger.warning("could not delete %s, of a save that failed: %s", save.partial, error)
        right = "the checkpoints before it are whole; make room, or see to its folder"
        raise CheckpointError(str(save.final), f"was not saved: {reason}", right) from save.error
