"""What is known of a layer that was measured (`measured.py`): bytes, operations, and what it sends."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from megacore.pipeline.schedule import Op


@dataclass(frozen=True)
class BlockLoad:
    """How the tokens of a step were spread over a block's experts: those of any rank are, of which it says
    how many rows go where (`dispatch.Expected`).
    """

    loads: tuple[float, ...]  # of each expert, as a part of the mean
    most: float = inf  # that an expert takes, likewise (`model.capacity_factor`)
    first: int = 0  # whose rows stand first, of the ranks that divide experts: so the first rank can play any

    def of_ranks(self, ranks: int) -> list[float]:
        """The load of each of `ranks` that divide the experts, as a part of the mean."""
        each = len(self.loads) // ranks
        return [
            sum(min(load, self.most) for load in self.loads[i : i + each]) / each
            for i in range(0, len(self.loads), each)
        ]

    def __call__(self, rows: int, ranks: int) -> Sequence[int]:
        """See the class."""
        ends = [round(rows * end / ranks) for end in accumulate(self.of_ranks(ranks), initial=0.0)]
        to = [end - begin for begin, end in pairwise(ends)]
        return to[self.first :] + to[: self.first]


Loads = Mapping[int, BlockLoad]  # of blocks with experts, by number; of others they are balanced
BALANCED: Loads = {}


class Sent(NamedTuple):
    """A collective of tensor or context ranks."""

    group: str
    operation: str
    size: int  # ranks
    elements: int  # of the larger tensor, of what is given and what comes
    element_bytes: int


class Attended(NamedTuple):
    """A call of fused attention: each of `queries` meets `keys`, over `size` features of all heads."""

    queries: int
    keys: int
    size: int
    causal: bool
    backward: bool


@dataclass
class Work:
    """What an action of a layer does."""

    # how often, by rows, inner dim and columns
    products: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    attention: Counter[Attended] = field(default_factory=Counter)
    sent: Counter[Sent] = field(default_factory=Counter)
    moved: int = 0  # bytes that all other operations read and write


@dataclass(frozen=True, eq=False)
class LayerCost:
    """What a layer does to a microbatch on a rank. Bytes."""

    kept: int  # of a forward until its backward
    waiting: int  # between the two parts of a split backward
    most: Mapping[Op, int]  # that live while an action runs: what it begins with, and what it makes
    work: Mapping[Op, Work]  # of a forward, and of a whole backward
    parameters: int  # their number

    @property
    def sent(self) -> Counter[Sent]:
        """What it sends in forward and backward, and how often."""
        return self.work[Op.FORWARD].sent + self.work[Op.BACKWARD].sent
