"""Compares two checkpoints tensor by tensor, whatever layouts wrote them."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from megacore.checkpoint.digest import BITS
from megacore.checkpoint.read import BLOCK_ELEMENTS, Reader
from megacore.checkpoint.slices import blocks
from megacore.distributed.shard import TensorSlice


@dataclass(frozen=True)
class TensorDifference:
    """How one tensor differs between the first checkpoint and the second."""

    name: str
    what: str
    elements: int = 0  # that are not equal
    largest: float = 0.0  # absolute difference; nan where only one is not a number
    relative: float = 0.0  # norm of the difference over the norm of the first


def compare(before: Reader, after: Reader) -> Iterator[TensorDifference]:
    """Yields the tensors that differ, in the order of their names.

    Every tensor is read and compared with its digest first. If the readers are `trusted`, digests are
    believed unread, and only tensors whose digests differ are read.

    Raises:
        CheckpointError: a tensor is damaged.
    """
    for name in sorted({*before.names, *after.names}):
        for reader in (before, after):
            if name in reader.manifest.tensors and not reader.trusted:
                reader.verify_tensor(name)
        a, b = before.manifest.tensors.get(name), after.manifest.tensors.get(name)
        if a is None or b is None:
            yield TensorDifference(name, "only in the second" if a is None else "only in the first")
        elif (a.shape, a.dtype) != (b.shape, b.dtype):
            yield TensorDifference(name, f"{a.dtype} {a.shape}, then {b.dtype} {b.shape}")
        elif a.digest != b.digest and (found := _measured(before, after, name, a.shape)):
            yield found


def _measured(before: Reader, after: Reader, name: str, shape: tuple[int, ...]) -> TensorDifference | None:
    """How the values of a tensor differ; None where every bit is equal."""
    bits, elements, largest, squares, norm = 0, 0, 0.0, 0.0, 0.0
    for block in blocks(tuple(slice(0, size) for size in shape), BLOCK_ELEMENTS):
        box = TensorSlice(shape, tuple(s.start for s in block), tuple(s.stop - s.start for s in block))
        a, b = (reader.read(name, box) for reader in (before, after))
        bits += int((a.view(BITS[a.element_size()]) != b.view(BITS[b.element_size()])).sum())
        a, b = a.double(), b.double()
        change = (b - a).masked_fill_(a == b, 0.0)  # equal infinities too
        elements += int((a != b).sum())
        largest = float(torch.maximum(torch.tensor(largest), change.abs().max()))
        squares, norm = squares + float(change.square().sum()), norm + float(a.square().sum())
    if not bits:
        return None
    what = f"values, of {prod(shape):,}" if elements else "only bits that have no value (the sign of zeros)"
    return TensorDifference(name, what, elements, largest, (squares / norm) ** 0.5 if norm else float("inf"))
