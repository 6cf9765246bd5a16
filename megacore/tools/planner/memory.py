"""Predicts the memory of every rank of the pipeline, for the fullest of its tensor ranks, under each engine.

It counts parameters, gradients, optimizer state, and activations at their peak (`activations.py`). Gradients
are reduced in buckets that are parts of their buffer, and need no room of their own. `besides` estimates what
CUDA, NCCL and the allocator keep for themselves.

Bytes a parameter (with `engine.shard_optimizer` the data ranks divide only master weights and moments):

| precision   | parameter | gradient | master weight | two moments | together |
|-------------|-----------|----------|---------------|-------------|----------|
| bf16, fp16  | 2         | 4        | 4             | 8           | 18       |
| fp32        | 4         | 4        |               | 8           | 16       |
| fp64        | 8         | 8        |               | 16          | 32       |

With `engine.kind=fsdp` a rank holds only masters (4 bytes, or 8), and everything is divided among N data
ranks: 16/N (32/N). `gathered` counts what is gathered beyond that while blocks run. With `engine.cpu_offload`
the device holds only that.

With `engine.kind=deepspeed` fp32 has masters beside its parameters, 20 bytes in all, except in stage 0. Each
of N data ranks holds an N-th of the optimizer state from stage 1 on, of gradients from stage 2 on (in fp32
and fp16 from stage 1), and of parameters in stage 3, where layers are whole while they run. Offloaded state
is not on the device. Not counted: in fp32 a rank also keeps, for a step, the whole gradients of the two
parameters in which its part begins and ends.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from megacore.config.implied import reshards
from megacore.config.optim_groups import ParameterGroups
from megacore.config.precision import ELEMENT_BYTES, GRADIENT_BYTES
from megacore.config.schema import Config
from megacore.distributed.axes import AXES, Axis, ranks_along
from megacore.engine.alignment import ALIGNMENT
from megacore.pipeline.partition import placement_of, shared_parameters
from megacore.tools.choices.layer_cost import BALANCED, Loads
from megacore.tools.choices.partition import partitioned
from megacore.tools.planner.activations import Peak, rank_activations
from megacore.tools.planner.buckets import Buffer, buffers_of
from megacore.tools.planner.fsdp_units import divides_parameters, units_of
from megacore.tools.planner.parameters import block_parameters, held_by, of_each_rank, rank_parameters
from megacore.tools.planner.routing import Routing, loads_of
from megacore.tools.settings.ds_settings import ds_settings

# What a GPU keeps besides tensors, in bytes: the CUDA context with cuBLAS's workspaces, and the buffers of
# each NCCL communicator.
CONTEXT, COMMUNICATOR = int(0.9 * 2**30), int(0.15 * 2**30)
# of what is not held from step to step: blocks between which the allocator finds no room
FRAGMENTATION = 0.05


def optimizer_bytes(config: Config) -> int:
    """Bytes a parameter of optimizer state: the state of `optim.kind`, and the master weight if
    it is not the parameter itself.
    """
    wide = GRADIENT_BYTES[config.train.precision]
    masters = wide if ELEMENT_BYTES[config.train.precision] < wide else 0
    return masters + wide * max(len(group.elementwise) for group in ParameterGroups(config.optim).every)


def optimizer_key(config: Config) -> tuple[Hashable, ...]:
    """What decides which state a parameter has."""
    return config.optim.kind, config.optim.groups, config.optim.ema


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank of the pipeline, the fullest of its tensor ranks."""

    parameters: int
    gradients: int
    optimizer: int
    peak: Peak  # of the activations
    gathered: int = 0  # parameters and gradients that are whole only while they are used
    compression: int = 0  # what compressed gradients leave for the next step, and what they travel in
    rows: int = 0  # of the native engine's gradient norm: a weight for every row of a parameter
    update: int = 0  # the room of an update of whole matrices, when there are no activations

    @property
    def activations(self) -> int:
        """The bytes of the peak."""
        return self.peak.total

    @property
    def held(self) -> int:
        """The bytes that stay from step to step."""
        return self.parameters + self.gradients + self.optimizer + self.compression + self.rows

    @property
    def total(self) -> int:
        """The bytes of all tensors."""
        return self.held + max(self.activations + self.gathered, self.update)


