"""Writes a rank's part of a checkpoint: one safetensors file, and an index of its tensors with their digests.

Merges all ranks' indexes.
"""

import heapq
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from megacore.checkpoint.digest import FILE_HASH, content_digest, digest_text, identity_word
from megacore.checkpoint.disk import replace_file, write_file
from megacore.checkpoint.format import DTYPE_CODES, File, Logical
from megacore.checkpoint.slices import Row, Slices
from megacore.distributed.shard import Shard, TensorSlice, logical_name, piece_number
from megacore.errors import CheckpointError

LocalTensor = tuple[Tensor, TensorSlice | Shard]  # this rank's piece, and its position in the logical tensor
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # what a file will hold, in order
Places = Mapping[str, tuple[torch.dtype, TensorSlice | Shard]]  # what a rank will write, by piece, in order


def places_of(tensors: Mapping[str, LocalTensor]) -> dict[str, tuple[torch.dtype, TensorSlice | Shard]]:
    """The pieces that this rank writes.

    The widest dtype comes first, so that every tensor is aligned in the file, as readers that map it expect.
    """
    own = {key: (tensors[key][0].dtype, tensors[key][1]) for key in dealt(tensors)}
    for key, (_, box) in own.items():
        shape = tensors[key][0].shape
        assert shape == box.local_shape, f"{key}: {tuple(shape)} is not the slice {box.local_shape}"
    return dict(sorted(own.items(), key=lambda item: (-item[1][0].itemsize, item[0])))


def dealt(tensors: Mapping[str, LocalTensor]) -> Iterator[str]:
    """Of the pieces that other ranks hold too, those that this one writes, and all others.

    Copies are dealt so that the ranks which hold them write about as many bytes: the largest piece first,
    each to the rank that has least so far. All of these ranks hold copies of the same pieces, and so come to
    the same result.
    """
    alike: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for key, (_, box) in tensors.items():
        alike.setdefault(tuple((along.axis, along.count) for along in box.copied), []).append(key)
    for keys in alike.values():
        own, count = 0, 1
        for along in tensors[keys[0]][1].copied:
            own, count = own * along.count + along.index, count * along.count
        loads = [(0, rank) for rank in range(count)]
        for key in sorted(keys, key=lambda key: (-tensors[key][0].nbytes, key)):
            load, rank = loads[0]
            heapq.heapreplace(loads, (load + tensors[key][0].nbytes, rank))
            if rank == own:
                yield key


def bytes_of(places: Places) -> int:
    """The size of the pieces."""
    return sum(dtype.itemsize * prod(box.local_shape) for dtype, box in places.values())


def write_rank(folder: Path, rank: int, places: Places, tensors: Iterator[Tensor]) -> None:
    """Write a rank's slices, and then its index, which says that they are on the disk.

    A rank without slices writes an empty index, so that a lost index is noticed.

    Raises:
        OSError: the disk refused, or what is read back differs.
    """
    file = folder / f"rank_{rank:05d}.safetensors"
    rows: dict[str, list[Row]] = {}  # by logical tensor
    known: dict[str, tuple[str, tuple[int, ...]]] = {}  # its dtype and shape
    boxes = iter(places.items())

    def note(tensor: Tensor) -> None:
        key, (dtype, box) = next(boxes)
        if tensor.numel() > 0:  # where a size does not divide, the last ranks may hold nothing
            name, dtype_name = logical_name(key), str(dtype).removeprefix("torch.")
            digest = content_digest(tensor, box.offset, identity_word(name, dtype_name, box.global_shape))
            known[name] = dtype_name, box.global_shape
            rows.setdefault(name, []).append((0, piece_number(key), box.offset, box.local_shape, digest))

    files = {}
    if bytes_of(places) > 0:
        layout = {key: (dtype, box.local_shape) for key, (dtype, box) in places.items()}
        files[file.name] = write_safetensors(file, layout, tensors, note)
    held = {name: (*known[name], len(own)) for name, own in rows.items()}
    index = Index(files, held, Slices.of([row for own in rows.values() for row in own]))
    replace_file(index_file(folder, rank), index.encoded())


