"""A second copy of a run's checkpoints in another place (`checkpoint.mirror`), made beside training,
and read where the first is gone.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from secrets import token_hex
from threading import Event
from types import TracebackType
from typing import Self

from megacore.checkpoint.disk import BLOCK_BYTES, remove, sync_folder, write_file
from megacore.checkpoint.folder import clear_leftovers, folder_of, opened, partial_of, step_of
from megacore.config import Config
from megacore.config.schema import resolved
from megacore.distributed.rank_info import RankInfo
from megacore.errors import CheckpointError, ConfigError
from megacore.files import check_folder, read_text, write_whole
from megacore.tools.monitoring.best import FOLDER
from megacore.tools.retention import prune, set_aside
from megacore.train.callbacks import Callback

FILES = 4  # copied at a time
OWNER = "copies_of"  # a file beside the copies, which names the run's folder


class Mirror(Callback):
    """Copies checkpoints on rank 0; on other ranks every method does nothing.

    On leaving it as a context, the newest checkpoint has its copy.

    A copy gets its name only when its contents were read back and compared with the manifest's digests, as a
    save's are. A copy that fails
    is named, and training goes on: the next save's copy tries again. If saves come faster than copies, the
    newest one counts.
    """

    def __init__(self, config: Config, place: RankInfo) -> None:
        """Before anybody looks for a checkpoint.

        Raises `ConfigError` if the place cannot be written, or is another run's.
        """
        self.options, self.folder = config.checkpoint, Path(config.checkpoint.mirror or ".")
        self.active = config.checkpoint.mirror is not None and place.rank == 0
        self.thread = ThreadPoolExecutor(1, "mirror")
        self.newest: Path | None = None
        self.copies = list[Future[None]]()
        self.stopped = Event()  # the run has failed, and waits for no copy
        if self.active:
            own = self.run = Path(resolved(config.log.dir)).resolve()
            if self.folder.resolve() in (own, own / "checkpoints", own / FOLDER):
                raise ConfigError(
                    "checkpoint.mirror",
                    f"{self.folder} has the checkpoints themselves",
                    "a folder in another place",
                )
            check_folder("checkpoint.mirror", self.folder)
            owner = self.folder / OWNER
            if owner.exists() and (other := read_text(owner).strip()) != str(own):
                wrong = f"{self.folder} has the copies of {other}"
                raise ConfigError(
                    "checkpoint.mirror", wrong, f"a folder of its own; if that run has moved here: rm {owner}"
                )

    def begin(self, step: int, latest: Path | None) -> None:
        """Copies the checkpoint that the run goes on from, if the mirror has none of its `step`.

        Sets those beyond it aside where the run was told what to resume, as the run's own.
        """
        if not self.active:
            return
        write_whole(self.folder / OWNER, f"{self.run}\n")
        if self.options.resume != "auto":
            set_aside(self.folder, step)
        if latest is not None and latest.parent.resolve() == self.folder.resolve():
            print(f"WARNING: log.dir has no whole checkpoint as new as the second copy {latest}", flush=True)
        elif latest is not None and not folder_of(self.folder, step).exists():
            self.on_checkpoint(latest)

    def on_checkpoint(self, path: Path) -> None:
        """Begin to copy a checkpoint that was just saved."""
        if self.active:
            self.newest = path
            self.copies.append(self.thread.submit(self._copy, path))

    def _copy(self, checkpoint: Path) -> None:
        step = step_of(checkpoint)
        every = self.options.keep_every
        if checkpoint != self.newest and not (every and step % every == 0):
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = partial_of(self.folder, step, token_hex(8))
            clear_leftovers(self.folder, partial)
            copied(checkpoint, partial, self.stopped)
            final = folder_of(self.folder, step)
            if final.exists():
                remove(final)
            partial.rename(final)
            sync_folder(self.folder)
            prune(self.folder, final, self.options.keep, every)
        except (OSError, CheckpointError) as error:
            if not checkpoint.exists():
                return  # it was deleted meanwhile, behind a newer one
            print(
                f"WARNING: {checkpoint.name} has no second copy in {self.folder} ({error}); training "
                "continues",
                flush=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.stopped.set()
        self.thread.shutdown(wait=kind is None, cancel_futures=kind is not None)


def copied(checkpoint: Path, folder: Path, stopped: Event) -> None:
    """Copies a checkpoint into a new folder, and compares what is there with the digests.

    Raises `OSError` or `CheckpointError`; `OSError` too if it is `stopped`.
    """
    folder.mkdir()
    with ThreadPoolExecutor(FILES) as threads:
        list(
            threads.map(
                lambda file: write_file(folder / file.name, blocks(file, stopped)),
                sorted(checkpoint.iterdir()),
            )
        )
    sync_folder(folder)
    opened(folder, deep=True)


def blocks(file: Path, stopped: Event) -> Iterator[bytes]:
    """A file's content, piece by piece, until it is `stopped`."""
    with file.open("rb") as source:
        while block := source.read(BLOCK_BYTES):
            if stopped.is_set():
                raise OSError("the run has failed")
            yield block
