"""Boxes in a tensor: one cut into blocks of bounded size, and whether some tile the whole."""

from collections.abc import Iterable, Iterator
from itertools import combinations, islice
from math import prod

import numpy as np

from megacore.checkpoint.slices import Numbers
from megacore.distributed.shard import TensorSlice, boxes_of_range, overlap

Extent = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape

MOST_CORNERS = 1 << 22  # of boxes that are looked at together
NAMED = 1000  # boxes among which overlapping ones are searched by name


def blocks(box: tuple[slice, ...], elements: int) -> Iterator[tuple[slice, ...]]:
    """Cuts `box` into boxes of at most `elements`, in the order of their elements."""
    start, shape = tuple(s.start for s in box), tuple(s.stop - s.start for s in box)
    whole = TensorSlice(shape, start, shape)
    for first in range(0, prod(shape), elements):
        for _, part in boxes_of_range(whole, first, min(first + elements, prod(shape))):
            yield tuple(slice(o, o + n) for o, n in zip(part.offset, part.local_shape, strict=True))


def tiled(shapes: Numbers, owners: Numbers, offsets: Numbers, sizes: Numbers) -> Numbers:
    """For each tensor of some ``[tensors, dims]``, whether every element is in exactly one of its boxes. ``owners`` ``[n]`` are the tensors
    of the boxes, ascending, whose offsets and sizes are ``[n, dims]``, inside their tensor. Takes time n · log n: a sharded optimizer
    makes the number of boxes large.

    A box is a product, over dims, of the steps "up at its start, down at its end". So the boxes tile the whole if the signed
    corners of all of them cancel, except the corners of the whole.
    """
    whole, dims = np.ones(len(shapes), bool), shapes.shape[1]
    ends = np.searchsorted(owners, np.arange(len(shapes)), side="right")
    first = 0
    while first < len(shapes):  # so many tensors at a time that their corners fit in memory
        begin = ends[first - 1] if first else 0
        last = max(
            first + 1, int(np.searchsorted(ends + np.arange(1, len(ends) + 1), begin + first + (MOST_CORNERS >> dims), side="right"))
        )
        own = slice(int(begin), int(ends[last - 1]))
        whole[first:last] = _cancel(shapes[first:last], owners[own] - first, offsets[own], sizes[own])
        first = last
    return whole


def _cancel(shapes: Numbers, owners: Numbers, offsets: Numbers, sizes: Numbers) -> Numbers:
    rows = shapes + 1  # places that a corner may have along a dim
    small = rows.astype(np.float64).prod(axis=1) < 2**62
    starts = np.concatenate([np.zeros_like(shapes), offsets])
    stops = np.concatenate([shapes, offsets + sizes])
    tensor = np.concatenate([np.arange(len(shapes)), owners])
    corners, signs = np.zeros((len(starts), 1), np.int64), np.ones((len(starts), 1), np.int64)
    signs[: len(shapes)] = -1  # the wholes
    for dim in range(shapes.shape[1]):
        ends = (corners * rows[tensor, dim : dim + 1] + end[:, dim : dim + 1] for end in (starts, stops))
        corners, signs = np.concatenate([*ends], axis=1), np.concatenate([signs, -signs], axis=1)
    tensor = np.repeat(tensor, corners.shape[1])
    order = np.lexsort((corners.ravel(), tensor))
    tensor, corners = tensor[order], corners.ravel()[order]
    groups = np.flatnonzero((np.diff(tensor, prepend=-1) != 0) | (np.diff(corners, prepend=-1) != 0))
    left = np.add.reduceat(signs.ravel()[order], groups)
    small[tensor[groups[left != 0]]] = False
    return small


def overlapping(boxes: Iterable[Extent]) -> tuple[int, int] | None:
    """The positions of two boxes that overlap, among the first `NAMED`."""
    for (i, a), (j, b) in combinations(enumerate(islice(boxes, NAMED)), 2):
        if overlap(*a, *b) is not None:
            return i, j
    return None
