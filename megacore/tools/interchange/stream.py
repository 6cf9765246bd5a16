"""Writes a checkpoint of a model that one process never holds whole."""

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.checkpoint import Layout
from megacore.checkpoint.folder import commit, partial_of
from megacore.checkpoint.write import write_rank
from megacore.config import Config
from megacore.distributed.buffers import BUFFERS, buffers_of
from megacore.distributed.shard import Shard
from megacore.model.stage import whole_model


def save_stream(
    directory: Path,
    step: int,
    layout: Layout,
    tensors: Iterator[Tensor],
    state: dict[str, Any],
    file_bytes: int,
) -> Path:
    """Write the checkpoint of `step` from one process that never holds more than one
    tensor, and return its folder.

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
        write_rank(
            partial, part, {name: (layout[name][0], Shard(layout[name][1])) for name in names}, tensors
        )
    return commit(partial, step, state, len(files))


def pack(layout: Layout, file_bytes: int) -> list[list[str]]:
    """Cuts the names of `layout`, in order, into files of at most `file_bytes` (a larger
    tensor has a file of its own).
    """
    files: list[list[str]] = [[]]
    size = 0
    for name, (dtype, shape) in layout.items():
        nbytes = dtype.itemsize * prod(shape)
        if files[-1] and size + nbytes > file_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size += nbytes
    return files


def first_buffers(config: Config) -> dict[str, Tensor]:
    """A model's buffers as a run begins with them, by their names in a checkpoint."""
    buffers = buffers_of([whole_model(config, "meta")])
    return {
        f"{BUFFERS}{name}": torch.full_like(own.value, own.shard.fill, device="cpu")
        for name, own in buffers.items()
    }
