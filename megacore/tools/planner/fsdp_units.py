"""How the fsdp engine divides a rank's parameters: units, each of which is gathered and summed as a whole.

A block is a unit, and so are all other parameters of a stage together. FSDP2 deals the rows of every parameter to the shards, the same
number to each; where they do not divide, the wire and a shard's memory have rows of zeros.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from megacore.config.schema import Config
from megacore.pipeline.partition import placement_of
from megacore.tools.choices.partition import partitioned
from megacore.tools.planner.parameters import Parameter, stage_parameters


@dataclass(frozen=True)
class Unit:
    """Numbers of a unit on one tensor rank."""

    block: bool
    padded: int  # of a shard, rows of zeros included
    trained: int  # of these, with gradients
    own: dict[str, int]  # of a shard without rows of zeros, by parameter that is trained
    frozen: int  # and of those that are not
    partial: frozenset[str]  # parameters whose gradients tensor ranks sum


def divides_parameters(config: Config) -> bool:
    """Whether the fsdp engine has anything to divide."""
    return config.engine.kind == "fsdp" and config.token_ranks > 1


def units_of(config: Config, rank: int, tensor_rank: int = 0, shard_rank: int = 0) -> list[Unit]:
    """The units of a rank of the pipeline, on one of its tensor ranks and of its shards, the first of which are the fullest."""
    found, shards = [], config.shard_size
    for stage in placement_of(partitioned(config))[rank]:
        own = stage_parameters(config, stage, tensor_rank)
        found += [_unit(shards, False, own.ends, shard_rank)] if own.ends else []
        found += [_unit(shards, True, block, shard_rank) for block in own.blocks]
    return found


def _unit(shards: int, block: bool, members: Iterable[Parameter], shard_rank: int) -> Unit:
    padded, trained, own, frozen, partial = 0, 0, dict[str, int](), 0, set()
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
            partial.add(parameter.name)
    return Unit(block, padded, trained, own, frozen, frozenset(partial))
