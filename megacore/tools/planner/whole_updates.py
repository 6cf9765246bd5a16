"""What the update of whole matrices costs a rank: the exchange with owners, the room for it, and the
operations. The engine's own dealing says it, from placements on `meta`.
"""

from dataclasses import dataclass
from math import prod

from megacore.config.optim_groups import ParameterGroup, ParameterGroups
from megacore.config.precision import GRADIENT_BYTES
from megacore.config.schema import Config
from megacore.distributed.axes import called
from megacore.distributed.shard import Shard, shard_of
from megacore.engine.flat_buffer import PartsOfBuffers
from megacore.engine.owners import (
    Dealing,
    Part,
    cost_of,
    dealings_of,
    divided_holders,
    native_holders,
    part_of_rows,
)
from megacore.engine.whole_matrices import own_state_shapes
from megacore.pipeline.partition import placement_of
from megacore.tools.choices.partition import partitioned
from megacore.tools.planner.fsdp_units import divides_parameters
from megacore.tools.planner.on_meta import Hosts, buffers
from megacore.tools.planner.parameters import stage_parameters
from megacore.tools.planner.traffic import Transfer


@dataclass(frozen=True)
class Place:
    """A rank: of the pipeline, of its tensor ranks, and of the ranks that divide tokens."""

    pipeline: int
    tensor: int = 0
    data: int = 0


@dataclass(frozen=True)
class WholeUpdates:
    """The dealings of a rank."""

    shards: dict[str, Shard]
    dealings: dict[ParameterGroup, list[Dealing]]

    @property
    def own_numbers(self) -> int:
        """The numbers of state of the matrices that the rank owns, beside those for each element."""
        every = (
            (group, task.name) for group, d in self.each for tasks in d.rounds for task in d.owned(tasks)
        )
        return sum(
            prod(shape)
            for group, name in every
            for shape in own_state_shapes(group.rule, self.shards[name]).values()
        )

    @property
    def operations(self) -> float:
        """What the rank computes of directions."""
        owned = (
            (group, task.name) for group, d in self.each for tasks in d.rounds for task in d.owned(tasks)
        )
        return sum(cost_of(group.rule, self.shards[name]) for group, name in owned)

    @property
    def each(self) -> list[tuple[ParameterGroup, Dealing]]:
        """Every dealing with its group."""
        return [(group, dealing) for group, dealings in self.dealings.items() for dealing in dealings]

    def room(self) -> int:
        """About how many elements an update needs for itself at its fullest: of one round what came, went,
        and is computed from it, and of its neighbours what travels.
        """
        most = 0
        for _, dealing in self.each:
            own = [
                sum(dealing.part(task.name, dealing.within.rank).size for task in tasks)
                for tasks in dealing.rounds
            ]
            owned = [
                sum(prod(self.shards[task.name].global_shape) for task in dealing.owned(tasks))
                for tasks in dealing.rounds
            ]
            most = max(most, *(4 * a + 12 * b for a, b in zip(own, owned, strict=True)))
        return most

    def transfers(self, config: Config) -> list[Transfer]:
        """What the rank sends and receives; of an exchange the larger of both counts."""
        each, found = GRADIENT_BYTES[config.train.precision], []
        for _, dealing in self.each:
            within, between, me = dealing.within, dealing.between, dealing.within.rank
            exchanged, copied, calls, copies = 0, 0, 0, 0
            for tasks in dealing.rounds:
                here, owned = dealing.here(tasks), dealing.owned(tasks)
                own = {task.name: dealing.part(task.name, me).size for task in tasks}
                if here:
                    came = sum(
                        part.size for task in owned for place, part in dealing.senders(task) if place != me
                    )
                    went = sum(
                        own[task.name] for task in here if task.owner != me and dealing.sends(task, me)
                    )
                    back = sum(
                        dealing.part(task.name, place).size
                        for task in owned
                        for place in range(within.size)
                        if place != me
                    )
                    exchanged += max(came, went) + max(
                        back, sum(own[task.name] for task in here if task.owner != me)
                    )
                    calls += 2
                copied += sum(own.values())
                copies += len({task.copy for task in tasks})
            names = [called(tuple(group.name.split("×"))) for group in (within, between)]
            found.append(Transfer(names[0], "exchange", within.size, exchanged, each, calls))
            found.append(Transfer(names[1], "broadcast", between.size, copied, each, copies))
        return found


def whole_updates(config: Config, place: Place, host_size: int = 8) -> WholeUpdates | None:
    """The dealings of a rank; None if no rule needs whole matrices."""
    groups = ParameterGroups(config.optim)
    if not any(group.rule.whole for group in groups.every):
        return None
    where = Hosts(config, place.pipeline, place.tensor, place.data, host_size)
    owned = {
        p.name: p.tensor
        for stage in placement_of(partitioned(config))[place.pipeline]
        for p in stage_parameters(config, stage, place.tensor).all
        if not p.frozen
    }
    shards = {name: where.placed(shard_of(tensor), name) for name, tensor in owned.items()}
    if divides_parameters(config):

        def part_at(name: str, rank: int) -> Part:
            shard = shards[name]
            over = where.gradient_sum(shard)
            shards_of_a_copy = over.levels.within.size
            number = where.owner_index(rank, over.tokens) % shards_of_a_copy
            return part_of_rows(where.shard_at(shard, rank), owned[name].dim(), shards_of_a_copy, number)

        return WholeUpdates(
            shards, dealings_of(shards, groups, lambda shard: divided_holders(where, shard), part_at)
        )
    laid_out = buffers(config, where, [(name, tensor, (0,)) for name, tensor in owned.items()])
    parts = PartsOfBuffers(laid_out, where, shards)
    return WholeUpdates(
        shards,
        dealings_of(shards, groups, lambda s: native_holders(where, s, config.engine.shard_optimizer), parts),
    )
