"""The slices of a checkpoint as columns of numbers: a thousand ranks leave a million
slices, too many for an object each.

Also cuts boxes into blocks of bounded size, and says whether boxes tile a tensor.
"""

import base64
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from math import prod
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from megacore.distributed.shard import TensorSlice, boxes_of_range, overlap

Numbers = npt.NDArray[Any]  # unsigned, in as few bytes as hold the largest
Row = tuple[int, int, Sequence[int], Sequence[int], int]  # of each column one

WIDTHS = {f"u{width}:": np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}  # what a column's text begins with
# far above any model, so that no number in a manifest can make a reader allocate or count without end
MOST_DIMS, LARGEST = 8, 2**48
MOST_CORNERS = 1 << 22  # of boxes that are looked at together
NAMED = 1000  # boxes among which overlapping ones are searched by name

Extent = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape


class Slice(NamedTuple):
    """A box of a logical tensor: stored under `key` in `file`, its first element at `offset` of the whole."""

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    digest: int  # what it contributes to the tensor's


@dataclass(frozen=True)
class Slices:
    """Slice i is row i of every column. Dims that a tensor does not have are of offset 0 and size 1."""

    file: Numbers  # [n], in the order of the manifest's files
    number: Numbers  # [n] of the piece among those of its tensor in that file, from 1 (see `shard.piece_key`)
    offset: Numbers  # [n, dims]
    shape: Numbers  # [n, dims]
    digest: Numbers  # [n]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Self:
        """The columns of some rows, each with the dims of its own tensor."""
        file, number, offset, shape, digest = zip(*rows, strict=True) if rows else ((), (), (), (), ())
        dims = max(map(len, shape), default=0)
        boxes = [
            [(*row, *(rest,) * (dims - len(row))) for row in column]
            for column, rest in ((offset, 0), (shape, 1))
        ]
        columns = (
            file,
            number,
            *(np.array(box, np.uint64).reshape(len(rows), dims) for box in boxes),
            digest,
        )
        return cls(*(_narrow(np.array(column, np.uint64)) for column in columns))

    @classmethod
    def joined(cls, parts: Iterable["Slices"]) -> Self:
        """The rows of all, one behind the other."""
        every = list(parts)
        dims = max((part.offset.shape[1] for part in every), default=0)
        widened = [part.widened(dims) for part in every] or [cls.of([])]
        return cls(*(np.concatenate([getattr(part, name) for part in widened]) for name in COLUMNS))

    def widened(self, dims: int) -> Self:
        """The same rows with so many dims."""
        more = ((0, 0), (0, dims - self.offset.shape[1]))
        return type(self)(
            self.file,
            self.number,
            np.pad(self.offset, more),
            np.pad(self.shape, more, constant_values=1),
            self.digest,
        )

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, rows: slice | Numbers) -> Self:
        return type(self)(*(getattr(self, name)[rows] for name in COLUMNS))

    def lists(self) -> Iterator[list[Any]]:
        """The columns as Python's numbers."""
        return (getattr(self, name).tolist() for name in COLUMNS)

    def behind(self, files: int) -> Self:
        """The same rows, whose files stand behind so many others."""
        return type(self)(
            _narrow(self.file.astype(np.uint64) + np.uint64(files)),
            self.number,
            self.offset,
            self.shape,
            self.digest,
        )

    def overlapping(self, box: TensorSlice) -> Numbers:
        """The rows that share an element with `box`, all of them of its tensor."""
        dims = len(box.global_shape)
        start, size = self.offset[:, :dims].astype(np.int64), self.shape[:, :dims].astype(np.int64)
        first, own = np.array(box.offset, np.int64), np.array(box.local_shape, np.int64)
        return np.flatnonzero((np.maximum(start, first) < np.minimum(start + size, first + own)).all(axis=1))

    def texts(self) -> dict[str, str]:
        """The columns for JSON: the width of a number in bytes, and all of them in base64."""
        narrow = {name: _narrow(getattr(self, name)) for name in COLUMNS}
        return {
            name: f"u{column.itemsize}:{base64.b64encode(column.tobytes()).decode()}"
            for name, column in narrow.items()
        }

    @classmethod
    def of_texts(cls, texts: dict[str, str], rows: int, dims: int) -> Self:
        """What `texts` made of so many rows.

        Raises:
            ValueError: it did not.
        """
        if texts.keys() != set(COLUMNS):
            raise ValueError(f"the columns of its slices are {sorted(texts)}"[:200])
        sizes = {"offset": (rows, dims), "shape": (rows, dims)}
        return cls(*(_column(name, texts[name], sizes.get(name, (rows,))) for name in COLUMNS))


COLUMNS = ("file", "number", "offset", "shape", "digest")


def _narrow(column: Numbers) -> Numbers:
    largest = int(column.max(initial=0))
    return column.astype(next(dtype for dtype in WIDTHS.values() if largest < 1 << 8 * dtype.itemsize))


def _column(name: str, text: str, shape: tuple[int, ...]) -> Numbers:
    dtype = WIDTHS.get(text[:3])
    if dtype is None:
        raise ValueError(f"the numbers of its slices' {name} are of no known width")
    content = base64.b64decode(text[3:], validate=True)
    if len(content) != dtype.itemsize * prod(shape):
        raise ValueError(f"its slices' {name} has {len(content)} bytes of {dtype.itemsize * prod(shape)}")
    column = np.frombuffer(content, dtype).reshape(shape)
    if name != "digest" and int(column.max(initial=0)) > LARGEST:
        raise ValueError(f"its slices' {name} is too large")
    return column


def blocks(box: tuple[slice, ...], elements: int) -> Iterator[tuple[slice, ...]]:
    """Cuts `box` into boxes of at most `elements`, in the order of their elements."""
    start, shape = tuple(s.start for s in box), tuple(s.stop - s.start for s in box)
    whole = TensorSlice(shape, start, shape)
    for first in range(0, prod(shape), elements):
        for _, part in boxes_of_range(whole, first, min(first + elements, prod(shape))):
            yield tuple(slice(o, o + n) for o, n in zip(part.offset, part.local_shape, strict=True))


def tiled(shapes: Numbers, owners: Numbers, offsets: Numbers, sizes: Numbers) -> Numbers:
    """For each tensor of some ``[tensors, dims]``, whether every element is in exactly one of its boxes.

    ``owners`` ``[n]`` are the tensors of the boxes, ascending, whose offsets and sizes are ``[n, dims]``,
    inside their tensor. Takes time n · log n: a sharded optimizer makes the number of boxes large.

    A box is a product, over dims, of the steps "up at its start, down at its end". So the boxes tile the
    whole if the signed corners of all of them cancel, except the corners of the whole.
    """
    whole, dims = np.ones(len(shapes), bool), shapes.shape[1]
    ends = np.searchsorted(owners, np.arange(len(shapes)), side="right")
    first = 0
    while first < len(shapes):  # so many tensors at a time that their corners fit in memory
        begin = ends[first - 1] if first else 0
        last = max(
            first + 1,
            int(
                np.searchsorted(
                    ends + np.arange(1, len(ends) + 1), begin + first + (MOST_CORNERS >> dims), side="right"
                )
            ),
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
