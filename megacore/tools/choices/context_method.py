"""How long context ranks wait for each other's keys and values, by method
(`parallel.context_method`), and which method is fastest.

With n keys and values of a rank, q its queries and c ranks, a block and microbatch costs what nothing hides:

| method | forward | backward |
|---|---|---|
| gather | a gather of c·n, before attention begins | another, and a scatter of the gradients |
| ring | c-1 times what a transfer of n takes longer than an c-th of attention | as often twice a transfer,
and the gradients' way home | | ulysses | exchanges of q, keys, values and the output, before and behind
attention | as many |

Ring also merges its parts' outputs in fp32. Its transfers are messages from neighbour to neighbour: between
machines a rank has one port, where a gather uses those of all its ranks. Where attention over pieces of
sequences is slower than over whole ones, gather and ring also take the difference (`pieces_rate`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, get_args

from megacore.tools.choices.devices import KNOWN, MACHINE, known_as

Method = Literal["gather", "ring", "ulysses"]
METHODS: tuple[Method, ...] = get_args(Method)
# bytes a feature to add a part to the output: it is read and written in fp32, and the part is read
MERGED = 10
# times the forward: five products for two, because the scores are computed again (Dao 2023)
BACKWARD_ATTENTION = 2.5
DEVICE = "h100"  # whose facts count for a GPU that is not known
# Parts of what makers state, as for the planner's own runs (`tools/planner/fitted.json`).
OF_PEAK, OF_MEMORY, OF_LINK = 0.5, 0.8, 0.8
CALL = 2e-5  # seconds that a collective takes besides hops and bytes


@dataclass(frozen=True)
class Divided:
    """Attention of a block over a microbatch, on one of the ranks that divide its tokens and heads."""

    context: int
    tensor: int
    tokens: int  # queries of the rank
    seq: int
    heads: float  # of a tensor rank
    kv_heads: float
    head_size: int
    element: int  # bytes

    @property
    def size(self) -> float:
        """Features of the query heads."""
        return self.heads * self.head_size


class Level(NamedTuple):
    """Links that join `ranks` consecutive ranks; None: any number."""

    ranks: int | None
    rate: float  # bytes a second that one rank sends
    latency: float  # seconds a hop


@dataclass(frozen=True)
class Links:
    """How ranks are joined: the inside of a machine first, then what joins machines."""

    levels: tuple[Level, ...]
    call: float  # seconds that any collective takes besides hops and bytes

    def collective(self, share: float, moved: float, size: int, stride: int = 1) -> float:
        """Seconds of a ring of `size` ranks that are `stride` apart, over `moved` bytes of the whole.

        `share` is 1 for a gather or a scatter, and 2 for a sum, which is both. A ring passes each link once a
        round. Where it leaves a machine, it uses the links of all its ranks there.
        """
        if size <= 1 or moved <= 0:
            return 0.0
        inside, slowest, hops = 1, math.inf, 0.0
        for level in self.levels:
            within = size if level.ranks is None else min(size, max(1, level.ranks // stride))
            if within > inside:
                slowest = min(slowest, level.rate * inside)
                hops += (within // inside - 1) * level.latency
                inside = within
        return self.call + share * (hops + moved * (size - 1) / size / slowest)

    def exchange(self, moved: float, size: int, stride: int = 1) -> float:
        """Seconds in which each of `size` ranks, `stride` apart, sends an equal part of
        its `moved` bytes to every other.

        What leaves a machine goes through the rank's own port, while the rest goes through the links inside.
        """
        if size <= 1 or moved <= 0:
            return 0.0
        inside, longest, latency = 1, 0.0, 0.0
        for level in self.levels:
            within = size if level.ranks is None else min(size, max(1, level.ranks // stride))
            if within > inside:
                longest = max(longest, moved * (within - inside) / size / level.rate)
                latency = max(latency, level.latency)
                inside = within
        return self.call + latency + longest

    def transfer(self, moved: float, distance: int) -> float:
        """Seconds of a message to the rank that is `distance` away, without the call."""
        level = next(
            (level for level in self.levels if level.ranks is None or distance < level.ranks), self.levels[-1]
        )
        return level.latency + moved / level.rate


@dataclass(frozen=True)
class Rates:
    """A device and its links: operations of attention, and bytes of memory, a second."""

    links: Links
    operations: float
    memory: float = math.inf
    ring_hidden: float = 1.0  # of attention, behind which a ring passes keys and values on
    # of attention over whole sequences: its speed over a method's pieces
    pieces_rate: Mapping[str, float] = field(default_factory=dict)


# Ranks of one machine's CPU over gloo, on which nothing overlaps. Four ranks on two cores of an EPYC measured
# attention over 4,096 tokens, forward and backward (`python -m benchmarks.context --tokens 4096`,
# 2026-11-22): a rank's operations a second over whole sequences, the bytes that it sends, and how much slower
# attention is over pieces, whose products are smaller and whose gradients are added up.
CPU = Rates(
    Links((Level(None, 6.5e8, 1e-4),), CALL),
    3e10,
    ring_hidden=0.0,
    pieces_rate={"gather": 0.79, "ring": 0.86},
)


def rates(device: str, precision: str) -> Rates:
    """Of `cpu`, or of a GPU by its name, which is `DEVICE` if it is not known."""
    if device == "cpu":
        return replace(CPU, operations=CPU.operations / (2 if precision == "fp64" else 1))
    facts = KNOWN[known_as(device) or DEVICE]
    peak = facts.peaks.get(precision, facts.peaks["fp16"])
    levels = Level(MACHINE, OF_LINK * facts.link, 5e-6), Level(None, OF_LINK * facts.port, 2e-5)
    return Rates(Links(levels, CALL), OF_PEAK * peak, OF_MEMORY * facts.memory)


def exposed(own: Divided, method: str, rates: Rates, attention: tuple[float, float]) -> tuple[float, float]:
    """Seconds of forward and backward that a block's context ranks add to those of
    `attention`, forward and backward.
    """
    c, t, e = own.context, own.tensor, own.element
    if c == 1:
        return 0.0, 0.0
    keys = 2 * e * own.tokens * own.kv_heads * own.head_size
    forward, backward = (seconds * (1 / rates.pieces_rate.get(method, 1.0) - 1) for seconds in attention)
    if method == "ring":
        step = rates.links.call + rates.links.transfer(keys, t * (c - 1))
        # three quarters of queries meet a rank's keys
        forward += MERGED * own.tokens * own.size / rates.memory * 3 / 4 * c
        hidden = [seconds / c * rates.ring_hidden for seconds in attention]
        return forward + (c - 1) * max(0.0, step - hidden[0]), backward + (c - 1) * max(
            0.0, 2 * step - hidden[1]
        ) + step
    if method == "ulysses":
        dealt = e * own.tokens * own.head_size * max(own.kv_heads, c)
        one = 2 * (rates.links.exchange(e * own.tokens * own.size, c, t) + rates.links.exchange(dealt, c, t))
        return forward + one, backward + one
    gathered = rates.links.collective(1.0, keys * c, c, t)
    return forward + gathered, backward + 2 * gathered


def fastest(own: Divided, rates: Rates, *, again: bool, exchanges: bool) -> Method:
    """The method whose ranks wait least in forward and backward, and `again` in a
    recomputed forward; of equals the first.

    `exchanges`: whether the heads can be dealt to the ranks, as ulysses needs it.
    """
    attention = 2 * own.tokens * own.seq * own.size / rates.operations  # of half of all pairs

    def waits(method: Method) -> float:
        forward, backward = exposed(own, method, rates, (attention, BACKWARD_ATTENTION * attention))
        return (2 if again else 1) * forward + backward

    return min((method for method in METHODS if exchanges or method != "ulysses"), key=waits)
