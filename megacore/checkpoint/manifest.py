"""The manifest of a checkpoint: what each logical tensor is, and which file holds which slice of it."""

import json
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt

from megacore.errors import CheckpointError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"

# torch dtype -> its code in a safetensors header. The manifest itself says `float32`, as torch does.
DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_CODES}


class Entry(BaseModel):
    model_config = ConfigDict(frozen=True)


class Slice(Entry):
    """A box of a logical tensor: stored under `key` in `file`, its first element at `offset` of the whole."""

    file: str
    key: str
    offset: tuple[NonNegativeInt, ...]
    shape: tuple[NonNegativeInt, ...]


class Logical(Entry):
    """A logical tensor, whole: the slices tile `shape` exactly."""

    shape: tuple[NonNegativeInt, ...]
    dtype: str
    slices: list[Slice]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    def fault(self) -> str | None:
        """Why this is not a tensor that can be read in whole, or None where it is."""
        if self.dtype not in DTYPES:
            return f"has the unknown dtype {self.dtype}"
        for piece in self.slices:
            if not len(piece.offset) == len(piece.shape) == len(self.shape) or any(
                start + size > whole for start, size, whole in zip(piece.offset, piece.shape, self.shape, strict=True)
            ):
                return f"has a slice {piece.shape} at {piece.offset} in {piece.file}, outside its shape {self.shape}"
        # Every pair, because boxes may be cut along any dim; a tensor has as many slices as tensor-parallel ranks, so few.
        for a, b in combinations(self.slices, 2):
            if overlap(a.offset, a.shape, b.offset, b.shape) is not None:
                return f"has overlapping slices, at {a.offset} in {a.file} and at {b.offset} in {b.file}"
        # Disjoint boxes inside the shape tile it exactly where their volumes add up to the whole.
        covered = sum(prod(piece.shape) for piece in self.slices)
        if covered < prod(self.shape):
            return f"has slices for {covered} of its {prod(self.shape)} elements only"
        return None


class Index(Entry):
    """What one rank wrote: sizes of its files in bytes, and its slice of each tensor."""

    files: dict[str, NonNegativeInt]
    tensors: dict[str, Logical]


class Manifest(Index):
    """What all ranks wrote, and the state of the run, whose `model` entry is the config's model section."""

    format_version: int
    megacore_version: str
    step: NonNegativeInt
    state: dict[str, Any]


def overlap(
    a_offset: tuple[int, ...], a_shape: tuple[int, ...], b_offset: tuple[int, ...], b_shape: tuple[int, ...]
) -> tuple[slice, ...] | None:
    """The box that two boxes of one tensor share, in the tensor's coordinates; None where they share no element.

    Boxes of a 0-dim tensor share its only element: the result is then `()`.
    """
    starts = [max(a, b) for a, b in zip(a_offset, b_offset, strict=True)]
    stops = [min(a + m, b + n) for a, m, b, n in zip(a_offset, a_shape, b_offset, b_shape, strict=True)]
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return None
    return tuple(slice(start, stop) for start, stop in zip(starts, stops, strict=True))


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in folder `path`, its tiling and the sizes of its files checked.

    Raises:
        CheckpointError: nothing there, an unknown version, a tensor with a hole or an overlap, a missing or cut-off file.
    """
    file = path / MANIFEST
    if not file.is_file():
        where = f"has no {MANIFEST}" if path.is_dir() else "there is no such folder"
        raise CheckpointError(str(path), where, "give a step_… folder of a run's checkpoints/")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        version = raw["format_version"]
        if version == FORMAT_VERSION:
            manifest = Manifest.model_validate(raw)
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(str(path), f"{MANIFEST} is damaged: {reason}", "use an earlier checkpoint") from error
    if version != FORMAT_VERSION:
        right = f"this megacore reads format version {FORMAT_VERSION}; read it with the megacore that wrote it"
        raise CheckpointError(str(path), f"{MANIFEST} has format version {version}", right)

    for name, tensor in manifest.tensors.items():
        if fault := tensor.fault():
            raise CheckpointError(str(path), f"tensor {name} {fault}", "every element must be in exactly one slice")
        for piece in tensor.slices:
            if piece.file not in manifest.files:
                raise CheckpointError(str(path), f"tensor {name} is in {piece.file}, of no recorded size", "use an earlier checkpoint")
    for name, size in manifest.files.items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            wrong = f"{name} is missing" if found is None else f"{name} has {found} bytes of {size}"
            raise CheckpointError(str(path), wrong, "copy the whole folder again, or use an earlier checkpoint")
    return manifest
