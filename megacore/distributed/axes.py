"""The axes of the mesh as data: their names, their order, and what ranks along each of them do.

Standard library only.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

# groups that follow from the axes: those of FSDP2, and of all ranks
TAKEN = ("shard", "replicate", "holders", "world")


@dataclass(frozen=True)
class Axis:
    """One dimension of the mesh.

    `samples` and `tokens` are two questions, because ranks may read the same samples and compute on different
    tokens of them.
    """

    name: str
    title: str  # the key in `parallel` that has its size
    layers: bool = False  # ranks along it hold different layers: nothing is copied
    samples: bool = False  # they read different samples
    # they compute on different tokens: gradients of parameters that all hold are summed over them
    tokens: bool = False
    # although they do, weights may be split over them (experts): there are groups along the other such axes
    splits: bool = False
    rare: bool = False  # most runs have one rank along it, and are not told so

    def __post_init__(self) -> None:
        assert self.name not in TAKEN, f"{self.name} is the name of another group of ranks"


# From the outermost, whose neighbours are far apart in rank, to the innermost. Tensor ranks communicate in
# every layer, so they are neighbours, on one node, where links are fastest; context ranks, which do so once a
# layer, come next. Pipeline ranks have the least traffic.
AXES = (
    Axis("pp", "pipeline", layers=True),
    Axis("dp", "data", samples=True, tokens=True),
    Axis("cp", "context", tokens=True, rare=True),
    Axis("tp", "tensor"),
)

# A second view of a stage's ranks, for experts: ranks along `ep` hold other experts, and those along `etp`
# parts of the same ones.
EXPERT_AXES = (
    Axis("pp", "pipeline", layers=True),
    Axis("edp", "expert_data", tokens=True),
    Axis("ep", "expert", tokens=True, splits=True),
    Axis("etp", "expert_tensor"),
)


def expert_view(sizes: Mapping[str, int], expert: int, expert_tensor: int) -> dict[str, int]:
    """Return the sizes of `EXPERT_AXES`, from those of `AXES`."""
    return {
        "pp": sizes["pp"],
        "edp": prod(sizes.values()) // (sizes["pp"] * expert * expert_tensor),
        "ep": expert,
        "etp": expert_tensor,
    }


def sums_of(axes: Sequence[Axis]) -> list[tuple[str, ...]]:
    """The products of axes over whose ranks gradients may be summed: all that divide tokens, but
    for those that split a weight.
    """
    splits = [axis.name for axis in axes if axis.splits]
    without = [set(left) for count in range(len(splits) + 1) for left in combinations(splits, count)]
    return [tuple(axis.name for axis in axes if axis.tokens and axis.name not in left) for left in without]


def called(product: Sequence[str], axes: Sequence[Axis] = AXES) -> str:
    """A short name for the ranks along a product of axes: those that sum most gradients are
    called by the axis of samples.
    """
    if tuple(product) == sums_of(axes)[0]:
        return next(axis.name for axis in axes if axis.samples)
    return "×".join(product)


def coordinates(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """A rank's coordinate along each axis. `sizes` go from the outermost axis to the innermost."""
    found = {}
    for name, size in reversed(list(sizes.items())):
        rank, found[name] = divmod(rank, size)
    return {name: found[name] for name in sizes}


def ranks_along(axes: Container[str], rank: int, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The ranks, ascending, that have the coordinates of `rank` along all axes but `axes`."""
    ranks, stride = [0], prod(sizes.values())
    for name, at in coordinates(rank, sizes).items():
        stride //= sizes[name]
        ranks = [
            first + stride * i for first in ranks for i in (range(sizes[name]) if name in axes else (at,))
        ]
    return tuple(ranks)


def place_text(rank: int, sizes: Mapping[str, int], axes: Sequence[Axis] = AXES) -> str:
    """A rank's coordinates in words, such as `pp 0, dp 1, tp 0`."""
    at = coordinates(rank, sizes)
    return ", ".join(f"{axis.name} {at[axis.name]}" for axis in axes if told(axis, sizes))


def describe(axes: Sequence[Axis], sizes: Mapping[str, int]) -> str:
    """The sizes as text, such as `pipeline 2 × data 4 × tensor 2`."""
    return " × ".join(f"{axis.title} {sizes[axis.name]}" for axis in axes if told(axis, sizes))


def told(axis: Axis, sizes: Mapping[str, int]) -> bool:
    """Whether a text about the mesh names the axis."""
    return sizes[axis.name] > 1 or not axis.rare


def divisors(number: int) -> list[int]:
    """The sizes that an axis of so many ranks can have: the divisors, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
