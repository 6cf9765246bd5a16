"""What thousands of ranks would make slow: how much a manifest says of a slice, who
reads it, and who looks at files.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megacore.checkpoint import Reader
from megacore.checkpoint.manifest import MANIFEST
from megacore.distributed.shard import TensorSlice
from megacore.errors import CheckpointError
from megacore.train.checkpointing import open_verified
from tests import training
from tests.checkpoints import save
from tests.pieces import piece
from tests.thread_ranks import ThreadRanks, run_threads


@contextmanager
def looks() -> Iterator[Counter[str]]:
    """How often this process reads a manifest, and asks for the size of a file of a checkpoint."""
    seen: Counter[str] = Counter()
    lstat, read_bytes = os.lstat, Path.read_bytes

    def looked_at(path: Any, **options: Any) -> os.stat_result:
        seen["sizes"] += str(path).endswith(".safetensors")
        return lstat(path, **options)

    def was_read(path: Path) -> bytes:
        seen["manifests"] += path.name == MANIFEST
        return read_bytes(path)

    with mock.patch.object(os, "lstat", looked_at), mock.patch.object(Path, "read_bytes", was_read):
        yield seen


def test_a_slice_takes_few_bytes_of_the_manifest(tmp_path: Path) -> None:
    """A million of them are read in seconds at 20 bytes each, and in a minute at 160."""
    whole = torch.randn(3000, 2)
    rows = {
        f"w#{i + 1}" if i else "w": (whole[i : i + 1], TensorSlice((3000, 2), (i, 0), (1, 2)))
        for i in range(3000)
    }
    path = save(tmp_path, 1, rows, {}, keep=1)
    assert (path / MANIFEST).stat().st_size < 3000 * 24 + 1000
    reader = Reader(path)
    reader.verify()
    assert torch.equal(reader.read("w", TensorSlice((3000, 2), (1234, 0), (3, 2))), whole[1234:1237])


def saved_by_four(folder: Path) -> Path:
    def rank_saves(ranks: ThreadRanks) -> Path:
        shard = piece((8, 3), 0, ranks.rank, 4)
        return save(folder, 1, {"w": (torch.full((2, 3), float(ranks.rank)), shard)}, {}, keep=1, ranks=ranks)

    return run_threads(4, rank_saves)[0]


def rank_resumes(path: Path, opened: Reader, ranks: ThreadRanks) -> Reader:
    return open_verified(path, ranks, opened if ranks.rank == 0 else None, lambda: None)


def test_what_one_rank_has_read_and_looked_at_the_others_are_told(tmp_path: Path) -> None:
    """With 4,096 ranks, each of which looked at each file, a file system was asked 33 million times."""
    path = saved_by_four(tmp_path)
    opened = Reader(path)
    with looks() as seen:
        readers = run_threads(4, partial(rank_resumes, path, opened))
    assert not +seen, "all that there is to look at was handed over"
    assert readers[0] is opened and all(reader.trusted for reader in readers)
    for reader in readers:
        assert torch.equal(
            reader.read("w", piece((8, 3))), torch.arange(4.0).repeat_interleave(2)[:, None].expand(8, 3)
        )


@pytest.mark.parametrize("damage", ["deleted", "cut off", "a bit", "a longer header"])
def test_what_happens_to_a_file_behind_rank_0s_back_is_one_line_on_every_rank(
    tmp_path: Path, damage: str
) -> None:
    path = saved_by_four(tmp_path)
    opened, file = Reader(path), path / "rank_00002.safetensors"
    content = file.read_bytes()
    file.unlink()
    if damage != "deleted":
        changes = {
            "cut off": content[:-8],
            "a bit": content[:-1] + bytes([content[-1] ^ 1]),
            "a longer header": b"\x01" + content[1:],
        }
        file.write_bytes(changes[damage])
    said = []

    def refused(ranks: ThreadRanks) -> None:
        with pytest.raises(CheckpointError) as caught:
            rank_resumes(path, opened, ranks)
        said.append(str(caught.value))

    run_threads(4, refused)
    assert (
        len(said) == 4 and len(set(said)) == 1 and "rank_00002.safetensors" in said[0] and "\n" not in said[0]
    )


def looking_rank(config_path: str, overrides: list[str], log_dir: str) -> tuple[int, dict[str, int]]:
    """A run that goes on and saves nothing, and what it looked at."""
    with looks() as seen:
        status = training.run_rank(config_path, overrides, log_dir)
    return status, dict(+seen)


def test_a_run_reads_its_manifest_once(pool: Any, tmp_path: Path) -> None:
    """From the search for a checkpoint to the last tensor: rank 0 once, and the others never."""
    prefix = training.write_corpus(tmp_path)
    config, run = training.write_config(tmp_path, prefix), tmp_path / "run"
    overrides = ["train.steps=2", "parallel.data=2", "checkpoint.every=2"]
    assert pool.run(2, training.run_rank, config, overrides, str(run)) == [0, 0]
    went_on = ["train.steps=3", "checkpoint.every=0", "checkpoint.last=false", "parallel.data=2"]
    first, second = pool.run(2, looking_rank, config, went_on, str(run))
    assert (first, second) == ((0, {"manifests": 1, "sizes": 2}), (0, {}))