def write_safetensors(
    file: Path,
    layout: Layout,
    tensors: Iterator[Tensor],
    note: Callable[[Tensor], None] = lambda tensor: None,
) -> File:
    """Write a safetensors file, one tensor after the other, and wait until it is on the disk.

    The library's own writer needs every tensor on the CPU at once. This one needs memory for the largest
    only: a host with eight devices may not have room for all their weights and moments, and a model may be
    larger than memory.

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
            assert (tensor.dtype, tensor.shape) == expected, (
                f"{name}: {tensor.dtype} {tuple(tensor.shape)} is not {expected}"
            )
            tensor = tensor.detach().cpu().contiguous()
            note(tensor)
            # The bytes of a flat tensor: numpy has no bfloat16, and a 0-dim tensor has no view of another
            # width.
            yield tensor.reshape(-1).view(torch.uint8).numpy().data
            del tensor

    size, digest = write_file(file, parts())
    return File(bytes=size, hash=FILE_HASH, digest=digest)


@dataclass(frozen=True)
class Index:
    """What one rank wrote: its file if it has one, and its slices, in the order of their tensors."""

    files: dict[str, File]
    tensors: dict[str, tuple[str, tuple[int, ...], int]]  # dtype, global shape, how many slices
    slices: Slices

    def encoded(self) -> bytes:
        """As `decoded` reads it."""
        content: dict[str, Any] = {"files": {name: file.model_dump() for name, file in self.files.items()}}
        return json.dumps(content | {"tensors": self.tensors, "slices": self.slices.texts()}).encode()

    @classmethod
    def decoded(cls, text: bytes) -> Self:
        """Raises `ValueError` where it is not what `encoded` made."""
        content = json.loads(text)
        files = {name: File.model_validate(file) for name, file in content["files"].items()}
        tensors = {
            name: (dtype, tuple(shape), count) for name, (dtype, shape, count) in content["tensors"].items()
        }
        rows, dims = (
            sum(count for _, _, count in tensors.values()),
            max((len(shape) for _, shape, _ in tensors.values()), default=0),
        )
        return cls(files, tensors, Slices.of_texts(content["slices"], rows, dims))


def index_file(folder: Path, rank: int) -> Path:
    """Where a rank says what it wrote."""
    return folder / f"rank_{rank:05d}.json"


def merged(folder: Path, world: int) -> tuple[dict[str, File], dict[str, Logical], Slices]:
    """What all ranks wrote: files, tensors, and their slices in the order of the tensors.

    Raises:
        CheckpointError: ranks do not agree in what a tensor is.
    """
    files: dict[str, File] = {}
    known: dict[str, tuple[int, str, tuple[int, ...]]] = {}  # which of the tensors, its dtype and shape
    parts, tensor_of = [], []
    for rank in range(world):
        index = Index.decoded(index_file(folder, rank).read_bytes())
        parts.append(index.slices.behind(len(files)))
        files |= index.files
        for name, (dtype, shape, count) in index.tensors.items():
            place, *others = known.setdefault(name, (len(known), dtype, shape))
            if others != [dtype, shape]:
                wrong = f"tensor {name} is {dtype} {shape} on rank {rank}"
                raise CheckpointError(str(folder), wrong, "{} {} on the ranks before".format(*others))
            tensor_of.append((place, count))
    owners = np.repeat(*np.array(tensor_of, np.int64).reshape(-1, 2).T)  # the tensor of each slice
    slices = Slices.joined(parts)[np.argsort(owners, kind="stable")]
    counts = np.bincount(owners, minlength=len(known)).tolist()
    ends = np.cumsum(counts, dtype=np.int64)
    # modulo 2⁶⁴, as digests add up
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(slices.digest, dtype=np.uint64)])
    digests = (sums[ends] - sums[ends - counts]).tolist()
    tensors = {
        name: Logical(shape=shape, dtype=dtype, digest=digest_text(digest), slices=count)
        for (name, (_, dtype, shape)), digest, count in zip(known.items(), digests, counts, strict=True)
    }
    return files, tensors, slices
