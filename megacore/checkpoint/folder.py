"""A run's folder of checkpoints: makes one of what all ranks wrote, and finds the one that a path means.

Ranks write in a folder `step_00000100.<token>.partial`, which nobody reads. Every save has a new token, so
that a late rank of a killed job cannot write into the folder of the job that followed it. No file points to
the newest checkpoint, because it could lag behind.
"""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megacore
from megacore.checkpoint.disk import remove, sync_folder, write_file
from megacore.checkpoint.manifest import MANIFEST, STEP_FOLDER, Manifest, read_manifest
from megacore.checkpoint.read import Reader
from megacore.checkpoint.write import index_file, merged
from megacore.errors import CheckpointError

logger = logging.getLogger(__name__)


def folder_of(directory: Path, step: int) -> Path:
    """The folder of the checkpoint of `step`, once it is whole."""
    return directory / f"step_{step:08d}"


def partial_of(directory: Path, step: int, token: str) -> Path:
    """The folder in which ranks write it."""
    return directory / f"step_{step:08d}.{token}.partial"


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's folder is named by."""
    return int(checkpoint.stem.removeprefix("step_"))


def clear_leftovers(directory: Path, but: Path) -> None:
    """Delete what interrupted saves left, except the folder `but` of this save."""
    for leftover in directory.glob("step_*.partial"):
        if leftover != but:
            try:
                remove(leftover)
            except OSError as error:
                # a late rank on another host may still be writing there: the next save tries again
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
    """Merge the indexes of all ranks in `folder` into the manifest, check it, rename the
    folder, and return its final path.

    An earlier checkpoint of the same step is renamed aside first. If the process stops between the two
    renames, it is found there.

    Raises:
        CheckpointError: the slices do not tile their tensors; nothing is committed.
        OSError: the disk refused.
    """
    manifest = Manifest(megacore.__version__, step, state, *merged(folder, world))
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


def checkpoints_in(path: Path) -> list[Path]:
    """The step folders that `path` means, newest first, whole or not.

    `path` is a run's log.dir, its checkpoints folder, or a step folder; any other path gives an empty list.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        if (path / MANIFEST).exists() or STEP_FOLDER.fullmatch(path.name):
            return [path]
        directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        if not directory.is_dir():
            return []
        steps = [
            (match, child) for child in directory.iterdir() if (match := STEP_FOLDER.fullmatch(child.name))
        ]
    except OSError as error:  # no permission, or a name that is too long
        raise CheckpointError(
            str(path), f"cannot be read: {error.strerror}", "a folder that this user may read"
        ) from None
    return [
        child
        for _, child in sorted(steps, key=lambda step: (int(step[0][1]), step[0][2] is None), reverse=True)
    ]


def opened(path: Path, *, headers: bool = True, deep: bool = False) -> Reader:
    """The checkpoint in folder `path`, once its manifest and the sizes of its files are checked, with
    `headers` the files' headers, and if `deep` their tensors.

    Raises:
        CheckpointError: what is wrong with it.
    """
    reader = Reader(path)
    if headers:
        reader.verify_headers()
    if deep:
        reader.verify()
    return reader


def warn_of_damage(error: CheckpointError, instead: Path) -> None:
    """Warns in a frame that a checkpoint was passed over, so that nobody misses it among other lines."""
    lines = (
        "A CHECKPOINT IS DAMAGED AND WAS SKIPPED",
        str(error),
        f"using {instead.name} of {instead.parent}",
    )
    frame = "!" * 100
    logger.warning("%s\n%s\n%s", frame, "\n".join(f"!! {line}" for line in lines), frame)


def newest_whole(
    candidates: list[Path], *, headers: bool = True, deep: bool = False
) -> tuple[Reader | None, list[CheckpointError]]:
    """The first of the candidates without a fault (see `opened`), and the faults of those before it, which
    are warned of where there is one to take instead. What was looked at is taken off the list.
    """
    faults: list[CheckpointError] = []
    while candidates:
        candidate = candidates.pop(0)
        try:
            reader = opened(candidate, headers=headers, deep=deep)
        except CheckpointError as fault:
            faults.append(fault)
            continue
        for each in faults:
            warn_of_damage(each, candidate)
        return reader, faults
    return None, faults


def locate(path: Path) -> Path:
    """The checkpoint that a user means by `path`: the step folder itself, or the newest of a run
    that is whole by its manifest and the sizes and headers of its files. (A `Reader` then
    compares with digests what is read.)

    Raises:
        CheckpointError: there is none, or the step folder is damaged.
    """
    candidates = checkpoints_in(path)
    if candidates == [path]:
        return opened(path).path
    latest, damage = newest_whole(candidates)
    if latest is None:
        wrong = "holds no checkpoint"
        if damage:
            wrong = (
                f"none of its {len(damage)} checkpoints is whole; in the newest, "
                f"{Path(damage[0].where).name}, {damage[0].wrong}"
            )
        raise CheckpointError(
            str(path), wrong, "give a run's log.dir, its checkpoints folder or one step_… folder"
        )
    return latest.path
