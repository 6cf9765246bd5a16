"""How the fsdp engine divides a rank's parameters: units, each of which is gathered and summed as a whole.

A block is a unit, and so are all other parameters of a stage together. FSDP2 deals the rows of every parameter to the shards, the same
number to each; where they do not divide, the wire and a shard's memory have rows of zeros.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from megacore.config.schema import Config
from megacore.pipeline.partition import placement_of, stage_layers
from megacore.tools.planner.parameters import Parameter, block_list, ends_list


@dataclass(frozen=True)
class Unit:
    """Numbers of a unit on one tensor rank."""

    block: bool
    padded: int  # of a shard, rows of zeros included
    own: dict[str, int]  # of a shard without them, by parameter
    partial: frozenset[str]  # parameters whose gradients tensor ranks sum


def divides_parameters(config: Config) -> bool:
    """Whether the fsdp engine has anything to divide."""
    return config.engine.kind == "fsdp" and config.token_ranks > 1


def units_of(config: Config, rank: int, tensor_rank: int = 0, shard_rank: int = 0) -> list[Unit]:
    """The units of a rank of the pipeline, on one of its tensor ranks and of its shards, the first of which are the fullest."""
    layers, found = stage_layers(config), []
    block = _unit(config, True, block_list(config), tensor_rank, shard_rank)
    for stage in placement_of(config)[rank]:
        ends = ends_list(config, stage)
        found += [_unit(config, False, ends, tensor_rank, shard_rank)] if ends else []
        found += [block] * len(layers[stage])
    return found


def _unit(config: Config, block: bool, members: Iterable[Parameter], tensor_rank: int, shard_rank: int) -> Unit:
    tensor, shards, padded, own, partial = config.parallel.tensor, config.shard_size, 0, {}, set()
    for parameter in members:
        elements = parameter.local(tensor, tensor_rank)
        # A product's rows: all dims but the last. A bias is a vector, whatever dims its layer gives it.
        last = len(parameter.shape) - 1
        row = Parameter("row", (parameter.shape[-1],), 0 if parameter.dim == last else None).local(tensor, tensor_rank)
        width = 1 if last == 0 or parameter.name.endswith(".bias") else row
        each = -(-(elements // width) // shards) * width
        padded += each
        own[parameter.name] = min((shard_rank + 1) * each, elements) - min(shard_rank * each, elements)
        if parameter.partial and tensor > 1:
            partial.add(parameter.name)
    return Unit(block, padded, own, frozenset(partial))