@dataclass(frozen=True)
class Besides:
    """Bytes that a GPU needs besides a rank's tensors. No GPU has been measured: these are assumptions."""

    context: int
    communicators: int
    fragmentation: int

    @property
    def total(self) -> int:
        """The bytes of all kinds."""
        return self.context + self.communicators + self.fragmentation


def communicators_of(config: Config) -> list[int]:
    """How many communicators NCCL has on each rank of the pipeline: one for each group of ranks with
    collectives, and with each rank before or behind in the pipeline one for each direction.
    """
    levels = 2 * (config.engine.reduce_levels == 2)

    def along(*axes: Axis) -> frozenset[str]:
        return frozenset(axis.name for axis in axes if config.sizes[axis.name] > 1)

    # groups of the same ranks share one
    groups = {along(*AXES), *(along(axis) for axis in AXES if not (axis.layers or axis.samples))}
    shards, tokens = (
        config.shard_size if config.engine.kind == "fsdp" else config.token_ranks,
        [axis for axis in AXES if axis.tokens],
    )
    groups |= (
        {along(*tokens)}
        if shards in (1, config.token_ranks)
        else {frozenset({"shard"}), frozenset({"replicate"})}
    )
    groups |= (
        {along(*(axis for axis in AXES if not axis.tokens))} if config.engine.kind == "deepspeed" else set()
    )
    of_experts = _of_experts(config, groups)
    placement = placement_of(partitioned(config))
    place = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
    holders = [
        {place[stage] for stage in stages} for stages in shared_parameters(partitioned(config)).values()
    ]
    pipeline = along(*(axis for axis in AXES if axis.layers))
    counts = []
    for rank, stages in enumerate(placement):
        sharing = [ranks for ranks in holders if rank in ranks and len(ranks) > 1]
        own = groups | {
            pipeline if len(ranks) == len(placement) else frozenset(map(str, ranks)) for ranks in sharing
        }
        neighbours = {
            place[stage + step] for stage in stages for step in (-1, 1) if stage + step in place
        } - {rank}
        counts.append(len(own - {frozenset()}) + of_experts + levels + 2 * len(neighbours))
    return counts


def _of_experts(config: Config, groups: Collection[frozenset[str]]) -> int:
    """How many communicators a rank has for experts besides those of these groups:
    groups of the same ranks share one.
    """
    if config.model.num_experts is None:
        return 0
    known = {ranks_along(group, 0, config.sizes) for group in groups}
    found = {
        ranks_along(product, 0, config.expert_sizes)
        for product in (("edp",), ("ep",), ("etp",), ("ep", "etp"))
    }
    # routers count over them
    same_samples = [axis.name for axis in AXES if not (axis.layers or axis.samples)]
    return len(
        {ranks for ranks in (*found, ranks_along(same_samples, 0, config.sizes)) if len(ranks) > 1} - known
    )


def besides(memory: RankMemory, communicators: Sequence[int]) -> Besides:
    """What a rank's device needs besides tensors, by the most communicators of a rank of the
    pipeline (`communicators_of`).
    """
    return Besides(
        CONTEXT, COMMUNICATOR * max(communicators), int(FRAGMENTATION * (memory.total - memory.held))
    )


def fullest_rank(config: Config, routing: Routing | None = None) -> tuple[int, RankMemory, float]:
    """The rank of the pipeline that needs most, its memory, and the GiB that its device must have."""
    memories, communicators = rank_memory(config, loads=loads_of(config, routing)), communicators_of(config)
    extra = config.train.device != "cpu"  # a CPU keeps nothing besides
    needs = [(memory.total + extra * besides(memory, communicators).total) / 2**30 for memory in memories]
    worst = max(range(len(needs)), key=needs.__getitem__)
    return worst, memories[worst], needs[worst]


def largest_part(memory: RankMemory) -> str:
    """What takes most of a rank's memory, with its GiB."""
    parts = {
        name: getattr(memory, name)
        for name in ("parameters", "gradients", "optimizer", "activations", "gathered")
    }
    most = max(parts, key=parts.__getitem__)
    return f"{most} ({parts[most] / 2**30:,.1f})"


