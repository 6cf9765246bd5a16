"""Checkpoints of a process without a mesh, and the newest whole one by all that can be checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacore.checkpoint import LocalTensor, Ranks, Saver, checkpoints_in, newest_whole
from megacore.tools.retention import retention


@dataclass(frozen=True)
class Alone:
    """`checkpoint.Ranks` of a process without others."""

    rank: int = 0
    world: int = 1

    def first(self, text: str) -> str:
        return text

    def total(self, number: int) -> int:
        return number

    def share(self, content: bytes) -> bytes:
        return content


def save(
    directory: Path, step: int, tensors: Mapping[str, LocalTensor], state: dict[str, Any], *, keep: int, ranks: Ranks | None = None
) -> Path:
    """Write the checkpoint of `step` as training does, and return its folder. Every rank calls it."""
    saver = Saver(directory, Alone() if ranks is None else ranks, clean=retention(directory, keep))
    saver.start(step, tensors, state)
    saved = saver.finish()
    assert saved is not None
    return saved.path


def find_latest(path: Path) -> Path | None:
    """The newest checkpoint in `path` in which every file agrees with its digest, or None."""
    reader, _ = newest_whole(checkpoints_in(path), deep=True)
    return None if reader is None else reader.path
