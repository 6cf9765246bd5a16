"""Which rank computes the update of which whole parameter, and what of each parameter every rank holds.

From placements alone.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from math import prod
from typing import Any

from megacore.config.optim_groups import ParameterGroup, ParameterGroups
from megacore.distributed.communicator import SOLO, Group
from megacore.distributed.shard import Shard, TensorSlice, boxes_of_range
from megacore.distributed.topology import Topology, fsdp_holders, fsdp_products
from megacore.engine.whole_matrices import matrices_of
from megacore.optimizers.rule import Rule

# elements: so many smaller parameters of an owner are exchanged at once as have about so many
TOGETHER = 2**20


@dataclass(frozen=True)
class Part:
    """What a rank holds of a parameter: of its piece, the elements from `start` up to
    `stop`, row after row.
    """

    shard: Shard
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Its elements."""
        return self.stop - self.start

    @cached_property
    def boxes(self) -> list[TensorSlice]:
        """It, as boxes, in the order of their elements."""
        return [box for _, box in boxes_of_range(self.shard, self.start, self.stop)]


@dataclass(frozen=True)
class Holders:
    """The ranks that hold a parameter.

    Those `within` hold all of it together; those `between` hold the same part as this rank.
    """

    within: Group
    between: Group
    # of `within` but those along which an engine divides: along some of them ranks may hold the same part
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """The update of a parameter, and the rank that computes it: by its places in both groups of `Holders`."""

    name: str
    owner: int  # in `within`
    copy: int  # in `between`


class Dealing:
    """Deals parameters with the same holders to all of these, the costliest first, each to
    whoever has least to do so far.

    Attributes:
        rounds: the tasks that are exchanged together. A rank owns some in each, while it has any left.
    """

    def __init__(
        self,
        shards: Mapping[str, Shard],
        costs: Mapping[str, float],
        holders: Holders,
        part_at: Callable[[str, int], Part],
    ) -> None:
        """`costs`: of each parameter's update. `part_at`: what a rank of the world holds of a parameter."""
        self.within, self.between, self.axes, self.part_at = (
            holders.within,
            holders.between,
            holders.axes,
            part_at,
        )
        together = max(1, TOGETHER // max(prod(shard.global_shape) for shard in shards.values()))
        loads = [(0.0, place) for place in range(self.within.size * self.between.size)]
        heapify(loads)
        had, self.rounds = [0] * len(loads), list[list[Task]]()
        for name in sorted(shards, key=lambda name: -costs[name]):
            load, place = loads[0]
            heapreplace(loads, (load + costs[name], place))
            owner, copy = divmod(place, self.between.size)  # copies take turns: they are on several hosts
            number, had[place] = had[place] // together, had[place] + 1
            if number == len(self.rounds):
                self.rounds.append([])
            self.rounds[number].append(Task(name, owner, copy))
        self._parts: dict[tuple[str, int], Part] = {}

    def part(self, name: str, place: int) -> Part:
        """What the rank at a place of `within` holds."""
        if (name, place) not in self._parts:
            self._parts[name, place] = self.part_at(name, self.within.ranks[place])
        return self._parts[name, place]

    def sends(self, task: Task, place: int) -> bool:
        """Whether the owner has its part from this place.

        Where several hold it, from the one that is as the owner is otherwise.
        """
        return self._copy(task.name, place) == self._copy(task.name, task.owner)

    def senders(self, task: Task) -> Iterator[tuple[int, Part]]:
        """The places from which the owner has the parts that make up the parameter, and these."""
        return (
            (place, self.part(task.name, place))
            for place in range(self.within.size)
            if self.sends(task, place)
        )

    def here(self, tasks: list[Task]) -> list[Task]:
        """Those whose owner is of this rank's copy."""
        return [task for task in tasks if task.copy == self.between.rank]

    def owned(self, tasks: list[Task]) -> list[Task]:
        """Those that this rank owns."""
        return [task for task in self.here(tasks) if task.owner == self.within.rank]

    def _copy(self, name: str, place: int) -> list[int]:
        return [
            along.index
            for along in self.part(name, place).shard.along
            if along.dim is None and along.axis in self.axes
        ]


def dealings_of(
    shards: Mapping[str, Shard],
    groups: ParameterGroups,
    holders: Callable[[Shard], Holders],
    part_at: Callable[[str, int], Part],
) -> dict[ParameterGroup, list[Dealing]]:
    """The dealings of each group whose rule needs whole matrices: one for all
    parameters with the same holders.
    """
    found: dict[ParameterGroup, dict[Holders, dict[str, Shard]]] = {}
    for name, shard in shards.items():
        if (group := groups.of(name, shard)).rule.whole:
            found.setdefault(group, {}).setdefault(holders(shard), {})[name] = shard
    return {
        group: [
            Dealing(own, {n: cost_of(group.rule, s) for n, s in own.items()}, held_by, part_at)
            for held_by, own in by_holders.items()
        ]
        for group, by_holders in found.items()
    }


def cost_of(rule: Rule[Any], shard: Shard) -> float:
    """The operations of a parameter's directions."""
    return sum(rule.cost(matrix.sizes(shard.global_shape)) for matrix in matrices_of(rule, shard))


def native_holders(mesh: Topology, shard: Shard, sharded: bool) -> Holders:
    """The holders of a parameter under the native engine; `sharded`: the ranks of a sum divide it."""
    tokens, beside = mesh.gradient_sum(shard).tokens, mesh.axes_beside(shard)
    divided, copied = (tokens, ()) if sharded else ((), tokens)
    return Holders(mesh.group(*divided, *beside), mesh.group(*copied) if copied else SOLO, beside)


def divided_holders(mesh: Topology, shard: Shard) -> Holders:
    """The same under the fsdp engine."""
    tokens, usual = mesh.gradient_sum(shard).tokens, mesh.token_axes
    return Holders(
        mesh.group(*fsdp_holders(tokens, usual)),
        mesh.group(*fsdp_products(tokens, usual)[1]),
        mesh.axes_beside(shard),
    )


def part_of_rows(shard: Shard, dims: int, shards: int, index: int) -> Part:
    """What FSDP2 gives to rank `index` of `shards` of a parameter that it sees in so many dims: the
    first of its own are rows there.
    """
    lead = len(shard.local_shape) - dims + 1
    rows, row = prod(shard.local_shape[:lead]), prod(shard.local_shape[lead:])
    each = -(-rows // shards)
    return Part(shard, min(each * index, rows) * row, min(each * (index + 1), rows) * row)
