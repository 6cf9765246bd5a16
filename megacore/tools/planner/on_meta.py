"""What the planner asks of the layers and the engine themselves: they are built on `meta`, without
content and without other ranks.
"""

from collections.abc import Sequence

import torch
from torch import nn

from megacore.config import Config
from megacore.config.engine import LowRankCompression
from megacore.config.optim_groups import ParameterGroups
from megacore.config.schema import resolved
from megacore.distributed.axes import AXES, EXPERT_AXES, called
from megacore.distributed.buffers import ShardedBuffer, buffers_of
from megacore.distributed.communicator import SOLO, Group
from megacore.distributed.hierarchical_reduce import GradientSum, Levels
from megacore.distributed.shard import Shard, shard_of
from megacore.distributed.topology import Topology, fsdp_products
from megacore.engine.flat_buffer import FlatBuffer, lay_out, travelling_unit
from megacore.engine.low_rank import Messages
from megacore.model.stage import Stage
from megacore.pipeline.partition import layer_ranges, placement_of
from megacore.tensor_parallel.linear import flatten_rows
from megacore.tools.choices.devices import MACHINE
from megacore.tools.choices.partition import partitioned
from megacore.tools.planner.buckets import ranks_of_a_host
from megacore.tools.planner.fsdp_units import divides_parameters

META = torch.device("meta")


class Hosts(Topology):
    """Where a rank stands on hosts."""

    def __init__(
        self,
        config: Config,
        pipeline_rank: int,
        tensor_rank: int = 0,
        data_rank: int = 0,
        host_size: int = MACHINE,
    ) -> None:
        """`data_rank`: of those that divide tokens."""
        self.config, self.host_size = config, host_size
        super().__init__(
            partitioned(config),
            (pipeline_rank * config.token_ranks + data_rank) * config.parallel.tensor + tensor_rank,
        )

    def owner_index(self, rank: int, axes: Sequence[str]) -> int:
        """See `Topology`."""
        group = self.group(*axes)
        within = ranks_of_a_host(self.config, self.host_size, group.ranks)
        host, place = divmod(super().owner_index(rank, axes), within)
        return place * (group.size // within) + host

    def levels_along(self, *axes: str) -> Levels:
        """See `Topology`."""
        if not axes:
            return Levels(SOLO, SOLO)
        if divides_parameters(self.config):
            return Levels(*(self.group(*product) for product in fsdp_products(axes, self.token_axes)))
        group = self.group(*axes)
        within = ranks_of_a_host(self.config, self.host_size, group.ranks)
        if within == 1:
            return Levels(SOLO, group)
        name = called(self.token_axes if group.ranks == self.gradient_group.ranks else axes)
        named = {f"{name} within a host": within, f"{name} between hosts": group.size // within}
        return Levels(*(Group(level, tuple(range(size)), 0) for level, size in named.items()))


def stage_of(config: Config, layers: range, tensor_rank: int) -> Stage:
    """A stage with these layers. Its weights are the matrices whose rows FSDP2 divides."""
    stage = Stage(config, layers, Hosts(config, 0, tensor_rank), META)
    flatten_rows(stage)
    return stage


def logical_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Of the whole tensor."""
    return shard_of(parameter).global_shape


def partial_over(parameter: nn.Parameter) -> tuple[str, ...]:
    """The axes of ranks that see the same tokens, over which a gradient is one rank's part of a sum: tensor
    ranks', or those of an expert's parts.
    """
    same = {axis.name for axis in (*AXES, *EXPERT_AXES) if not axis.tokens}
    return tuple(axis for axis in shard_of(parameter).partial_over if axis in same)


def tokens_of(config: Config, parameter: nn.Parameter) -> tuple[str, ...]:
    """The axes of ranks that see other tokens, over which its gradient is summed."""
    where = Hosts(config, 0)
    return where.gradient_sum(where.placed(shard_of(parameter))).tokens


def named(group: Group) -> tuple[str, int]:
    """What traffic over a group is told under, and its ranks."""
    return called(group.name.split("×")), group.size


def counts_of(
    config: Config, rank: int, tensor_rank: int, host_size: int
) -> list[tuple[Sequence[tuple[str, int]], int, int]]:
    """What a rank of the pipeline sums for its layers' buffers behind a step (`distributed.buffers`): the
    groups, numbers and bytes of each.
    """
    where, own = Hosts(config, rank, tensor_rank, host_size=host_size), dict[str, ShardedBuffer]()
    for stage in placement_of(partitioned(config))[rank]:
        own |= buffers_of([Stage(config, layer_ranges(partitioned(config))[stage], where, META)])
    found: dict[tuple[GradientSum, str, int], int] = {}
    for buffer in own.values():
        key = where.gradient_sum(where.placed(buffer.shard)), buffer.reduction, buffer.value.itemsize
        found[key] = found.get(key, 0) + buffer.value.numel()
    groups = ((over, (*over.first, over.levels.within, over.levels.between)) for over, _, _ in found)
    return [
        ([named(g) for g in every], found[key], key[2]) for key, (_, every) in zip(found, groups, strict=True)
    ]


def buffers(
    config: Config, where: Hosts, owned: Sequence[tuple[str, nn.Parameter, tuple[int, ...]]]
) -> list[FlatBuffer]:
    """The native engine's buffers of these parameters (see `lay_out`), without memory."""
    engine, shards = config.engine, dict[nn.Parameter, Shard]()
    for name, parameter, _ in owned:
        if parameter not in shards:
            shards[parameter] = where.placed(shard_of(parameter), name)
    placed = [(name, parameter, shards[parameter], chunks) for name, parameter, chunks in owned]
    sharded, travelling = engine.shard_optimizer, travelling_unit(engine)
    return lay_out(
        placed,
        ParameterGroups(config.optim),
        resolved(engine.bucket_mib),
        where,
        META,
        sharded=sharded,
        travelling=travelling,
    )


def messages_of(config: Config, buffer: FlatBuffer) -> list[int]:
    """The elements of the two messages that stand for each bucket, with compression to low rank."""
    compression = config.engine.compression
    if not isinstance(compression, LowRankCompression):
        return []
    parts = buffer.sum.levels.within.size
    return [
        size for bucket in buffer.buckets for size in Messages(bucket.slots, compression.rank, parts).sizes
    ]
