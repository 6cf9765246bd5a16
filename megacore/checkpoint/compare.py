"""In which tensors two checkpoints differ, whatever layouts wrote them."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from megacore.checkpoint.read import BLOCK_ELEMENTS, Reader
from megacore.checkpoint.tiling import blocks
from megacore.tensor_parallel.shard import Box


@dataclass(frozen=True)
class Difference:
    """Of one tensor, from the first checkpoint to the second."""

    name: str
    what: str
    elements: int = 0  # that are not equal
    largest: float = 0.0  # absolute difference; nan where only one is not a number
    relative: float = 0.0  # norm of the difference over the norm of the first


def compare(before: Reader, after: Reader) -> Iterator[Difference]:
    """The tensors that are not the same in both, by name. Equal digests of contents settle it without reading them."""
    for name in sorted({*before.names, *after.names}):
        a, b = before.manifest.tensors.get(name), after.manifest.tensors.get(name)
        if a is None or b is None:
            yield Difference(name, "only in the second" if a is None else "only in the first")
        elif (a.shape, a.dtype) != (b.shape, b.dtype):
            yield Difference(name, f"{a.dtype} {a.shape}, then {b.dtype} {b.shape}")
        elif a.digest != b.digest:
            yield _measured(before, after, name, a.shape)


def _measured(before: Reader, after: Reader, name: str, shape: tuple[int, ...]) -> Difference:
    elements, largest, squares, norm = 0, 0.0, 0.0, 0.0
    for block in blocks(tuple(slice(0, size) for size in shape), BLOCK_ELEMENTS):
        box = Box(shape, tuple(s.start for s in block), tuple(s.stop - s.start for s in block))
        a, b = (reader.read(name, box).double() for reader in (before, after))
        change = (b - a).masked_fill_(a == b, 0.0)  # equal infinities too
        elements += int((a != b).sum())
        largest = float(torch.maximum(torch.tensor(largest), change.abs().max()))
        squares, norm = squares + float(change.square().sum()), norm + float(a.square().sum())
    what = f"values, of {prod(shape):,}" if elements else "only bits that have no value (the sign of zeros)"
    return Difference(name, what, elements, largest, (squares / norm) ** 0.5 if norm else float("inf"))
