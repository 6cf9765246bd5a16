"""Which of a run's checkpoints stay: deletes old ones, and sets those of another run aside."""

import logging
import shlex
from collections.abc import Callable
from itertools import count
from pathlib import Path

from megacore.checkpoint import checkpoints_in, opened
from megacore.checkpoint.disk import remove, size_text
from megacore.checkpoint.folder import step_of
from megacore.errors import CheckpointError

logger = logging.getLogger(__name__)


def retention(directory: Path, keep: int, keep_every: int = 0) -> Callable[[Path], None]:
    """What a `Saver` does behind each checkpoint: see `prune`."""
    return lambda newest: prune(directory, newest, keep, keep_every)


def prune(directory: Path, newest: Path, keep: int, keep_every: int) -> None:
    """Delete checkpoints older than the `keep` newest whole ones, except those of steps that
    are multiples of `keep_every`.

    `newest` is always kept. It has just been written and read back, so at least one whole checkpoint stays.
    Only whole ones count towards `keep`, so a damaged one never takes the room of one that could be resumed
    from.
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
        step = step_of(path)
        if replaced or (whole >= keep and not (keep_every and step % keep_every == 0)):
            _delete(path)
        elif whole < keep:
            whole += is_whole(path)


def is_whole(path: Path) -> bool:
    """Whether the checkpoint in folder `path` is whole by all but its tensors."""
    try:
        opened(path)
    except CheckpointError:
        return False
    return True


def _delete(path: Path) -> None:
    try:
        # Rename it first: an interrupted deletion must not leave a damaged checkpoint.
        doomed = path.with_name(f"{path.name}.deleted.partial")
        path.rename(doomed)
        remove(doomed)
    except OSError as error:  # the new checkpoint is safe: an old one that stays is no reason to end the run
        logger.warning("could not delete the old checkpoint %s: %s", path, error)


def set_aside(directory: Path, above: int) -> None:
    """Rename checkpoints of steps beyond `above`.

    A run that starts from `above` reaches these steps again, and would take the old checkpoints for its
    newest. They can still be given by path, and stay until somebody deletes them.
    """
    moved = []
    for path in checkpoints_in(directory):
        if step_of(path) > above:
            aside = next(
                name for i in count(1) if not (name := path.with_name(f"{path.name}.aside{i}")).exists()
            )
            path.rename(aside)
            moved.append(aside)
    if moved:
        of_size = size_text(sum(file.stat().st_size for path in moved for file in path.glob("*")))
        logger.warning(
            "checkpoints of a run before this one were set aside, %s: %s. They stay until you delete "
            "them: rm -r %s",
            of_size,
            ", ".join(path.name for path in reversed(moved)),
            " ".join(shlex.quote(str(path)) for path in reversed(moved)),
        )
