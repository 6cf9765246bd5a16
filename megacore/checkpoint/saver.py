"""Saves checkpoints of all ranks together, in the training loop or in a thread beside it.

Every rank writes its file and its index. When all have, rank 0 writes the manifest and renames the folder.
Ranks communicate only in the loop, when a save begins and when it is finished. What happens between needs
only the shared file system, so a thread can do it.
"""

import json
import logging
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.checkpoint.disk import FULL, free_bytes, remove, size_text
from megacore.checkpoint.folder import clear_leftovers, commit, folder_of, partial_of, wait_for_indexes
from megacore.checkpoint.write import LocalTensor, bytes_of, places_of, write_rank
from megacore.distributed.collectives import all_reduce, broadcast, broadcast_text
from megacore.distributed.mesh import Mesh
from megacore.distributed.rendezvous import use_device
from megacore.errors import CheckpointError, shown

logger = logging.getLogger(__name__)

TEXT_BYTES = 1 << 14


class Ranks:
    """What the ranks of a mesh, which save or read a checkpoint together, tell one another.

    Every method is collective, and only the main thread calls it: collectives of two threads would mix. Any
    other object with its methods, `rank` and `world` will do.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.rank, self.world = mesh, mesh.place.rank, mesh.place.world_size

    def first(self, text: str) -> str:
        """On every rank, the text of the lowest rank that has one; "" if all are empty.

        It takes one small reduction, and a broadcast where there is a text.
        """
        speaker = torch.tensor(self.rank if text else self.world, device=self.mesh.device)
        source = int(all_reduce(speaker, self.mesh.world, dist.ReduceOp.MIN))
        if source == self.world:
            return ""
        fits = text.encode(errors="backslashreplace")[:TEXT_BYTES].decode(errors="ignore")
        return broadcast_text(fits, self.mesh.world, self.mesh.device, TEXT_BYTES, source)

    def total(self, number: int) -> int:
        """The sum of the ranks' numbers."""
        return int(all_reduce(torch.tensor(number, device=self.mesh.device), self.mesh.world))

    def share(self, content: bytes) -> bytes:
        """Rank 0's `content` on every rank, of any size.

        It takes two broadcasts, of the size and of the bytes.
        """
        size = int(broadcast(torch.tensor(len(content), device=self.mesh.device), self.mesh.world))
        buffer = (
            torch.frombuffer(bytearray(content), dtype=torch.uint8)
            if self.rank == 0
            else torch.empty(size, dtype=torch.uint8)
        )
        return broadcast(buffer.to(self.mesh.device), self.mesh.world).cpu().numpy().tobytes()


class Staging:
    """Copies tensors into one buffer of host memory, where they wait to be written while training goes on.

    The first save makes it, and later saves use it again.

    Copying runs beside the next forward and backward; only the next update of the tensors must wait
    (`hold_update`). On a GPU the buffer is pinned and a stream of its own copies. On a CPU the thread that
    calls `wait` copies.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.copied = torch.cuda.Event() if device.type == "cuda" else None
        self.sources: Sequence[Tensor] = ()  # kept until they are copied: some engines hand out copies
        self.copies: list[Tensor] = []
        self.made = threading.Event()  # set when the host has made the copies
        self.made.set()

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns tensors in host memory that hold the copies once `wait` returns.

        They overwrite the copies before. Give the widest dtype first, so that every tensor is aligned.
        """
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if self.buffer.nbytes < nbytes:
            self.buffer = torch.empty(nbytes, dtype=torch.uint8)
            if self.device.type == "cuda":
                pin(self.buffer)
        self.copies, start = [], 0
        for tensor in tensors:
            part = self.buffer[start : start + tensor.nbytes]
            self.copies.append(part.view(tensor.dtype).view(tensor.shape))
            start += tensor.nbytes
        self.sources = tensors
        if self.stream is None:
            self.made.clear()
            return self.copies
        assert self.copied is not None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            self._copy()
            self.copied.record()
        return self.copies

    @torch.no_grad()
    def _copy(self) -> None:
        for copy, tensor in zip(self.copies, self.sources, strict=True):
            copy.copy_(tensor, non_blocking=True)

    def hold_update(self) -> None:
        """Call it before anything writes into the tensors.

        On a GPU the device waits until the copies are made, and the host does not; on a CPU the host waits.
        """
        if self.copied is None:
            self.made.wait()
        elif self.sources:
            torch.cuda.current_stream(self.device).wait_event(self.copied)

    def wait(self) -> None:
        """Returns when the copies are made. Call it once after every `copy`, from any thread."""
        try:
            if self.copied is None:
                self._copy()
            else:
                use_device(self.device)  # a thread that has not said so opens the first that it sees
                self.copied.synchronize()
        finally:
            self.sources = ()
            self.made.set()


