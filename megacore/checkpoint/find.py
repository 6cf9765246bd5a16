"""Finds the checkpoint that a path means. No file points to the newest one, because it could lag behind."""

import logging
from pathlib import Path

from megacore.checkpoint.manifest import MANIFEST, STEP_FOLDER
from megacore.checkpoint.read import Reader
from megacore.errors import CheckpointError

logger = logging.getLogger(__name__)


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
        steps = [(match, child) for child in directory.iterdir() if (match := STEP_FOLDER.fullmatch(child.name))]
    except OSError as error:  # no permission, or a name that is too long
        raise CheckpointError(str(path), f"cannot be read: {error.strerror}", "a folder that this user may read") from None
    return [child for _, child in sorted(steps, key=lambda step: (int(step[0][1]), step[0][2] is None), reverse=True)]


def opened(path: Path, *, headers: bool = True, deep: bool = False) -> Reader:
    """The checkpoint in folder `path`, once its manifest and the sizes of its files are checked, with `headers` the files' headers,
    and if `deep` their tensors.

    Raises:
        CheckpointError: what is wrong with it.
    """
    reader = Reader(path)
    if headers:
        reader.verify_headers()
    if deep:
        reader.verify()
    return reader


def fault_of(path: Path, *, deep: bool) -> CheckpointError | None:
    """What is wrong with the checkpoint in folder `path`; None if it is whole. Tensors are read only if `deep`."""
    try:
        opened(path, deep=deep)
    except CheckpointError as error:
        return error
    return None


def warn_of_damage(error: CheckpointError, instead: Path) -> None:
    """Warns in a frame that a checkpoint was passed over, so that nobody misses it among other lines."""
    lines = ("A CHECKPOINT IS DAMAGED AND WAS SKIPPED", str(error), f"using the one before it, {instead.name}")
    frame = "!" * 100
    logger.warning("%s\n%s\n%s", frame, "\n".join(f"!! {line}" for line in lines), frame)


def newest_whole(candidates: list[Path], *, headers: bool = True, deep: bool = False) -> tuple[Reader | None, list[CheckpointError]]:
    """The first of the candidates without a fault (see `opened`), and the faults of those before it, which are warned of where there
    is one to take instead. What was looked at is taken off the list."""
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
    """The checkpoint that a user means by `path`: the step folder itself, or the newest of a run that is whole by its manifest and
    the sizes and headers of its files. (A `Reader` then compares with digests what is read.)

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
            wrong = f"none of its {len(damage)} checkpoints is whole; in the newest, {Path(damage[0].where).name}, {damage[0].wrong}"
        raise CheckpointError(str(path), wrong, "give a run's log.dir, its checkpoints folder or one step_… folder")
    return latest.path
