"""Which checkpoint a path means: looked for, never pointed to by a file that could lag behind."""

import logging
from itertools import pairwise
from pathlib import Path

from megacore.checkpoint.manifest import MANIFEST, STEP_FOLDER
from megacore.checkpoint.read import Reader
from megacore.errors import CheckpointError

logger = logging.getLogger(__name__)


def checkpoints_in(path: Path) -> list[Path]:
    """The step folders that `path` means, newest first, whole or not.

    `path` is a run's log.dir, its checkpoints folder, or a step folder itself; a path that is none of them has none.
    """
    if (path / MANIFEST).exists() or STEP_FOLDER.fullmatch(path.name):
        return [path]
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if not directory.is_dir():
        return []
    steps = ((match, child) for child in directory.iterdir() if (match := STEP_FOLDER.fullmatch(child.name)))
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
    for candidate, before in pairwise((*checkpoints_in(path), None)):
        assert candidate is not None
        error = fault_of(candidate, deep=deep)
        if error is None:
            return candidate
        warn_of_damage(error, before)
    return None


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
    latest = find_latest(path, deep=False)
    if latest is None:
        wrong = "holds no checkpoint" if not candidates else f"none of its {len(candidates)} checkpoints is whole"
        raise CheckpointError(str(path), wrong, "give a run's log.dir, its checkpoints folder or one step_… folder")
    return latest