def rank_memory(
    config: Config,
    tensor_rank: int = 0,
    shard_rank: int = 0,
    data_rank: int | None = None,
    loads: Loads = BALANCED,
) -> list[RankMemory]:
    """The memory of every rank of a resolved config's pipeline, on one of its tensor ranks and, under fsdp,
    of its shards, the first being the fullest, with these loads of experts.
    """
    precision, data_rank = config.train.precision, shard_rank if data_rank is None else data_rank
    if divides_parameters(config):
        return _fsdp_memory(config, tensor_rank, data_rank, loads)
    if config.engine.kind == "deepspeed":
        return _deepspeed_memory(config)
    memories = []
    wide = GRADIENT_BYTES[precision]
    masters = wide if ELEMENT_BYTES[precision] < wide else 0
    config = partitioned(config)
    laid_out, own, held = (
        _laid_out(config, tensor_rank),
        whole_numbers(config, tensor_rank, data_rank),
        held_by(config, tensor_rank),
    )
    rows_of_ranks = zip(laid_out, own, held, rank_activations(config, loads), strict=True)
    for sums, (whole, room), here, activations in rows_of_ranks:
        n = sum(one.size for one in sums)
        state = sum(
            (one.size * masters + one.numbers * wide) // (one.ranks if config.engine.shard_optimizer else 1)
            for one in sums
        )
        state += whole * wide
        rows = n // ALIGNMENT * 8  # an fp64 number each
        compression = sum(compression_bytes(config, one) for one in sums)
        parameters, gradients = (n + here.frozen) * ELEMENT_BYTES[precision], n * GRADIENT_BYTES[precision]
        memories.append(
            RankMemory(
                parameters,
                gradients,
                state,
                activations,
                compression=compression,
                rows=rows,
                update=room * wide,
            )
        )
    return memories


@dataclass(frozen=True)
class LaidOut:
    """What a rank holds in the native engine's buffers of one sum."""

    ranks: int  # of the sum
    within: int  # those on one host
    size: int  # elements, gaps included
    numbers: int  # of state
    messages: tuple[int, int]  # elements of both kinds of factors, where gradients are compressed to them


