"""What the planner asks of the layers and the engine themselves: they are built on `meta`, without content and without other ranks."""

from collections.abc import Sequence

import torch
from torch import nn

from megacore.config import Config
from megacore.config.engine import LowRankCompression
from megacore.config.optim_groups import ParameterGroups
from megacore.config.schema import resolved
from megacore.distributed.axes import AXES
from megacore.distributed.communicator import SOLO, Group
from megacore.distributed.hierarchical_reduce import Levels
from megacore.distributed.shard import Shard, shard_of
from megacore.distributed.topology import Topology
from megacore.engine.flat_buffer import FlatBuffer, lay_out, travelling_unit
from megacore.engine.low_rank import Messages
from megacore.model.stage import Stage
from megacore.tensor_parallel.linear import flatten_rows
from megacore.tools.choices.partition import partitioned

META = torch.device("meta")


class Hosts(Topology):
    """Where a rank stands on hosts."""

    def __init__(self, config: Config, pipeline_rank: int, tensor_rank: int = 0, ranks_within: int = 1, data_rank: int = 0) -> None:
        """`ranks_within`: those that sum gradients within a host. `data_rank`: of those that divide tokens."""
        self.ranks_within = ranks_within
        super().__init__(partitioned(config), (pipeline_rank * config.token_ranks + data_rank) * config.parallel.tensor + tensor_rank)

    def owner_index(self, rank: int, axes: Sequence[str]) -> int:
        """See `Topology`."""
        host, place = divmod(super().owner_index(rank, axes), self.ranks_within)
        return place * (self.group(*axes).size // self.ranks_within) + host

    def levels_along(self, *axes: str) -> Levels:
        """See `Topology`."""
        if not axes:
            return Levels(SOLO, SOLO)
        size = self.group(*axes).size
        within, between = (Group("", tuple(range(ranks)), 0) for ranks in (self.ranks_within, size // self.ranks_within))
        return Levels(within, between)


def stage_of(config: Config, layers: range, tensor_rank: int) -> Stage:
    """A stage with these layers. Its weights are the matrices whose rows FSDP2 divides."""
    stage = Stage(config, layers, Hosts(config, 0, tensor_rank), META)
    flatten_rows(stage)
    return stage


def logical_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Of the whole tensor."""
    return shard_of(parameter).global_shape


def summed_over_tensor_ranks(parameter: nn.Parameter) -> bool:
    """Whether a gradient is one rank's part of a sum over ranks that see the same tokens."""
    return not {axis.name for axis in AXES if not axis.tokens}.isdisjoint(shard_of(parameter).partial_over)


def buffers(config: Config, where: Hosts, owned: Sequence[tuple[str, nn.Parameter, tuple[int, ...]]]) -> list[FlatBuffer]:
    """The native engine's buffers of these parameters (see `lay_out`), without memory."""
    engine, shards = config.engine, dict[nn.Parameter, Shard]()
    for name, parameter, _ in owned:
        if parameter not in shards:
            shards[parameter] = where.placed(shard_of(parameter), name)
    placed = [(name, parameter, shards[parameter], chunks) for name, parameter, chunks in owned]
    sharded, travelling = engine.shard_optimizer, travelling_unit(engine)
    return lay_out(placed, ParameterGroups(config.optim), resolved(engine.bucket_mib), where, META, sharded=sharded, travelling=travelling)


def messages_of(config: Config, buffer: FlatBuffer) -> list[int]:
    """The elements of the two messages that stand for each bucket, with compression to low rank."""
    compression = config.engine.compression
    if not isinstance(compression, LowRankCompression):
        return []
    parts = buffer.sum.levels.within.size
    return [size for bucket in buffer.buckets for size in Messages(bucket.slots, compression.rank, parts).sizes]
