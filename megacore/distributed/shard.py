"""The shard record says which slice of which logical tensor a parameter on this rank
is, and which ranks hold it too.

Initialisation, checkpoints, gradient norms and verification use only this record, so none of them knows how a
layer was split.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import prod

import torch
from torch import Tensor, nn

from megacore.distributed.communicator import Group


@dataclass(frozen=True)
class AxisPlacement:
    """What a parameter is along one axis of the mesh with `count` ranks, of which this is number `index`.

    With a `dim` it is *split*: a rank holds one of `count` consecutive pieces of ``ceil(size / count)`` (the
    last may be shorter: nothing is padded). Without one it is *replicated*: every rank holds the same and
    computes the same gradient. If `partial`, it is *replicated with partial gradients*: each rank's gradient
    is a part of the sum, because it sees only its own tokens or heads.
    """

    axis: str
    index: int
    count: int
    dim: int | None = None
    partial: bool = False


@dataclass(frozen=True)
class TensorSlice:
    """The position of a piece in its logical tensor.

    Checkpoints and comparisons need no more; a `Shard` has it too.
    """

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]  # of the piece's first element
    local_shape: tuple[int, ...]
    copied: tuple[AxisPlacement, ...] = ()  # the axes along which other ranks hold the same piece

    @property
    def counted(self) -> bool:
        """Whether this rank's copy is the first."""
        return not any(along.index for along in self.copied)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The piece, as an index into its logical tensor."""
        return tuple(
            slice(start, start + size) for start, size in zip(self.offset, self.local_shape, strict=True)
        )


@dataclass(frozen=True)
class LogicalMatrix:
    """A linear map within a weight, or several of one kind: the queries' in a weight that
    makes queries, keys and values.

    Dims are those of the weight; each is in one of `batch`, `rows` and `columns`.
    """

    name: str
    index: tuple[slice, ...] = ()  # where it is: a slice of each of the weight's first dims
    batch: tuple[int, ...] = ()  # along them there are maps of their own, such as heads
    rows: tuple[int, ...] = (0,)  # of a map's outputs
    columns: tuple[int, ...] = (1,)  # of its inputs
    # of `batch`, those along which the maps are heads, which together are one map too
    heads: tuple[int, ...] = ()

    @property
    def joined(self) -> "LogicalMatrix":
        """The same with all heads as rows of one map."""
        return replace(
            self,
            batch=tuple(dim for dim in self.batch if dim not in self.heads),
            rows=(*self.heads, *self.rows),
            heads=(),
        )

    def view(self, weight: Tensor) -> Tensor:
        """The maps ``[batch, rows, columns]`` within the whole weight, or within a piece that is not split
        along an indexed dim. It is a copy where the dims of a weight are not as they are in memory.
        """
        return self.part(weight).reshape(self.sizes(weight.shape))

    def part(self, weight: Tensor) -> Tensor:
        """The same, a view with all dims of the weight."""
        return weight[self.index].permute(*self.batch, *self.rows, *self.columns)

    def sizes(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """How many maps, rows and columns there are in a weight of this shape, or within its index."""
        inside = [
            len(range(size)[at])
            for size, at in zip(shape, (*self.index, *[slice(None)] * len(shape)), strict=False)
        ]
        batch, rows, columns = (
            prod(inside[dim] for dim in dims) for dims in (self.batch, self.rows, self.columns)
        )
        return batch, rows, columns


@dataclass(frozen=True)
class FirstValue:
    """The whole tensor that training starts with, if a layer's own code makes it.

    `draw` returns it by the seed, and may keep what it made at once for several tensors until `release`.
    """

    draw: Callable[[int], Tensor]
    release: Callable[[], None]


@dataclass(frozen=True)
class Shard:
    """The position of a local parameter in its logical tensor of `global_shape`, and what it
    is along each axis of the mesh.

    `along` alone decides which slice is drawn, over which axes its gradient is summed, how it counts in the
    norm, and which ranks hold copies. A layer states the axes that it knows, also those of one rank;
    `Topology.placed` adds the others. If two axes split one dim, the second cuts the pieces of the first.
    """

    global_shape: tuple[int, ...]
    along: tuple[AxisPlacement, ...] = ()
    decay: bool = False  # weight decay applies (matrices, not biases and norms)
    # drawn from a normal distribution with this deviation; None: filled with `fill`
    init_std: float | None = None
    fill: float = 0.0
    # what training starts with; None: as the two fields above say
    first: FirstValue | None = field(default=None, compare=False, repr=False)
    matrices: tuple[LogicalMatrix, ...] = ()  # which logical matrices it has, if it is not one itself
    table: bool = False  # a row for each token or position: no map between hidden states
    # with mup: its fan-in over that at the base width, if it `is_hidden`; else its elements over those
    width: float = 1.0

    @property
    def logical_matrices(self) -> tuple[LogicalMatrix, ...]:
        """The linear maps within it: those that the layer states, or else a weight of two dims itself (not a
        bias, to which no decay applies).
        """
        return self.matrices or ((LogicalMatrix(""),) if self.decay and len(self.global_shape) == 2 else ())

    @property
    def is_hidden(self) -> bool:
        """Whether it holds linear maps between hidden states, for which there are rules
        of their own (Muon).
        """
        return bool(self.logical_matrices) and not self.table

    def interval(self, dim: int) -> tuple[int, int]:
        """The first index along `dim` that this rank holds, and the one after its last."""
        start, stop = 0, self.global_shape[dim]
        for along in self.along:
            if along.dim == dim:
                piece = -(-(stop - start) // along.count)
                start, stop = (
                    min(start + along.index * piece, stop),
                    min(start + (along.index + 1) * piece, stop),
                )
        return start, stop

    @property
    def offset(self) -> tuple[int, ...]:
        """Position of the local tensor's first element in the logical tensor."""
        return tuple(self.interval(dim)[0] for dim in range(len(self.global_shape)))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the piece that this rank holds."""
        return tuple(stop - start for start, stop in map(self.interval, range(len(self.global_shape))))

    @property
    def partial_over(self) -> tuple[str, ...]:
        """The axes over which its gradient is summed."""
        return tuple(along.axis for along in self.along if along.partial and along.count > 1)

    @property
    def split_over(self) -> tuple[str, ...]:
        """The axes over which the logical tensor is divided."""
        return tuple(along.axis for along in self.along if along.dim is not None and along.count > 1)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The dims along which it is split, or would be with more ranks.

        They are the same in every layout.
        """
        return tuple(dict.fromkeys(along.dim for along in self.along if along.dim is not None))

    def copies(self, but: Container[str] = ()) -> int:
        """How many ranks hold this piece, along all axes but those in `but`.

        In a norm over all ranks, each copy counts 1 / copies.
        """
        return prod(along.count for along in self.along if along.dim is None and along.axis not in but)

    def copied_along(self, but: Container[str] = ()) -> tuple[AxisPlacement, ...]:
        """The axes, `but` some, along which other ranks hold this piece too."""
        return tuple(
            along for along in self.along if along.dim is None and along.count > 1 and along.axis not in but
        )

    @property
    def copied(self) -> tuple[AxisPlacement, ...]:
        """See `TensorSlice`."""
        return self.copied_along()

    @property
    def counted(self) -> bool:
        """Whether this rank's copy is the first."""
        return not any(along.index for along in self.copied)

    @property
    def box(self) -> TensorSlice:
        """Its position alone."""
        return TensorSlice(self.global_shape, self.offset, self.local_shape, self.copied)


