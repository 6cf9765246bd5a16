"""Divides ranks that sum gradients by their hosts: sums within a host come first, so that
links between hosts carry less.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megacore.distributed.communicator import Group


@dataclass(frozen=True)
class Levels:
    """The ranks that sum gradients, as the product of two groups. In one level `within` is this rank alone.

    Under the fsdp engine they are the ranks that hold the shards of one copy, and those that hold copies of
    one shard.
    """

    within: Group  # on this host
    between: Group  # on each host the rank with this one's place there

    @property
    def size(self) -> int:
        """How many ranks there are: equal parts into which a tensor is divided."""
        return self.within.size * self.between.size

    @property
    def owners(self) -> Group:
        """The ranks in the order of their parts, without a wire: the parts of those on one
        place of all hosts are neighbours.
        """
        return Group(
            "owners", tuple(range(self.size)), self.within.rank * self.between.size + self.between.rank
        )


@dataclass(frozen=True)
class GradientSum:
    """Over which ranks a gradient is summed, by the placement of its parameter.

    Buckets hold parameters of one sum.
    """

    # the axes whose ranks see other tokens of what it was applied to; they may divide the optimizer's state
    tokens: tuple[str, ...]
    levels: Levels  # the ranks along `tokens`
    first: tuple[Group, ...]  # along each other axis, over which gradients are partial: summed before
    # ranks of other stages that use the parameter too: summed when the plan says so, each such parameter by
    # itself
    last: Group | None


def by_host(
    ranks: Sequence[int], hosts: Sequence[int], rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The ranks of `ranks`, ascending, on this `rank`'s host, and those that have its place on each host.

    `hosts` has a number for each rank of the world; a host's ranks need not be neighbours. None if two levels
    are no use or not
    possible: there is one host, or one rank on each, or they have unequal numbers of ranks.
    """
    on: dict[int, list[int]] = {}
    for other in ranks:
        on.setdefault(hosts[other], []).append(other)
    own = on[hosts[rank]]
    if len(on) == 1 or len(own) == 1 or any(len(there) != len(own) for there in on.values()):
        return None
    place = own.index(rank)
    return tuple(own), tuple(sorted(there[place] for there in on.values()))
