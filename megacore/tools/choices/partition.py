"""Cuts a model into the stages of a pipeline by the cost of its layers, and searches for the order of their
work under the schedule `auto`.

In a small model the LM head costs as much as several layers, so with an even split every stage would wait for
the last one.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any

from megacore.config.implied import ends_apart, splits_backward
from megacore.config.parallel import CHUNKS
from megacore.config.schema import Config
from megacore.errors import ConfigError
from megacore.pipeline.generators import GENERATORS, build
from megacore.pipeline.partition import Partition, plan_of, plan_options
from megacore.pipeline.schedule import Placement, Plan, looped, v_shaped
from megacore.tools.choices.activations import stage_activations
from megacore.tools.choices.flops import Flops, embedding_cost, head_cost, layer_cost
from megacore.tools.choices.held import peak_held
from megacore.tools.choices.resolve_auto import one_chunk
from megacore.tools.choices.search_schedule import Costs, search
from megacore.tools.schedules.plan_file import plan_from_file
from megacore.tools.schedules.simulate import Timeline, simulate
from megacore.tools.settings.validation import check

# of the numbers of chunks that `auto` may have, the fastest, by config: each takes a search
_FASTER: dict[str, int] = {}
ROUNDS = 4  # of the ranks of a pipeline, after which every schedule repeats itself


def partitioned(config: Config) -> Config:
    """A resolved config with its layers cut into stages, and with the plan of a file or the one that the
    schedule `auto` finds; itself if it has them. Raises `ConfigError` if a file's plan cannot be run.

    Alike on every rank, because nothing in it depends on time or chance.
    """
    if config.partition is not None:
        return config
    if config.parallel.schedule != "auto":
        plan = plan_from_file(config) if config.parallel.schedule.startswith("file:") else None
        return config.with_partition(Partition(_ranges(config, config.chunks), plan))
    if config.parallel.chunks is not None:
        return _searched(config, config.chunks)
    counts = [
        n
        for n in ((1,) if one_chunk(config) else (1, 2))
        if config.parallel.pipeline * n <= config.model.num_layers
    ]
    if config.parallel.pipeline == 1:
        return _searched(config, counts[0])
    key = config.model_dump_json()
    if key not in _FASTER:
        spans = [
            simulated(other, plan_of(other)).makespan for other in (_searched(config, n) for n in counts)
        ]
        _FASTER[key] = spans.index(min(spans))
    return _searched(config, counts[_FASTER[key]])


def _ranges(config: Config, chunks: int) -> tuple[range, ...]:
    """The layers of every stage."""
    stages = config.parallel.pipeline * chunks
    if stages == 1:  # so nothing needs to be counted
        return (range(config.model.num_layers),)
    layer, first, last = layer_cost(config).total, embedding_cost(config).total, head_cost(config).total
    return _split(config.model.num_layers, stages, layer, first, last)


@lru_cache(maxsize=256)
def _split(num_layers: int, stages: int, layer: float, first: float, last: float) -> tuple[range, ...]:
    return tuple(split_layers(num_layers, stages, layer, first, last))


def _searched(config: Config, chunks: int) -> Config:
    """The config with the plan that a search finds, which keeps no more activations, logits and waiting
    gradients than 1F1B on its fullest rank.
    """
    ranks, microbatches, layers = config.parallel.pipeline, config.num_microbatches, _ranges(config, chunks)
    limit = max(
        peak_held(
            build("1f1b", ranks, min(microbatches, ranks)),
            [stage.kept for stage in stage_activations(config, _ranges(config, 1))],
        )
    )
    costs = costs_of(config, layers)
    forward, inputs, weights = zip(
        *((c.forward, c.backward - c.weight, c.weight) for c in costs), strict=True
    )
    held = stage_activations(config, layers)
    found = Costs(
        forward,
        inputs,
        weights,
        sizes=tuple(stage.kept for stage in held),
        waiting=tuple(stage.waiting for stage in held),
    )
    placements = [looped(ranks, chunks)] + (
        [v_shaped(ranks)] if chunks == 2 and not ends_apart(config) else []
    )
    return config.with_partition(
        Partition(layers, _search(tuple(placements), microbatches, found, limit, splits_backward(config)))
    )


@lru_cache(maxsize=16)
def _search(
    placements: tuple[Placement, ...], microbatches: int, costs: Costs, limit: float, split: bool
) -> Plan:
    """A search that several predictions ask for."""
    return search(list(placements), microbatches, costs, limit, split=split)


def split_layers(
    num_layers: int, stages: int, layer_cost: float, first_cost: float, last_cost: float
) -> list[range]:
    """Splits the layers into `stages` contiguous ranges of at least one layer, so that the
    most expensive stage is cheapest.

    `first_cost` and `last_cost` are the costs of the ends besides layers. Of equally good splits it takes the
    most even one, then the one with the fewest layers on the ends. Every rank finds the same answer.
    """
    if not 1 <= stages <= num_layers:
        raise ValueError(f"{stages} stages cannot each have one of {num_layers} layers")
    if stages == 1:
        return [range(num_layers)]
    # Layers are equal, so only the two ends differ. A cost of the worst stage limits the layers of each
    # stage; this searches for the lowest cost that leaves room for all layers. Within these limits the most
    # even split fills all stages to one level.
    middle, counts = stages - 2, range(1, num_layers + 1)
    # costs besides layers of the first stage, the last, and those between
    extras = (first_cost, last_cost, *([0.0] if middle else []))

    def most(worst: float) -> list[int]:
        return [bisect_right(counts, worst, key=partial(_cost, layer_cost, extra)) for extra in extras]

    def fits(worst: float) -> bool:
        caps = most(worst)
        return min(caps) >= 1 and caps[0] + caps[1] + middle * caps[-1] >= num_layers

    def least(extra: float) -> float:
        found = bisect_left(counts, True, key=lambda n: fits(_cost(layer_cost, extra, n)))
        return _cost(layer_cost, extra, counts[found]) if found < num_layers else math.inf

    caps = most(min(map(least, extras)))

    def filled(level: int) -> int:
        first, last, each = (min(cap, level) for cap in (caps[0], caps[1], caps[-1]))
        return first + last + middle * each

    level = bisect_right(counts, num_layers, key=filled)
    first, last = min(caps[0], level), min(caps[1], level)
    # Layers above the level go to the middle first, then to the last stage, so that the ends hold as few as
    # possible.
    left = num_layers - filled(level) - (middle if caps[-1] > level else 0)
    if left > 0 and caps[1] > level:
        last, left = last + 1, left - 1
    first += max(0, left)
    # If the middle is uneven, its later stages take more layers: they hold fewer activations under 1F1B.
    rest = num_layers - first - last
    between = [rest // middle + (i >= middle - rest % middle) for i in range(middle)]
    return [range(start, stop) for start, stop in pairwise(accumulate([first, *between, last], initial=0))]


def _cost(layer_cost: float, extra: float, layers: int) -> float:
    """The cost of a stage with so many layers."""
    return layers * layer_cost + extra


def costs_of(config: Config, stages: Sequence[range]) -> list[Flops]:
    """Work of stages with these layers in FLOPs a token, recomputation included."""
    costs = [layer_cost(config) * len(layers) for layers in stages]
    costs[0] += embedding_cost(config)
    costs[-1] += head_cost(config)
    return costs


def stage_costs(config: Config) -> list[Flops]:
    """Work of every stage in FLOPs a token, recomputation included."""
    return costs_of(config, partitioned(config).partition.layers)


@lru_cache(maxsize=16)
def _built(schedule: str, ranks: int, microbatches: int, chunks: int, **options: Any) -> Plan:
    """A plan that several predictions ask for."""
    return build(schedule, ranks, microbatches, chunks, **options)


def measured(config: Config, measure: Callable[[Plan], Sequence[float]]) -> list[float]:
    """`measure` of a step's plan, be it of a million microbatches: a schedule repeats itself, so what
    it measures grows by as much with every round of the pipeline's ranks. Of a long plan only two
    short ones are built, one round apart.

    Exact for what is counted. For times it is exact once the pipeline runs at the pace of its slowest rank.
    """
    config = partitioned(config)
    parallel, ranks, microbatches = config.parallel, config.parallel.pipeline, config.num_microbatches

    def plan(count: int) -> Plan:
        return _built(parallel.schedule, ranks, count, config.chunks, **plan_options(config))

    if parallel.schedule not in GENERATORS:
        return list(measure(plan_of(config)))
    few = microbatches % ranks + ROUNDS * ranks
    if microbatches <= few + ranks:
        return list(measure(plan(microbatches)))
    at, grown = (measure(plan(few + more)) for more in (0, ranks))
    rounds = (microbatches - few) // ranks
    return [a + rounds * (b - a) for a, b in zip(at, grown, strict=True)]


def simulated(config: Config, plan: Plan) -> Timeline:
    """A plan of the run, each action timed by its FLOPs on a rank, for one microbatch."""
    tokens = config.rank_tokens / config.parallel.tensor
    costs = [cost * tokens for cost in stage_costs(config)]
    return simulate(
        plan, [c.forward for c in costs], [c.backward for c in costs], weight=[c.weight for c in costs]
    )


def step_times(config: Config) -> tuple[float, list[float]]:
    """The makespan of a step and the time that each rank of the pipeline is busy, in FLOPs."""

    def of(plan: Plan) -> list[float]:
        timeline = simulated(config, plan)
        return [timeline.makespan, *timeline.busy]

    makespan, *busy = measured(config, of)
    return makespan, busy


def alternatives(config: Config) -> list[Config]:
    """A resolved config with each schedule that its layers and its engine allow, and
    interleaved with two and four chunks.
    """
    parallel, found = config.parallel, []
    for name, chunks in (*CHUNKS.items(), ("interleaved", 4), ("auto", None)):
        other = config.model_copy(
            update={"parallel": parallel.model_copy(update={"schedule": name, "chunks": chunks})}
        )
        with suppress(ConfigError):
            check(other, config.world_size)
            found.append(other)
    return found
