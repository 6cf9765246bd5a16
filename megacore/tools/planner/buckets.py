"""How the native engine lays a rank's parameters out: flat buffers, cut into the buckets that it reduces.

`engine/flat_buffer.py` lays real parameters out by the same rules, and a test compares both, bucket by bucket.
"""

from dataclasses import dataclass, field

from megacore.config.optim_groups import ParameterGroup, ParameterGroups
from megacore.config.precision import GRADIENT_BYTES
from megacore.config.schema import Config, resolved
from megacore.engine.alignment import ALIGNMENT
from megacore.pipeline.partition import placement_of
from megacore.tools.planner.parameters import Parameter, stage_list


@dataclass
class Buffer:
    """Parameters that are treated alike: of one chunk and group, decayed or not, and summed over the same further axes."""

    group: ParameterGroup
    summed_over: tuple[str, ...]  # tp, tied
    buckets: list[int] = field(default_factory=list)  # elements of each, gaps included
    open: bool = False  # the last bucket may still grow

    @property
    def size(self) -> int:
        """Elements, gaps included."""
        return sum(self.buckets)


def data_ranks_of_a_host(config: Config, host_size: int) -> int:
    """The data ranks that sum gradients within a host of `host_size` ranks: 1 with one level, or where two are not possible."""
    data, each = config.token_ranks, host_size // config.parallel.tensor
    return each if config.engine.reduce_levels == 2 and 1 < each < data and data % each == 0 else 1


def buffers_of(config: Config, rank: int, tensor_rank: int = 0, host_size: int = 8) -> list[Buffer]:
    """The buffers of a rank of the pipeline, on one of its tensor ranks, in the order in which backward first touches them."""
    placement, tensor = placement_of(config), config.parallel.tensor
    final = max(stage for stages in placement for stage in stages)
    ends = {place for place, stages in enumerate(placement) if {0, final} & set(stages)}
    tied = config.model.tie_embeddings and len(ends) > 1 and rank in ends
    owned: dict[str, tuple[int, Parameter]] = {}
    for chunk, stage in enumerate(placement[rank]):
        for parameter in stage_list(config, stage):
            owned.setdefault(parameter.name, (chunk, parameter))
    divided = config.engine.shard_optimizer or config.engine.reduce_dtype == "bf16" or data_ranks_of_a_host(config, host_size) > 1
    limit = resolved(config.engine.bucket_mib) * 2**20 / GRADIENT_BYTES[config.train.precision]
    unit = ALIGNMENT * (config.token_ranks if divided else 1)  # every data rank has an equal part, of its own or on the wire
    groups = ParameterGroups(config.optim)
    buffers: dict[tuple[int, ParameterGroup, bool, tuple[str, ...]], Buffer] = {}
    for chunk, parameter in reversed(owned.values()):
        over = (("tp",) if parameter.partial and tensor > 1 else ()) + (("tied",) if tied and parameter.name == "embedding.weight" else ())
        group = groups.of(parameter.name)
        buffer = buffers.setdefault((chunk, group, parameter.decays, over), Buffer(group, over))
        if not buffer.open:
            buffer.buckets.append(0)
        buffer.buckets[-1] += -(-parameter.local(tensor, tensor_rank) // ALIGNMENT) * ALIGNMENT
        buffer.open = buffer.buckets[-1] < limit
        if not buffer.open:
            buffer.buckets[-1] = -(-buffer.buckets[-1] // unit) * unit
    for buffer in buffers.values():
        if buffer.open:
            buffer.buckets[-1] = -(-buffer.buckets[-1] // unit) * unit
    return list(buffers.values())
