"""Which checkpoint a path means: looked for, never pointed to by a file that could lag behind."""

import logging
from pathlib import Path

from megacore.checkpoint.manifest import MANIFEST, STEP_FOLDER
from megacore.checkpoint.read import Reader
from megacore.errors import CheckpointError

logger = logging.getLogger(__name__)


def checkpoints_in(path: Path) -> list[Path]:
    """The step folders that `path` means, newest first, whole or not.

    `path` is a run's log.dir, its checkpoints folder, or a step folder itself; a path that is none of them has none.

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


def fault_of(path: Path, *, deep: bool) -> CheckpointError | None:
    """What is wrong with the checkpoint in folder `path`; None if nothing is. Only `deep` reads the tensors."""
    try:
        reader = Reader(path)
        reader.verify_headers()
        if deep:
            reader.verify()
    except CheckpointError as error:
        return error
    return None


def warn_of_damage(error: CheckpointError, instead: Path | None) -> None:
    """The warning that a checkpoint was passed over, framed: it must not drown among other lines."""
    then = f"using the one before it, {instead.name}" if instead else "there is none before it"
    lines = ("A CHECKPOINT IS DAMAGED AND WAS SKIPPED", str(error), then)
    frame = "!" * 100
    logger.warning("%s\n%s\n%s", frame, "\n".join(f"!! {line}" for line in lines), frame)


def find_latest(path: Path, *, deep: bool = True) -> Path | None:
    """The newest whole checkpoint in `path` (see `checkpoints_in`), or None. Warns of each that it skips.

    `deep` compares every file with its digest; else only the manifest, and the sizes and headers of the files. Call it on one
    rank and share the result: ranks that look for themselves may see different folders.
    """
    found, damage = _newest_whole(path, deep)
    if found is None and damage:
        warn_of_damage(damage[0], None)
    return found


def _newest_whole(path: Path, deep: bool) -> tuple[Path | None, list[CheckpointError]]:
    """`find_latest`, and what is wrong with those that were passed over. It warns of them where there is one to take instead."""
    damage: list[CheckpointError] = []
    for candidate in checkpoints_in(path):
        error = fault_of(candidate, deep=deep)
        if error is None:
            for each in damage:
                warn_of_damage(each, candidate)
            return candidate, damage
        damage.append(error)
    return None, damage


def locate(path: Path) -> Path:
    """The checkpoint that a user means by `path`: the step folder itself, or the newest of a run that is whole by its manifest and
    the sizes and headers of its files. (A `Reader` then compares with digests what is read.)

    Raises:
        CheckpointError: there is none, or the step folder is damaged.
    """
    candidates = checkpoints_in(path)
    if candidates == [path]:
        Reader(path).verify_headers()
        return path
    latest, damage = _newest_whole(path, deep=False)
    if latest is None:
        wrong = "holds no checkpoint"
        if damage:
            wrong = f"none of its {len(damage)} checkpoints is whole; in the newest, {Path(damage[0].where).name}, {damage[0].wrong}"
        raise CheckpointError(str(path), wrong, "give a run's log.dir, its checkpoints folder or one step_… folder")
    return latest