def split(group: Group, dim: int) -> AxisPlacement:
    """Split along `dim` over the ranks of a group."""
    return AxisPlacement(group.name, group.rank, group.size, dim=dim)


def replicated(group: Group, *, partial: bool = False) -> AxisPlacement:
    """Whole on every rank of a group.

    With `partial`, each rank applies it only to its own tokens or heads.
    """
    return AxisPlacement(group.name, group.rank, group.size, partial=partial)


def boxes_of_range(piece: "TensorSlice | Shard", start: int, stop: int) -> Iterator[tuple[int, TensorSlice]]:
    """Cuts elements `start` to `stop` (excluded) of a piece, row after row, into boxes: (first element, box).

    A range may begin and end within a row, so in every dim it is the end of one row, some whole rows, and the
    beginning of another.
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
        yield done, TensorSlice(piece.global_shape, moved, shape, piece.copied)
        done += prod(shape)


def overlap(
    a_offset: tuple[int, ...], a_shape: tuple[int, ...], b_offset: tuple[int, ...], b_shape: tuple[int, ...]
) -> tuple[slice, ...] | None:
    """The overlap of two boxes of one tensor, in the tensor's coordinates; None if they share no element.

    Boxes of a 0-dim tensor share its only element: the result is then `()`.
    """
    starts = [max(a, b) for a, b in zip(a_offset, b_offset, strict=True)]
    stops = [min(a + m, b + n) for a, m, b, n in zip(a_offset, a_shape, b_offset, b_shape, strict=True)]
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return None
    return tuple(slice(start, stop) for start, stop in zip(starts, stops, strict=True))


def relative(box: tuple[slice, ...], offset: tuple[int, ...]) -> tuple[slice, ...]:
    """`box` in coordinates that begin at `offset`."""
    return tuple(slice(s.start - start, s.stop - start) for s, start in zip(box, offset, strict=True))


def piece_key(name: str, taken: Container[str]) -> str:
    """A key for another piece of the logical tensor `name`: the name itself, or the name with #2, #3, …"""
    return next(key for n in count(1) if (key := piece_name(name, n)) not in taken)


def piece_name(name: str, number: int) -> str:
    """The key of piece `number` (from 1) of the logical tensor `name`."""
    return name if number == 1 else f"{name}#{number}"


def piece_number(key: str) -> int:
    """The number of the piece that a key names."""
    return int(key.partition("#")[2] or 1)


def logical_name(key: str) -> str:
    """The name of the logical tensor of a piece."""
    return key.partition("#")[0]


def new_parameter(shard: Shard, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """An uninitialised local parameter for `shard`; `model.initial` fills it once the model is
    complete and it has its full name.
    """
    parameter = nn.Parameter(torch.empty(shard.local_shape, dtype=dtype, device=device))
    parameter.shard = shard  # type: ignore[attr-defined]
    return parameter


def hold(parameter: nn.Parameter, tensor: Tensor) -> None:
    """Lets a parameter, which may be on `meta`, be `tensor` from now on; it stays the
    same object wherever it is known.
    """
    if not parameter.is_meta:
        parameter.data = tensor
        return
    # A version of its own: what is gathered into the same buffer meanwhile does not change this one.
    real = nn.Parameter(tensor.data, parameter.requires_grad)
    real.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, real)


def materialise(parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    """Gives those on `meta` memory on `device`: zeros, for somebody to fill."""
    for parameter in parameters:
        if parameter.is_meta:
            hold(parameter, torch.zeros_like(parameter, device=device))


def shard_of(parameter: Tensor) -> Shard:
    """The `Shard` record of a parameter. Every parameter of a megacore model has one."""
    shard = getattr(parameter, "shard", None)
    assert shard is not None, (
        "parameter without a shard record: create it with distributed.shard.new_parameter"
    )
    return shard
