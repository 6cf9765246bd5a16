"""Writes a rank's part of a checkpoint: one safetensors file, and an index of its tensors with their digests."""

import json
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.checkpoint.digest import FILE_HASH, content_digest, digest_text, identity_word
from megacore.checkpoint.disk import replace_file, write_file
from megacore.checkpoint.manifest import DTYPE_CODES, File, Index, Logical, Slice
from megacore.distributed.shard import Box, Shard, logical_name

LocalTensor = tuple[Tensor, Box | Shard]  # this rank's piece, and its position in the logical tensor
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # what a file will hold, in order
Places = Mapping[str, tuple[torch.dtype, Box | Shard]]  # what a rank will write, by piece, in order


def places_of(tensors: Mapping[str, LocalTensor]) -> dict[str, tuple[torch.dtype, Box | Shard]]:
    """The pieces that this rank writes, which are those `counted`. The widest dtype comes first, so that every tensor is aligned in
    the file, as readers that map it expect."""
    own = {key: (tensor.dtype, box) for key, (tensor, box) in tensors.items() if box.counted}
    for key, (_, box) in own.items():
        shape = tensors[key][0].shape
        assert shape == box.local_shape, f"{key}: {tuple(shape)} is not the slice {box.local_shape}"
    return dict(sorted(own.items(), key=lambda item: (-item[1][0].itemsize, item[0])))


def bytes_of(places: Places) -> int:
    """The size of the pieces."""
    return sum(dtype.itemsize * prod(box.local_shape) for dtype, box in places.values())


def write_rank(folder: Path, rank: int, places: Places, tensors: Iterator[Tensor]) -> None:
    """Write a rank's slices, and then its index, which says that they are on the disk. A rank without slices writes an empty index,
    so that a lost index is noticed.

    Raises:
        OSError: the disk refused, or what is read back differs.
    """
    file = folder / f"rank_{rank:05d}.safetensors"
    entries: dict[str, Logical] = {}
    boxes = iter(places.items())

    def note(tensor: Tensor) -> None:
        key, (dtype, box) = next(boxes)
        if tensor.numel() > 0:  # where a size does not divide, the last ranks may hold nothing
            name, dtype_name = logical_name(key), str(dtype).removeprefix("torch.")
            digest = digest_text(content_digest(tensor, box.offset, identity_word(name, dtype_name, box.global_shape)))
            piece = Slice(file=file.name, key=key, offset=box.offset, shape=box.local_shape, digest=digest)
            entry = Logical(shape=box.global_shape, dtype=dtype_name, digest=digest, slices=[])
            entries.setdefault(name, entry).slices.append(piece)

    files = {}
    if bytes_of(places) > 0:
        layout = {key: (dtype, box.local_shape) for key, (dtype, box) in places.items()}
        files[file.name] = write_safetensors(file, layout, tensors, note)
    replace_file(index_file(folder, rank), json.dumps(Index(files=files, tensors=entries).model_dump()).encode())


def index_file(folder: Path, rank: int) -> Path:
    """The index file of a rank."""
    return folder / f"rank_{rank:05d}.json"


def write_safetensors(file: Path, layout: Layout, tensors: Iterator[Tensor], note: Callable[[Tensor], None] = lambda tensor: None) -> File:
    """Write a safetensors file, one tensor after the other, and wait until it is on the disk.

    The library's own writer needs every tensor on the CPU at once. This one needs memory for the largest only: a host with eight
    devices may not have room for all their weights and moments, and a model may be larger than memory.

    Args:
        layout: what the file will hold; tensors without elements are left out.
        tensors: these tensors in that order, on any device. Each is freed before the next is made.
        note: is called with each tensor, on the CPU.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in layout.items():
        start, end = end, end + dtype.itemsize * prod(shape)
        if end > start:
            header[name] = {"dtype": DTYPE_CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)

    def parts() -> Iterator[memoryview | bytes]:
        yield len(head).to_bytes(8, "little") + head
        for name, expected in layout.items():
            tensor = next(tensors)
            assert (tensor.dtype, tensor.shape) == expected, f"{name}: {tensor.dtype} {tuple(tensor.shape)} is not {expected}"
            tensor = tensor.detach().cpu().contiguous()
            note(tensor)
            # The bytes of a flat tensor: numpy has no bfloat16, and a 0-dim tensor has no view of another width.
            yield tensor.reshape(-1).view(torch.uint8).numpy().data
            del tensor

    size, digest = write_file(file, parts())
    return File(bytes=size, hash=FILE_HASH, digest=digest)


def pack(layout: Layout, file_bytes: int) -> list[list[str]]:
    """Cuts the names of `layout`, in order, into files of at most `file_bytes` (a larger tensor has a file of its own)."""
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