def compression_bytes(config: Config, own: LaidOut) -> int:
    """Of these gradients, on machines of eight ranks."""
    settings, wide, n = config.engine.compression, GRADIENT_BYTES[config.train.precision], own.size
    if settings is None or own.ranks == 1:
        return 0
    # residuals before and behind the step, factors, and those that the next step begins with
    if settings.kind == "low_rank":
        return wide * (2 * n + own.messages[0] + 2 * own.messages[1])
    part = n // own.within
    code = 1 if settings.rounding == "nearest" else wide
    return 2 * wide * (part + n // own.ranks) + 2 * (part * code + part // settings.block * wide)


def _laid_out(config: Config, tensor_rank: int) -> list[list[LaidOut]]:
    """What each rank of the pipeline holds in the native engine's buffers."""
    engine = config.engine

    def numbers(rank: int) -> list[LaidOut]:
        alike: dict[tuple[int, int], list[Buffer]] = {}
        for buffer in buffers_of(config, rank, tensor_rank):
            alike.setdefault((buffer.ranks, buffer.within[1]), []).append(buffer)
        found = []
        for sizes, own in alike.items():
            first, second = (sum(sum(b.messages[i::2]) for b in own) for i in (0, 1))
            held = sum(b.size for b in own), sum(b.size * len(b.group.elementwise) for b in own)
            found.append(LaidOut(*sizes, *held, (first, second)))
        return found

    # Where nobody divides a bucket, none has gaps of its own.
    how = (
        engine.shard_optimizer,
        engine.reduce_dtype,
        engine.reduce_levels,
        engine.bucket_mib,
        engine.compression,
    )
    divided = (
        engine.shard_optimizer
        or engine.reduce_dtype == "bf16"
        or engine.reduce_levels > 1
        or engine.compression is not None
    )
    divides = (config.token_ranks, *how) if divided else ()
    return of_each_rank(config, numbers, "laid out", *divides, *optimizer_key(config), tensor_rank)


def whole_numbers(config: Config, tensor_rank: int = 0, data_rank: int = 0) -> list[tuple[int, int]]:
    """For each rank of the pipeline, the numbers of state of the matrices that it owns, beside those for each
    element, and about how many numbers an update of matrices needs for itself.
    """
    if not any(group.rule.whole for group in ParameterGroups(config.optim).every):
        return [(0, 0)] * config.parallel.pipeline

    def numbers(rank: int) -> tuple[int, int]:
        from megacore.tools.planner.whole_updates import Place, whole_updates

        updates = whole_updates(config, Place(rank, tensor_rank, data_rank))
        assert updates is not None
        return updates.own_numbers, updates.room()

    return of_each_rank(config, numbers)


def _fsdp_memory(config: Config, tensor_rank: int, data_rank: int, loads: Loads) -> list[RankMemory]:
    """`rank_memory` of the fsdp engine.

    With `reshard`, gathered at once are: the outermost unit (embeddings, positions, final norm, head) all the
    time, the block that runs, the next one with its receive buffer, and the gradients of a block with the
    buffer in which they are summed. Without it everything is gathered for a step, and whole gradients wait
    for the last microbatch.
    """
    config, precision = partitioned(config), config.train.precision
    compute, accumulate = ELEMENT_BYTES[precision], GRADIENT_BYTES[precision]
    on_device = 0 if config.engine.cpu_offload else accumulate
    groups, again = ParameterGroups(config.optim), reshards(config)

    def numbers(rank: int) -> tuple[int, ...]:
        """Those whose gradients wait at once, and those gathered at once: with `reshard`, and without; the
        shard's own that are trained, those that are frozen, and the state's.
        """
        units = units_of(config, rank, tensor_rank, data_rank)
        padded, trained = Counter[int](), Counter[int]()  # by block
        for unit in units:
            padded[unit.block] += unit.shards[1] * unit.padded
            trained[unit.block] += unit.shards[1] * unit.trained
        every = trained.total(), padded.total()
        outermost, summed = padded.pop(0, 0), trained.pop(0, 0)
        gathered = outermost + min(len(padded) + 1, 3) * max(padded.values(), default=0)
        state = sum(n * len(groups.of(name).elementwise) for unit in units for name, n in unit.own.items())
        own, frozen = sum(sum(unit.own.values()) for unit in units), sum(unit.frozen for unit in units)
        return summed + 2 * max(trained.values(), default=0), gathered, *every, own, frozen, state

    place = (
        (data_rank % config.shard_size,)
        if config.model.num_experts is None
        else (data_rank, config.token_ranks)
    )
    key = "units", config.shard_size, tensor_rank, *place, *optimizer_key(config)
    memories = []
    activations_of = rank_activations(config, loads)
    rows = zip(
        of_each_rank(config, numbers, *key),
        whole_numbers(config, tensor_rank, data_rank),
        activations_of,
        strict=True,
    )
    for (summed, used, trained, n, own, frozen, state), (whole, room), activations in rows:
        gathered = used if again else n
        waiting = summed if again or config.num_microbatches == 1 else trained
        held, kept = on_device * own, on_device * state + accumulate * whole
        still, whole_ones = (
            0 if config.engine.cpu_offload else compute * frozen,
            compute * gathered + accumulate * waiting,
        )
        memories.append(
            RankMemory(held + still, held, kept, activations, whole_ones, update=accumulate * room)
        )
    return memories


def _deepspeed_memory(config: Config) -> list[RankMemory]:
    """`rank_memory` of the deepspeed engine, without its buffers, whose sizes the ds_config gives."""
    precision, data = config.train.precision, config.token_ranks
    zero = ds_settings(config)["zero_optimization"]
    stage = zero["stage"]
    away = {
        name: (zero.get(f"offload_{name}") or {}).get("device", "none") != "none"
        for name in ("param", "optimizer")
    }
    masters = 4 if precision == "fp32" and stage > 0 else 0  # in 16 bits the table has them already
    divided = {
        "parameters": stage == 3,
        "gradients": stage >= 2 or (stage == 1 and precision != "bf16"),
        "optimizer": stage >= 1,
    }
    divisors = {part: data if yes else 1 for part, yes in divided.items()}
    block, layers = block_parameters(config), config.model.num_layers
    memories = []
    for n, activations in zip(rank_parameters(config), rank_activations(config), strict=True):
        parameters = 0 if away["param"] else n * ELEMENT_BYTES[precision] // divisors["parameters"]
        gradients = 0 if away["optimizer"] else n * GRADIENT_BYTES[precision] // divisors["gradients"]
        optimizer = (
            0 if away["optimizer"] else n * (optimizer_bytes(config) + masters) // divisors["optimizer"]
        )
        # Stage 3 has no pipeline: the ends are gathered in turn, and of the blocks the one at work and the
        # next.
        gathered = ELEMENT_BYTES[precision] * max(2 * block, n - layers * block) if stage == 3 else 0
        memories.append(RankMemory(parameters, gradients, optimizer, activations, gathered))
    return memories
