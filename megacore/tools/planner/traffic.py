"""Predicts what each rank of the pipeline sends in a step, by group and operation,
and how long that takes at least.

Notation: T tokens of a microbatch (b·s), h hidden size, t tensor ranks, d data ranks, Ψ parameters of a rank.
A ring moves, of an all-reduced tensor of n elements, 2·n·(t-1)/t through every rank (Chan et al. 2007); of a
gathered or scattered tensor with n elements in all, n·(t-1)/t; point to point, n. So a rank sends, in
elements a step:

| what | sent |
|---|---|
| tensor, a layer and microbatch | 8·T·h·(t-1)/t: two sums forward, two backward |
| the same with sequence parallelism | as many, gathered and scattered; and 2·T·h·(t-1)/t to gather again what
backward did not keep | | with full recomputation | one sum more, 2·T·h·(t-1)/t (two, or 12 together, as
published: the block's last is not needed again) | | pipeline, a microbatch, boundary and direction | T·h,
with sequence parallelism T·h/t; and whatever else crosses that cut | | context, a layer and microbatch, by
gather | 2·k·T·(c-1)·3: keys and values gathered forward and backward, gradients scattered | | by ring |
2·k·T·((c-1)·2 + c): keys and values passed round twice, their gradients home |
| by ulysses | 2·(2a + 2k)·T·(c-1)/c: queries, keys, values and outputs exchanged, and their gradients; and an
fp32 number a head | | data | 2·Ψ·(d-1)/d: the gradients' sum; with a sharded optimizer scattered, and the
parameters gathered |
| data in two levels, n of d ranks on a host | 2·Ψ·(n-1)/n within it, and 2·Ψ/n·(d/n-1)/(d/n) between hosts |
| fsdp, m microbatches, n shards | 3·m·Ψ·(n-1)/n: blocks gathered forward and backward, gradients scattered;
without `reshard` 2·Ψ·(n-1)/n | | fsdp, d/n copies | 2·Ψ/n·(d/n-1)/(d/n): the gradients' sum over copies, once
|
| experts, a layer and microbatch, k of them a token, over e·x ranks | 4·k·T/t·x·h·(e·x-1)/(e·x): rows there
and back, and their gradients | | gradients of experts | as data's, over the d·t/(e·x) ranks that hold the
same |

What layers send over tensor and context ranks is measured on the layers (`choices.measured`); the table says
what comes of it for megacore's own. `rank_traffic` adds the ends of a step: loss, partial gradients, tied
embeddings, the gradient norm.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from megacore.config.engine import LowRankCompression
from megacore.config.implied import masks_targets, reshards
from megacore.config.optim_groups import ParameterGroups
from megacore.config.precision import ELEMENT_BYTES, GRADIENT_BYTES
from megacore.config.schema import Config
from megacore.pipeline.partition import placement_of, stage_layers
from megacore.tools.choices.activations import layer_costs
from megacore.tools.choices.layer_cost import BALANCED, Loads, Sent
from megacore.tools.choices.partition import partitioned
from megacore.tools.planner.buckets import Buffer, buffers_of
from megacore.tools.planner.fsdp_units import Unit, divides_parameters, units_of
from megacore.tools.planner.model_flow import ModelFlow, flow_of
from megacore.tools.planner.operations import Machine
from megacore.tools.planner.parameters import of_each_rank


@dataclass(frozen=True)
class Transfer:
    """`calls` of one operation over a group in a step, which carry `elements` in all.

    Elements are those of the tensor that is reduced or sent, or of the whole that is gathered or scattered.
    """

    # tp, cp, dp (and cp with it, if there are both; or dp within a host, dp between hosts; or, under fsdp,
    # shard and replicate), pp, tied (the pipeline's two ends), loss or norm (summed over all ranks); of
    # experts ep, ep×etp, and edp as dp
    group: str
    # all_reduce, all_gather, reduce_scatter, all_to_all, exchange (of unequal parts), broadcast or send
    operation: str
    size: int  # ranks of the group
    elements: int
    element_bytes: int
    calls: int
    # of an exchange, the rank's own part, which is as large as the others', is among the elements
    stays: bool = False

    @property
    def sent_bytes(self) -> float:
        """The bytes that this rank sends in a ring."""
        return (
            self.elements
            * self.element_bytes
            * ring_share("all_to_all" if self.stays else self.operation, self.size)
        )


def ring_share(operation: str, size: int) -> float:
    """The bytes that a rank sends for each byte of an operation: the factor from
    algorithm to bus bandwidth.
    """
    rounds = {"all_reduce": 2 * (size - 1) / size, "send": 1.0, "exchange": 1.0}
    return rounds.get(operation, (size - 1) / size)


def rank_traffic(
    config: Config,
    host_size: int = 8,
    tensor_rank: int = 0,
    shard_rank: int = 0,
    data_rank: int | None = None,
    loads: Loads = BALANCED,
) -> list[list[Transfer]]:
    """The transfers of each rank of the pipeline in a step of the native engine or fsdp, on one of its tensor
    ranks and, under fsdp, of its shards, the first being the fullest.

    `host_size`: consecutive ranks on one host, for `engine.reduce_levels=2`. `data_rank`: of those that
    divide tokens, for updates of whole matrices; the first is the fullest.
    Exact: the gaps that align parameters and buckets (`buckets.py`) travel too.
    """
    config, data_rank = partitioned(config), shard_rank if data_rank is None else data_rank
    placement, layers, flow = placement_of(config), stage_layers(config), flow_of(config)
    final = max(stage for stages in placement for stage in stages)

    def state(rank: int) -> list[Transfer]:
        if divides_parameters(config):
            return _units(config, units_of(config, rank, tensor_rank, data_rank))
        return _data(config, buffers_of(config, rank, tensor_rank, host_size))

    def counts(rank: int) -> list[Transfer]:
        from megacore.tools.planner.on_meta import counts_of

        summed = counts_of(config, rank, tensor_rank, host_size)
        return [
            Transfer(name, "all_reduce", size, numbers, each, 1)
            for groups, numbers, each in summed
            for name, size in groups
        ]

    def matrices(rank: int) -> list[Transfer]:
        from megacore.tools.planner.whole_updates import Place, whole_updates

        updates = whole_updates(config, Place(rank, tensor_rank, data_rank), host_size)
        return [] if updates is None else updates.transfers(config)

    traffic = []
    whole = any(group.rule.whole for group in ParameterGroups(config.optim).every)
    of_matrices = of_each_rank(config, matrices) if whole else [[] for _ in placement]
    plain = not config.model.is_custom and config.model.num_experts is None  # such layers have no buffers
    of_counts = [[] for _ in placement] if plain else of_each_rank(config, counts)
    for stages, of_state, updates, sums in zip(
        placement, of_each_rank(config, state), of_matrices, of_counts, strict=True
    ):
        found = [
            *_layers(config, [layers[stage] for stage in stages], loads),
            *_pipeline(config, stages, final, flow),
        ]
        found += [*of_state, *updates, *sums, *_figures(config, flow)]
        traffic.append([transfer for transfer in found if transfer.size > 1 and transfer.elements])
    return traffic


def _layers(config: Config, stages: Iterable[range], loads: Loads) -> list[Transfer]:
    """Transfers over tensor and context ranks in forward and backward of stages, given their inner
    layers, as the layers begin them.
    """
    calls: Counter[Sent] = Counter()
    for own in stages:
        for cost, count in layer_costs(config, own, loads):
            calls.update({sent: count * config.num_microbatches * times for sent, times in cost.sent.items()})
    return [
        Transfer(
            s.group,
            s.operation,
            s.size,
            times * s.elements,
            s.element_bytes,
            times,
            stays=s.operation == "exchange",
        )
        for s, times in calls.items()
    ]


def _pipeline(config: Config, stages: Sequence[int], final: int, flow: ModelFlow) -> list[Transfer]:
    """What crosses a cut, sent to the next stage, and its gradients, sent to the one before, if another rank
    holds it: each of them once for every microbatch, under any schedule.
    """
    # elements and calls, by the bytes of an element
    count, sent = config.num_microbatches, dict[int, tuple[int, int]]()
    ahead = [(stage, False) for stage in sorted(stages) if stage < final and stage + 1 not in stages]
    back = [(stage - 1, True) for stage in sorted(stages) if stage > 0 and stage - 1 not in stages]
    for boundary, gradients in ahead + back:
        for one in flow.crossing(boundary, gradients=gradients):
            elements, calls = sent.get(each := ELEMENT_BYTES[one.precision(config)], (0, 0))
            sent[each] = elements + count * prod(one.shape(config)), calls + count
    return [
        Transfer("pp", "send", config.parallel.pipeline, elements, each, calls)
        for each, (elements, calls) in sent.items()
    ]


def _over_data(config: Config, buffers: Sequence[Buffer]) -> list[Transfer]:
    """Gradients, and with a sharded optimizer parameters, over the ranks of one sum, in one level or
    two (`engine.reduce.start_sum`).
    """
    parameters, calls = sum(buffer.size for buffer in buffers), sum(len(buffer.buckets) for buffer in buffers)
    messages = [size for buffer in buffers for size in buffer.messages if size]
    gradient, parameter = GRADIENT_BYTES[config.train.precision], ELEMENT_BYTES[config.train.precision]
    narrow = config.engine.reduce_dtype == "bf16"
    travels, gathered = (2, 2) if narrow else (gradient, gradient)
    if config.engine.shard_optimizer:
        gathered = parameter
    (host, within), (name, between), compression = (
        buffers[0].within,
        buffers[0].between,
        config.engine.compression,
    )
    part = parameters // within
    if isinstance(compression, LowRankCompression):
        summed, gathers = sum(messages), calls if config.engine.shard_optimizer else 0
        return [
            Transfer(name, "all_reduce", between, summed // within, gradient, len(messages)),
            *(
                Transfer(host, operation, within, summed, gradient, len(messages))
                for operation in ("reduce_scatter", "all_gather")
            ),
            Transfer(name, "all_gather", between, part if gathers else 0, parameter, gathers),
            Transfer(host, "all_gather", within, parameters if gathers else 0, parameter, gathers),
        ]
    if compression is not None:
        sent = compression.sent_bytes(part, gradient)
        gather = (part, gathered) if config.engine.shard_optimizer else (sent, 1)
        found = [
            Transfer(name, "all_to_all", between, sent, 1, calls),
            Transfer(name, "all_gather", between, *gather, calls),
        ]
    elif narrow or config.engine.shard_optimizer:
        scatter = Transfer(name, "reduce_scatter", between, part, travels, calls)
        found = [scatter, Transfer(name, "all_gather", between, part, gathered, calls)]
    else:
        found = [Transfer(name, "all_reduce", between, part, gradient, calls)]
    inside = [Transfer(host, "reduce_scatter", within, parameters, gradient, calls)]
    return [*found, *inside, Transfer(host, "all_gather", within, parameters, gathered, calls)]


def _data(config: Config, buffers: Sequence[Buffer]) -> list[Transfer]:
    """Gradients and parameters over ranks with other tokens, partial gradients over tensor
    ranks and the pipeline's ends.
    """
    gradient = GRADIENT_BYTES[config.train.precision]
    alike: dict[tuple[object, ...], list[Buffer]] = {}
    for buffer in buffers:
        alike.setdefault((buffer.within, buffer.between), []).append(buffer)
    found = [transfer for own in alike.values() for transfer in _over_data(config, own)]
    for axis, size in same_tokens(config):
        partial = [buffer for buffer in buffers if axis in buffer.summed_over]
        found.append(
            Transfer(
                axis,
                "all_reduce",
                size,
                sum(b.size for b in partial),
                gradient,
                sum(len(b.buckets) for b in partial),
            )
        )
    for buffer in buffers:
        if "tied" in buffer.summed_over:  # of the rank's own parts of the buckets
            sharded = config.engine.shard_optimizer and buffer.ranks > 1
            own, ranges = (buffer.size // buffer.ranks, len(buffer.buckets)) if sharded else (buffer.size, 1)
            found.append(Transfer("tied", "all_reduce", 2, own, gradient, ranges))
    return found


def _units(config: Config, units: Sequence[Unit]) -> list[Transfer]:
    """What `_data` counts, of the fsdp engine."""
    compute, gradient = ELEMENT_BYTES[config.train.precision], GRADIENT_BYTES[config.train.precision]
    m = config.num_microbatches
    # times that blocks are gathered for a forward, and all gradients are summed
    again = m if reshards(config) else 1
    found = []
    for unit in units:
        (shard, shards), (replicate, copies) = unit.shards, unit.copies
        gathers = 2 * m if unit.block and reshards(config) else 1  # the ends stay whole: the loss needs them
        found.append(Transfer(shard, "all_gather", shards, gathers * shards * unit.padded, compute, gathers))
        if unit.trained:
            found.append(
                Transfer(shard, "reduce_scatter", shards, again * shards * unit.trained, gradient, again)
            )
            found.append(Transfer(replicate, "all_reduce", copies, unit.trained, gradient, 1))
    # by the number of ranks: where tensor ranks and those with an expert's parts are the same, one sum
    partial: Counter[int] = Counter()
    for axis, size in same_tokens(config):
        partial[size] += sum(
            unit.own[name] for unit in units for name, over in unit.partial.items() if axis in over
        )
    tied = [
        unit.own["embedding.weight"]
        for unit in units
        if "embedding.weight" in unit.own and config.model.tie_embeddings
    ]
    return [
        *together(found),
        *(
            Transfer("tp" if size == config.parallel.tensor else "etp", "all_reduce", size, own, gradient, 1)
            for size, own in partial.items()
        ),
        Transfer("tied", "all_reduce", min(config.parallel.pipeline, 2), sum(tied), gradient, 1),
    ]


def same_tokens(config: Config) -> list[tuple[str, int]]:
    """The axes of ranks that may have parts of one gradient although they see the
    same tokens, and their sizes.
    """
    return [("tp", config.parallel.tensor), ("etp", config.expert_sizes["etp"])]


def together(transfers: Iterable[Transfer]) -> list[Transfer]:
    """One for each operation over a group in numbers of a size."""
    found: dict[tuple[str, str, int, int], tuple[int, int]] = {}
    for one in transfers:
        elements, calls = found.get(key := (one.group, one.operation, one.size, one.element_bytes), (0, 0))
        found[key] = elements + one.elements, calls + one.calls
    return [Transfer(*key[:3], elements, key[3], calls) for key, (elements, calls) in found.items()]


def _figures(config: Config, flow: ModelFlow) -> list[Transfer]:
    """What is summed over all ranks, so that they decide alike: losses with two votes (to stop; a
    save has failed), and the norm.
    """
    world = config.world_size
    masked = masks_targets(config) or flow.makes_targets  # what may be left out is counted first
    counts = sum(over != "tokens" and (over != "targets" or masked) for over in set(flow.over))
    figures = len(flow.over) + 2 + counts
    return [
        Transfer("loss", "all_reduce", world, figures, 8, 1 + counts),
        Transfer("norm", "all_reduce", world, 1, 8, 1),
    ]


def sent_by_group(transfers: list[Transfer]) -> dict[str, float]:
    """Bytes that a rank sends in a step."""
    sent: dict[str, float] = {}
    for transfer in transfers:
        sent[transfer.group] = sent.get(transfer.group, 0.0) + transfer.sent_bytes
    return sent


def seconds_by_group(transfers: list[Transfer], config: Config, machine: Machine) -> dict[str, float]:
    """Seconds of a step's transfers over a cluster's links, one after the other and beside nothing else."""
    parallel = config.parallel
    stride = parallel.tensor  # of token ranks; tensor ranks are consecutive
    stage = stride * config.token_ranks
    expert, part = config.expert_sizes["etp"], config.expert_sizes["ep"] * config.expert_sizes["etp"]
    sizes = {transfer.group: transfer.size for transfer in transfers}
    # Ranks between two neighbours of a group; of two ends the distance.
    strides = {"cp": stride, "pp": stage, "ep": expert}
    for name, apart, shards in (("dp", stride, ""), ("edp", part, "×edp")):
        strides |= {
            name: apart,
            f"{name} within a host": apart,
            f"{name} between hosts": apart * sizes.get(f"{name} within a host", 1),
        }
        strides |= {f"shard{shards}": apart, f"replicate{shards}": apart * sizes.get(f"shard{shards}", 1)}
    strides["tied"] = stage * (parallel.pipeline - 1)
    seconds: dict[str, float] = {}
    for transfer in transfers:
        each, apart = (
            transfer.elements * transfer.element_bytes / transfer.calls,
            strides.get(transfer.group, 1),
        )
        to_neighbour = transfer.operation == "send" and transfer.group != "cp"
        time = (
            machine.transfer(each, apart)
            if to_neighbour
            else machine.operation(transfer.operation, each, transfer.size, apart)
        )
        seconds[transfer.group] = seconds.get(transfer.group, 0.0) + transfer.calls * time
    return seconds
