"""How the native engine lays a rank's parameters out: flat buffers, cut into the buckets that it reduces.

The engine's own code says it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megacore.config.optim_groups import ParameterGroup
from megacore.config.schema import Config
from megacore.pipeline.partition import placement_of
from megacore.tools.choices.partition import partitioned
from megacore.tools.planner.parameters import Parameter, stage_parameters


@dataclass(frozen=True)
class Buffer:
    """Parameters that are treated alike: of one chunk and group, decayed or not,
    and summed over the same ranks.
    """

    group: ParameterGroup
    summed_over: tuple[str, ...]  # besides ranks with other tokens: tp, tied
    # the ranks that sum it within a host, by name and number; in one level this one alone
    within: tuple[str, int]
    between: tuple[str, int]  # and those that do then
    buckets: list[int]  # elements of each, gaps included
    # elements of the two messages that travel instead of each, with compression to low rank
    messages: list[int]

    @property
    def size(self) -> int:
        """Elements, gaps included."""
        return sum(self.buckets)

    @property
    def ranks(self) -> int:
        """Those that see other tokens, and sum it."""
        return self.within[1] * self.between[1]


def data_ranks_of_a_host(config: Config, host_size: int) -> int:
    """The data ranks that sum gradients within a host of `host_size` ranks: 1 with one level,
    or where two are not possible.
    """
    return ranks_of_a_host(
        config, host_size, range(0, config.token_ranks * config.parallel.tensor, config.parallel.tensor)
    )


def ranks_of_a_host(config: Config, host_size: int, ranks: Sequence[int]) -> int:
    """The same of any ranks that are equally far apart."""
    each = 1 if len(ranks) == 1 else host_size // (ranks[1] - ranks[0])
    return (
        each if config.engine.reduce_levels == 2 and 1 < each < len(ranks) and len(ranks) % each == 0 else 1
    )


def buffers_of(config: Config, rank: int, tensor_rank: int = 0, host_size: int = 8) -> list[Buffer]:
    """The buffers of a rank of the pipeline, on one of its tensor ranks, in the order in
    which backward first touches them.
    """
    from megacore.tools.planner.on_meta import Hosts, buffers, messages_of, named

    owned: dict[str, tuple[Parameter, tuple[int, ...]]] = {}
    for chunk, stage in enumerate(placement_of(partitioned(config))[rank]):
        for parameter in stage_parameters(config, stage, tensor_rank).all:
            first, chunks = owned.get(parameter.name, (parameter, ()))
            owned[parameter.name] = first, (*chunks, chunk)
    listed = [
        (name, parameter.tensor, chunks)
        for name, (parameter, chunks) in owned.items()
        if not parameter.frozen
    ]
    found = buffers(config, Hosts(config, rank, tensor_rank, host_size=host_size), listed)
    return [
        Buffer(
            buffer.group,
            (
                *(group.name for group in buffer.sum.first if group.size > 1),
                *(["tied"] if buffer.sum.last else []),
            ),
            named(buffer.sum.levels.within),
            named(buffer.sum.levels.between),
            [bucket.stop - bucket.start for bucket in buffer.buckets],
            messages_of(config, buffer),
        )
        for buffer in found
    ]
