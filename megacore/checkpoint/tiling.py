"""Boxes in a tensor: one cut into blocks of bounded size, and whether some tile the whole."""

from collections.abc import Iterable, Iterator
from itertools import combinations, islice
from math import prod

import numpy as np

from megacore.checkpoint.slices import Numbers
from megacore.distributed.shard import Box, boxes_of_range, overlap

Extent = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape

NAMED = 1000  # boxes among which overlapping ones are searched by name


def blocks(box: tuple[slice, ...], elements: int) -> Iterator[tuple[slice, ...]]:
    """Cuts `box` into boxes of at most `elements`, in the order of their elements."""
    start, shape = tuple(s.start for s in box), tuple(s.stop - s.start for s in box)
    whole = Box(shape, start, shape)
    for first in range(0, prod(shape), elements):
        for _, part in boxes_of_range(whole, first, min(first + elements, prod(shape))):
            yield tuple(slice(o, o + n) for o, n in zip(part.offset, part.local_shape, strict=True))


def tiles(shape: tuple[int, ...], offsets: Numbers, sizes: Numbers) -> bool:
    """Whether every element of a tensor of `shape` is in exactly one of the boxes, ``[n, dims]`` and ``[n, dims]``, all inside it.
    Takes time n · log n: a sharded optimizer makes the number of boxes large.

    A box is a product, over dims, of the steps "up at its start, down at its end". So the boxes tile the whole if the signed
    corners of all of them cancel, except the corners of the whole.
    """
    rows = [size + 1 for size in shape]  # places that a corner may have along a dim
    if prod(rows) >= 2**63:
        return False
    starts = np.concatenate([np.zeros((1, len(shape)), np.int64), offsets.astype(np.int64)])
    stops = starts + np.concatenate([np.array(shape, np.int64).reshape(1, len(shape)), sizes.astype(np.int64)])
    corners, signs = np.zeros((len(starts), 1), np.int64), np.ones((len(starts), 1), np.int64)
    signs[0] = -1  # the whole
    for dim in range(len(shape)):
        ends = (corners * rows[dim] + end[:, dim : dim + 1] for end in (starts, stops))
        corners, signs = np.concatenate([*ends], axis=1), np.concatenate([signs, -signs], axis=1)
    order = np.argsort(corners, axis=None)
    sorted_corners = corners.ravel()[order]
    groups = np.flatnonzero(np.diff(sorted_corners, prepend=-1))
    return not np.add.reduceat(signs.ravel()[order], groups).any()


def overlapping(boxes: Iterable[Extent]) -> tuple[int, int] | None:
    """The positions of two boxes that overlap, among the first `NAMED`."""
    for (i, a), (j, b) in combinations(enumerate(islice(boxes, NAMED)), 2):
        if overlap(*a, *b) is not None:
            return i, j
    return None