def pin(buffer: Tensor) -> None:
    """Page-locks memory where it is.

    PyTorch rounds its own pinned tensors up to a power of two, which wastes up to half.
    """
    cuda = torch.cuda.cudart()
    portable = 1
    torch.cuda.check_error(cuda.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, portable))
    weakref.finalize(buffer, cuda.cudaHostUnregister, buffer.data_ptr())


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole and on disk."""

    path: Path
    nbytes: int  # of all tensors
    seconds: float  # from when it began until it was committed


class _Save:
    """One rank's part of one checkpoint."""

    def __init__(
        self,
        directory: Path,
        step: int,
        token: str,
        state: dict[str, Any],
        ranks: Ranks,
        clean: Callable[[Path], None],
        needed: int,
    ) -> None:
        self.final, self.partial = folder_of(directory, step), partial_of(directory, step, token)
        self.step, self.state, self.rank, self.world, self.clean = step, state, ranks.rank, ranks.world, clean
        self.needed, self.started = needed, time.monotonic()
        self.saved: Saved | None = None
        self.error: Exception | None = None
        self.reason = ""  # the error, for people, and what would mend it
        self.remedy = ""
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
                self.reason += "; it needs {} in all and {} for this rank, and {} was free".format(
                    *map(size_text, sizes)
                )
            # at once: others need the room on a full disk
            for file in self.partial.glob(f"rank_{self.rank:05d}.*"):
                file.unlink(missing_ok=True)
        self.written.set()

    def commit(self) -> None:
        """Waits on rank 0 until all ranks have written, and commits. Keeps the error."""
        try:
            if not wait_for_indexes(self.partial, self.world, self.abandoned.is_set):
                return
            commit(self.partial, self.step, self.state, self.world)
            self.saved = Saved(self.final, self.needed, time.monotonic() - self.started)
            self.clean(self.final)
        except Exception as error:
            self._fail(error)

    def run(self, places: dict[str, Any], tensors: Iterator[Tensor], ready: Callable[[], None]) -> None:
        """Does all of this rank's part, in a thread."""
        self.write(places, tensors, ready)
        if self.rank == 0 and self.error is None:
            self.commit()

    def _fail(self, error: Exception) -> None:
        if isinstance(error, CheckpointError):  # ranks do not agree in what they save
            what, self.remedy = error.wrong, error.right
        elif isinstance(error, OSError):
            what = error.strerror or str(error)
            self.remedy = "make room" if error.errno in FULL else "see to its folder"
        else:
            what = f"{type(error).__name__}: {error}"
            self.remedy = "a mistake of the program: neither the disk nor its folder has caused it"
        self.error, self.reason = error, shown(f"rank {self.rank} of {self.world}: {what}")


class Saver:
    """Saves a run's checkpoints, one at a time. `start`, `finish` are collective.

    With `background`, `start` returns before the tensors are copied: call `hold_update` before they change.
    """

    def __init__(
        self,
        directory: Path,
        ranks: Ranks,
        *,
        clean: Callable[[Path], None] = lambda newest: None,
        background: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """`clean` is called on rank 0 with each checkpoint that is whole, and may delete others.

        `device`: where the tensors are, if they are not on the CPU.
        """
        self.directory, self.ranks, self.clean = directory, ranks, clean
        self.staging = Staging(device or torch.device("cpu")) if background else None
        self.current: _Save | None = None

    def start(self, step: int, tensors: Mapping[str, LocalTensor], state: dict[str, Any]) -> None:
        """Begin the checkpoint of `step`. The one before must be finished.

        Args:
            tensors: this rank's pieces by logical name (see `shard.piece_key`). Ranks that hold copies deal
                them out (see `write.dealt`).
            state: JSON values (step, samples, seed, …; `model`: the config's model section). Rank 0's is
                written.
        """
        assert self.current is None, "finish the save before"
        places = places_of(tensors)
        needed = self.ranks.total(bytes_of(places))
        token = self.ranks.first(secrets.token_hex(4) if self.ranks.rank == 0 else "")
        save = self.current = _Save(self.directory, step, token, state, self.ranks, self.clean, needed)
        own = [tensors[key][0] for key in places]
        if self.staging is None:
            save.write(places, iter(own), ready=lambda: None)
            return
        copies = self.staging.copy(own)
        # A daemon: a run that fails does not wait for its checkpoint, which nobody will have seen.
        save.thread = threading.Thread(
            target=save.run, args=(places, iter(copies), self.staging.wait), name="checkpoint", daemon=True
        )
        save.thread.start()

    def hold_update(self) -> None:
        """Call it before each optimizer step: tensors must not change while they are copied."""
        if self.staging is not None:
            self.staging.hold_update()

    @property
    def committed(self) -> Saved | None:
        """On rank 0, the checkpoint that `start` began, as soon as it is whole and on disk.

        `finish` forgets it.
        """
        return None if self.current is None else self.current.saved

    @property
    def failed(self) -> bool:
        """Whether this rank's part of the save has failed so far. `finish` then says why, on all ranks."""
        return self.current is not None and self.current.error is not None

    def finish(self) -> Saved | None:
        """Wait until the checkpoint that `start` began is whole and on disk, and
        return it; None if none was begun.

        Raises:
            CheckpointError: it could not be saved. Every rank gets the reason of the first that failed.
                Nothing is left of it.
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
        failure = self.ranks.first(
            json.dumps([save.reason, save.remedy], ensure_ascii=False) if save.reason else ""
        )
        if not failure:
            return
        reason, remedy = json.loads(failure)
        save.abandoned.set()
        if save.thread is not None:
            save.thread.join()
        if save.rank == 0:
            try:
                remove(save.partial)
            except OSError as error:
                logger.warning("could not delete %s, of a save that failed: %s", save.partial, error)
        right = f"{remedy}; the checkpoints before it are whole"
        raise CheckpointError(str(save.final), f"was not saved: {reason}", right) from save.error
