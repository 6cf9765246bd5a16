"""How the fsdp engine divides a rank's parameters: units, each of which is gathered and summed as a whole.

A block is a unit, and so are all other parameters of a stage together, and the weights of a module that are
summed over other ranks than those around it. FSDP2 deals the rows of every parameter to the shards, the same
number to each; where they do not divide, the wire and a shard's memory have rows of zeros.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from megacore.config.schema import Config
from megacore.pipeline.partition import placement_of
from megacore.tools.choices.partition import partitioned
from megacore.tools.planner.parameters import Parameter, stage_parameters

if TYPE_CHECKING:
    from megacore.distributed.hierarchical_reduce import Levels
    from megacore.distributed.topology import Topology


@dataclass(frozen=True)
class Unit:
    """Numbers of a unit on one tensor rank."""

    block: int  # its number on the rank, from 1; 0: outside of blocks
    shards: tuple[str, int]  # the ranks that divide it, by name and number
    copies: tuple[str, int]  # and those that hold a shard
    padded: int  # of a shard, rows of zeros included
    trained: int  # of these, with gradients
    own: dict[str, int]  # of a shard without rows of zeros, by parameter that is trained
    frozen: int  # and of those that are not
    # of parameters, the axes of ranks with the same tokens over which gradients are summed
    partial: dict[str, tuple[str, ...]]


def divides_parameters(config: Config) -> bool:
    """Whether the fsdp engine has anything to divide."""
    return config.engine.kind == "fsdp" and config.token_ranks > 1


def units_of(config: Config, rank: int, tensor_rank: int = 0, data_rank: int = 0) -> list[Unit]:
    """The units of a rank of the pipeline, on one of its tensor ranks and of those that divide tokens, the
    first of which are the fullest.
    """
    from megacore.tools.planner.on_meta import Hosts

    where, numbers = Hosts(config, rank, tensor_rank, data_rank), count(1)
    stages = [
        stage_parameters(config, stage, tensor_rank) for stage in placement_of(partitioned(config))[rank]
    ]
    members = (
        pair for own in stages for pair in ((0, own.ends), *((next(numbers), block) for block in own.blocks))
    )
    return [unit for number, parameters in members for unit in _units(number, parameters, where)]


def _units(number: int, members: Iterable[Parameter], where: "Topology") -> list[Unit]:
    """The units of one block, or of what stands outside: that of its usual parameters,
    and of each module with others.
    """
    modules: dict[tuple[str, tuple[str, ...]], list[Parameter]] = {}
    for parameter in members:
        module = "" if parameter.tokens == where.token_axes else parameter.name.rpartition(".")[0]
        modules.setdefault((module, parameter.tokens), []).append(parameter)
    return [_unit(number, where.levels_along(*tokens), own) for (_, tokens), own in modules.items()]


def _unit(number: int, levels: "Levels", members: Iterable[Parameter]) -> Unit:
    shards, shard_rank = levels.within.size, levels.within.rank
    padded, trained, own, frozen, partial = 0, 0, dict[str, int](), 0, dict[str, tuple[str, ...]]()
    for parameter in members:
        each = -(-parameter.rows // shards) * (parameter.elements // parameter.rows)
        padded += each
        here = min((shard_rank + 1) * each, parameter.elements) - min(shard_rank * each, parameter.elements)
        if parameter.frozen:
            frozen += here
            continue
        trained += each
        own[parameter.name] = here
        if parameter.partial:
            partial[parameter.name] = parameter.partial
    between = levels.between.name, levels.between.size
    return Unit(number, (levels.within.name, shards), between, padded, trained, own, frozen, partial)
