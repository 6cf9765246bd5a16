"""Makes a checkpoint of what all ranks wrote: merges their indexes into a manifest, renames the folder, deletes old checkpoints.

Ranks write in a folder `step_00000100.<token>.partial`, which nobody reads. Every save has a new token, so that a late rank of a
killed job cannot write into the folder of the job that followed it.
"""

import logging
import os
import shlex
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

import megacore
from megacore.checkpoint.disk import remove, size_text, sync_folder, write_file
from megacore.checkpoint.find import checkpoints_in, fault_of
from megacore.checkpoint.index import index_file, merged
from megacore.checkpoint.manifest import FORMAT_VERSION, MANIFEST, Manifest, read_manifest
from megacore.checkpoint.write import Layout, pack, write_rank
from megacore.distributed.shard import Shard

logger = logging.getLogger(__name__)


def folder_of(directory: Path, step: int) -> Path:
    """The folder of the checkpoint of `step`, once it is whole."""
    return directory / f"step_{step:08d}"


def partial_of(directory: Path, step: int, token: str) -> Path:
    """The folder in which ranks write it."""
    return directory / f"step_{step:08d}.{token}.partial"


def clear_leftovers(directory: Path, but: Path) -> None:
    """Delete what interrupted saves left, except the folder `but` of this save."""
    for leftover in directory.glob("step_*.partial"):
        if leftover != but:
            try:
                remove(leftover)
            except OSError as error:  # a late rank on another host may still be writing there: the next save tries again
                logger.warning("could not delete %s: %s", leftover, error)


def wait_for_indexes(folder: Path, world: int, abandoned: Callable[[], bool]) -> bool:
    """Wait until every rank has written its index; return False if the save is `abandoned` before that.
    Only asks the file system: a collective here could come between those of the training thread."""
    wanted = {index_file(folder, rank).name for rank in range(world)}
    pause = 0.005
    while True:
        wanted -= set(os.listdir(folder))
        if not wanted:
            return True
        if abandoned():
            return False
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


def commit(folder: Path, step: int, state: dict[str, Any], world: int) -> Path:
    """Merge the indexes of all ranks in `folder` into the manifest, check it, rename the folder, and return its final path.

    An earlier checkpoint of the same step is renamed aside first. If the process stops between the two renames, it is found there.

    Raises:
        CheckpointError: the slices do not tile their tensors; nothing is committed.
        OSError: the disk refused.
    """
    manifest = Manifest(FORMAT_VERSION, megacore.__version__, step, state, *merged(folder, world))
    write_file(folder / MANIFEST, [manifest.sealed()])
    read_manifest(folder)
    for rank in range(world):
        index_file(folder, rank).unlink()
    sync_folder(folder)
    final = folder_of(folder.parent, step)
    if final.exists():
        old = final.with_suffix(".old")
        remove(old)
        final.rename(old)
    folder.rename(final)
    for above in (final.parent, final.parent.parent):  # the first save has made the checkpoints folder too
        sync_folder(above)
    return final


def prune(directory: Path, newest: Path, keep: int, keep_every: int) -> None:
    """Delete checkpoints older than the `keep` newest whole ones, except those of steps that are multiples of `keep_every`.

    `newest` is always kept. It has just been written and read back, so at least one whole checkpoint stays. Only whole ones count
    towards `keep`, so a damaged one never takes the room of one that could be resumed from.
    """
    try:
        _prune(directory, newest, keep, keep_every)
    except OSError as error:  # the new checkpoint is safe: old ones that stay are no reason to end the run
        logger.warning("could not look for old checkpoints in %s: %s", directory, error)


def _prune(directory: Path, newest: Path, keep: int, keep_every: int) -> None:
    whole = 1
    for path in checkpoints_in(directory):
        if path == newest:
            continue
        replaced = path.suffix == ".old" and path.with_suffix("").exists()
        step = int(path.stem.removeprefix("step_"))
        if replaced or (whole >= keep and not (keep_every and step % keep_every == 0)):
            _delete(path)
        elif whole < keep:
            whole += fault_of(path, deep=False) is None


def _delete(path: Path) -> None:
    try:
        # Rename it first: an interrupted deletion must not leave a damaged checkpoint.
        doomed = path.with_name(f"{path.name}.deleted.partial")
        path.rename(doomed)
        remove(doomed)
    except OSError as error:  # the new checkpoint is safe: an old one that stays is no reason to end the run
        logger.warning("could not delete the old checkpoint %s: %s", path, error)


def set_aside(directory: Path, above: int) -> None:
    """Rename checkpoints of steps beyond `above`. A run that starts from `above` reaches these steps again, and would take the old
    checkpoints for its newest. They can still be given by path, and stay until somebody deletes them."""
    moved = []
    for path in checkpoints_in(directory):
        if int(path.stem.removeprefix("step_")) > above:
            aside = next(name for i in count(1) if not (name := path.with_name(f"{path.name}.aside{i}")).exists())
            path.rename(aside)
            moved.append(aside)
    if moved:
        of_size = size_text(sum(file.stat().st_size for path in moved for file in path.glob("*")))
        logger.warning(
            "checkpoints of a run before this one were set aside, %s: %s. They stay until you delete them: rm -r %s",
            of_size,
            ", ".join(path.name for path in reversed(moved)),
            " ".join(shlex.quote(str(path)) for path in reversed(moved)),
        )


def save_stream(directory: Path, step: int, layout: Layout, tensors: Iterator[Tensor], state: dict[str, Any], file_bytes: int) -> Path:
    """Write the checkpoint of `step` from one process that never holds more than one tensor, and return its folder.

    Args:
        directory: the run's checkpoints folder.
        layout: whole logical tensors.
        tensors: these tensors in the order of `layout`, each made when its turn comes.
        state: as for `Saver.start`.
        file_bytes: the largest size of a file; a tensor that is larger has a file of its own.
    """
    partial = partial_of(directory, step, "stream")
    partial.mkdir(parents=True)
    files = pack(layout, file_bytes)
    for part, names in enumerate(files):  # each file counts as the work of one rank
        write_rank(partial, part, {name: (layout[name][0], Shard(layout[name][1])) for name in names}, tensors)
    return commit(partial, step, state, len(files))
