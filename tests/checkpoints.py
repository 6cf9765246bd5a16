"""Checkpoints of a process without a mesh and of two ranks, the newest whole one by all that can be
checked, and refusals of others.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.checkpoint import LocalTensor, Ranks, Reader, Saver, checkpoints_in, newest_whole
from megacore.checkpoint.manifest import MANIFEST
from megacore.errors import CheckpointError
from megacore.tools.retention import retention
from tests.pieces import piece
from tests.thread_ranks import ThreadRanks, run_threads

FILES = ("rank_00000.safetensors", "rank_00001.safetensors", MANIFEST)
STATE = {"engine": {"updates": 3.0}, "model": {"hidden_size": 6}, "samples": 80}


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
    directory: Path,
    step: int,
    tensors: Mapping[str, LocalTensor],
    state: dict[str, Any],
    *,
    keep: int,
    ranks: Ranks | None = None,
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


def save_both(directory: Path) -> tuple[Path, Path]:
    """Steps 10 and 20, each from two ranks. v and w are alike but in their values."""

    def on(step: int) -> Callable[[ThreadRanks], Path]:
        def work(ranks: ThreadRanks) -> Path:
            generator = torch.Generator().manual_seed(step)
            pieces = {}
            for name in ("model/v", "model/w"):
                whole, shard = torch.randn(8, 6, generator=generator), piece((8, 6), 0, ranks.rank, 2)
                pieces[name] = (whole[shard.offset[0] :][:4], shard)
            return save(directory, step, pieces, STATE, ranks=ranks, keep=2)

        return work

    return run_threads(2, on(10))[0], run_threads(2, on(20))[0]


def refusal(path: Path) -> CheckpointError:
    """What a checkpoint is refused with: one line, and never another exception."""
    with pytest.raises(CheckpointError) as caught:
        Reader(path).verify()
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"checkpoint error: {path}: ")
    return caught.value
