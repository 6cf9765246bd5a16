"""The shard record: which slice of which logical tensor a parameter on this rank is.

Initialisation, checkpoints, gradient norms and verification are all driven by it, so that none of
them knows how a layer was split.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import count
from math import prod

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Box:
    """Where any piece stands in its logical tensor: what checkpoints and comparisons need of a `Shard`, which is one too."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]  # of the piece's first element
    local_shape: tuple[int, ...]
    counted: bool = True  # whether this rank's piece is the one that is saved


@dataclass(frozen=True)
class Shard:
    """Where a local parameter stands in its logical tensor.

    A logical tensor of ``global_shape`` is cut along ``dim`` into ``count`` consecutive pieces of
    ``ceil(size / count)`` (the last may be shorter: nothing is ever padded); this rank holds piece
    ``index``. ``dim=None`` means every tensor-parallel rank holds the whole.
    """

    global_shape: tuple[int, ...]
    dim: int | None = None
    index: int = 0
    count: int = 1
    decay: bool = False  # weight decay applies (matrices, not biases and norms)
    partial: bool = False  # replicated, but each tensor rank sees only its own tokens or heads: gradients must be summed over tp
    owner: bool = True  # False for the second copy of a tied tensor: not counted in norms, not saved
    init_std: float | None = None  # normal with this deviation; None: filled with `fill`
    fill: float = 0.0

    @property
    def start(self) -> int:
        """First index along `dim` that this rank holds."""
        assert self.dim is not None
        return min(self.index * -(-self.global_shape[self.dim] // self.count), self.global_shape[self.dim])

    @property
    def offset(self) -> tuple[int, ...]:
        """Position of the local tensor's first element in the logical tensor."""
        return tuple(self.start if d == self.dim else 0 for d in range(len(self.global_shape)))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the piece that this rank holds."""
        if self.dim is None:
            return self.global_shape
        size = self.global_shape[self.dim]
        stop = min((self.index + 1) * -(-size // self.count), size)
        return tuple(stop - self.start if d == self.dim else n for d, n in enumerate(self.global_shape))

    @property
    def counted(self) -> bool:
        """Whether this rank's copy is the one that counts (in norms) and is saved (in checkpoints)."""
        return self.owner and (self.dim is not None or self.index == 0)


def boxes_of_range(piece: "Box | Shard", start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Elements `start` to `stop` (excluded) of a piece, row after row, as boxes: (first element, box).

    A range ends anywhere in a row, so it is the end of one row, whole rows and the beginning of another, in every dim.
    """

    dims = len(piece.local_shape)

    def cut(at: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Offset and shape of the boxes within the part that stands at the leading indices `at`."""
        shape = piece.local_shape[len(at) :]
        row = prod(shape[1:])
        first, last = -(-start // row), stop // row  # whole rows
        if start == stop:
            return
        if not shape:
            yield at, (1,) * dims
        elif start % row == 0 and stop % row == 0:
            yield (*at, first) + (0,) * (len(shape) - 1), (1,) * len(at) + (last - first, *shape[1:])
        elif first > last:
            yield from cut((*at, last), start - last * row, stop - last * row)
        else:
            if start < first * row:
                yield from cut((*at, first - 1), start - (first - 1) * row, row)
            yield from cut(at, first * row, last * row)
            yield from cut((*at, last), 0, stop - last * row)

    done = start
    for offset, shape in cut((), start, stop):
        moved = tuple(o + base for o, base in zip(offset, piece.offset, strict=True))
        yield done, Box(piece.global_shape, moved, shape, piece.counted)
        done += prod(shape)


def piece_key(name: str, taken: Container[str]) -> str:
    """A name for another piece of the logical tensor `name`: the name itself, then with #2, #3, …"""
    return next(key for n in count(1) if (key := name if n == 1 else f"{name}#{n}") not in taken)


def logical_name(key: str) -> str:
    """The logical tensor of a piece."""
    return key.partition("#")[0]


def new_parameter(shard: Shard, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """An uninitialised local parameter for `shard`; `model.initialise` fills it (see there why not here)."""
    parameter = nn.Parameter(torch.empty(shard.local_shape, dtype=dtype, device=device))
    parameter.shard = shard  # type: ignore[attr-defined]
    return parameter


def shard_of(parameter: Tensor) -> Shard:
    """The `Shard` record of a parameter. Every parameter of a megacore model has one."""
    shard = getattr(parameter, "shard", None)
    assert shard is not None, "parameter without a shard record: create it with tensor_parallel.new_parameter"
    return shard
