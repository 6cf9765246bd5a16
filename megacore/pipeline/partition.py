"""Makes a config's pipeline plan, and chooses the layers of each stage by their cost.

The first stage has the embedding, and the last has the final norm, LM head and loss. In a small model the head costs as much as
several layers, so with an even split every stage would wait for the last one.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any

from megacore.config.resolve_auto import ends_apart, one_chunk, splits_backward
from megacore.config.schema import CHUNKS, Config
from megacore.config.validation import check
from megacore.errors import ConfigError
from megacore.model.activations import stage_sizes, stage_waiting
from megacore.model.flops import Flops, embedding_cost, head_cost, layer_cost
from megacore.pipeline.generators import GENERATORS, build, placement
from megacore.pipeline.plan_file import read_plan
from megacore.pipeline.schedule import Placement, Plan, looped, lower, unsplit, v_shaped
from megacore.pipeline.search_schedule import Costs, search
from megacore.pipeline.simulate import Timeline, peak_held, simulate

_SETTLED: dict[str, int] = {}  # of the candidates of `settled`, the fastest, by config: each takes a search, and many functions ask
ROUNDS = 4  # of the ranks of a pipeline, after which every schedule repeats itself


def split_layers(num_layers: int, stages: int, layer_cost: float, first_cost: float, last_cost: float) -> list[range]:
    """Splits the layers into `stages` contiguous ranges of at least one layer, so that the most expensive stage is cheapest.

    `first_cost` and `last_cost` are the costs of the ends besides layers. Of equally good splits it takes the most even one, then the
    one with the fewest layers on the ends. Every rank finds the same answer.
    """
    if not 1 <= stages <= num_layers:
        raise ValueError(f"{stages} stages cannot each have one of {num_layers} layers")
    if stages == 1:
        return [range(num_layers)]
    # Layers are equal, so only the two ends differ. A cost of the worst stage limits the layers of each stage; this searches for the
    # lowest cost that leaves room for all layers. Within these limits the most even split fills all stages to one level.
    middle, counts = stages - 2, range(1, num_layers + 1)
    extras = (first_cost, last_cost, *([0.0] if middle else []))  # costs besides layers of the first stage, the last, and those between

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
    # Layers above the level go to the middle first, then to the last stage, so that the ends hold as few as possible.
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


def plan_of(config: Config) -> Plan:
    """The plan of a step, for every rank of a resolved config's pipeline. Raises `ConfigError` if it is a file that cannot be run."""
    config = settled(config)
    parallel, options = config.parallel, _options(config)
    if parallel.schedule in GENERATORS:
        return build(parallel.schedule, parallel.pipeline, config.num_microbatches, config.chunks, **options)
    if parallel.schedule == "auto":
        return lower(_searched(config), options["shared"])
    plan = read_plan(path := parallel.schedule.removeprefix("file:"), parallel.pipeline, config.num_microbatches)
    if ends_apart(config) and any({0, plan.stages - 1} <= set(own) for own in plan.placement if len(own) > 1):
        wrong = f"{path} gives one rank both ends, and fsdp cannot divide the embedding that they share"
        raise ConfigError("parallel.schedule", wrong, "a plan with the ends apart, model.tie_embeddings=false, or engine.kind=native")
    return lower(plan if options["split"] else unsplit(plan), options["shared"])


def settled(config: Config) -> Config:
    """A resolved config with the number of chunks that `auto` chooses, if it is open: one or two, whichever is faster."""
    parallel = config.parallel
    if parallel.schedule != "auto" or parallel.chunks is not None:
        return config
    counts = [n for n in ((1,) if one_chunk(config) else (1, 2)) if parallel.pipeline * n <= config.model.num_layers]
    candidates = [config.model_copy(update={"parallel": parallel.model_copy(update={"chunks": n})}) for n in counts]
    if parallel.pipeline == 1:
        return candidates[0]
    key = config.model_dump_json()
    if key not in _SETTLED:
        spans = [simulated(other, plan_of(other)).makespan for other in candidates]
        _SETTLED[key] = spans.index(min(spans))
    return candidates[_SETTLED[key]]


def _searched(config: Config) -> Plan:
    """The plan that a search finds, which keeps no more activations, logits and waiting gradients than 1F1B on its fullest rank."""
    ranks, microbatches, costs, layers = config.parallel.pipeline, config.num_microbatches, stage_costs(config), stage_layers(config)
    whole = config.model_copy(update={"parallel": config.parallel.model_copy(update={"schedule": "1f1b", "chunks": 1})})
    limit = max(peak_held(build("1f1b", ranks, min(microbatches, ranks)), stage_sizes(whole, stage_layers(whole))))
    forward, inputs, weights = zip(*((c.forward, c.backward - c.weight, c.weight) for c in costs), strict=True)
    found = Costs(forward, inputs, weights, sizes=tuple(stage_sizes(config, layers)), waiting=tuple(stage_waiting(config, layers)))
    placements = [looped(ranks, config.chunks)] + ([v_shaped(ranks)] if config.chunks == 2 and not ends_apart(config) else [])
    return _search(tuple(placements), microbatches, found, limit, splits_backward(config))


@lru_cache(maxsize=16)
def _search(placements: tuple[Placement, ...], microbatches: int, costs: Costs, limit: float, split: bool) -> Plan:
    """A search that several predictions ask for."""
    return search(list(placements), microbatches, costs, limit, split=split)


def _options(config: Config) -> dict[str, Any]:
    return {"shared": tuple(shared_parameters(config).values()), "split": splits_backward(config)}


def shared_parameters(config: Config) -> dict[str, tuple[int, ...]]:
    """Which stages use a parameter together, by its name, in one order on every rank. The ranks that hold it, and their sum, follow
    (`Topology.shared`, `schedule.lower`)."""
    model, ranges = config.model, layer_ranges(config)
    if model.source is None:  # known without torch
        users = {"embedding.weight": (0, model.num_layers + 1)} if model.tie_embeddings else {}
    else:
        users = import_module("megacore.model.choose").sharing_of(config)
    return {name: stages_of(layers, ranges) for name, layers in users.items()}


def stages_of(layers: Sequence[int], ranges: Sequence[range]) -> tuple[int, ...]:
    """The stages that have these layers."""
    starts = [own.start for own in ranges]
    return tuple(sorted({bisect_right(starts, layer) - 1 for layer in layers}))


@lru_cache(maxsize=16)
def _built(schedule: str, ranks: int, microbatches: int, chunks: int, **options: Any) -> Plan:
    """A plan that several predictions ask for."""
    return build(schedule, ranks, microbatches, chunks, **options)


def measured(config: Config, measure: Callable[[Plan], Sequence[float]]) -> list[float]:
    """`measure` of a step's plan, be it of a million microbatches: a schedule repeats itself, so what it measures grows by as much
    with every round of the pipeline's ranks. Of a long plan only two short ones are built, one round apart.

    Exact for what is counted. For times it is exact once the pipeline runs at the pace of its slowest rank.
    """
    parallel, ranks, microbatches = config.parallel, config.parallel.pipeline, config.num_microbatches

    def plan(count: int) -> Plan:
        return _built(parallel.schedule, ranks, count, config.chunks, **_options(config))

    if parallel.schedule not in GENERATORS:
        return list(measure(plan_of(config)))
    few = microbatches % ranks + ROUNDS * ranks
    if microbatches <= few + ranks:
        return list(measure(plan(microbatches)))
    at, grown = (measure(plan(few + more)) for more in (0, ranks))
    rounds = (microbatches - few) // ranks
    return [a + rounds * (b - a) for a, b in zip(at, grown, strict=True)]


def placement_of(config: Config) -> Placement:
    """The stages that each rank of a resolved config's pipeline holds."""
    if config.parallel.schedule not in GENERATORS:
        return plan_of(config).placement
    return _placed(config.parallel.schedule, config.parallel.pipeline, config.chunks)


@lru_cache(maxsize=256)
def _placed(schedule: str, ranks: int, chunks: int) -> Placement:
    return placement(schedule, ranks, chunks)


def stage_layers(config: Config) -> list[range]:
    """The layers of every stage of a resolved config."""
    stages = config.parallel.pipeline * settled(config).chunks
    if stages == 1:  # so nothing needs to be counted
        return [range(config.model.num_layers)]
    layer, first, last = layer_cost(config).total, embedding_cost(config).total, head_cost(config).total
    return list(_split(config.model.num_layers, stages, layer, first, last))


def layer_ranges(config: Config) -> list[range]:
    """The numbers of every stage's layers in the model's list (`model.choose.layers_of`), whose first and last go with their neighbours."""
    split = stage_layers(config)
    return [range(own.start + (i > 0), own.stop + 1 + (i == len(split) - 1)) for i, own in enumerate(split)]


@lru_cache(maxsize=256)
def _split(num_layers: int, stages: int, layer: float, first: float, last: float) -> list[range]:
    return split_layers(num_layers, stages, layer, first, last)


def stage_costs(config: Config) -> list[Flops]:
    """Work of every stage in FLOPs a token, recomputation included."""
    costs = [layer_cost(config) * len(layers) for layers in stage_layers(config)]
    costs[0] += embedding_cost(config)
    costs[-1] += head_cost(config)
    return costs


def simulated(config: Config, plan: Plan) -> Timeline:
    """A plan of the run, each action timed by its FLOPs on a rank, for one microbatch."""
    tokens = config.rank_tokens / config.parallel.tensor
    costs = [cost * tokens for cost in stage_costs(config)]
    return simulate(plan, [c.forward for c in costs], [c.backward for c in costs], weight=[c.weight for c in costs])


def step_times(config: Config) -> tuple[float, list[float]]:
    """The makespan of a step and the time that each rank of the pipeline is busy, in FLOPs."""

    def of(plan: Plan) -> list[float]:
        timeline = simulated(config, plan)
        return [timeline.makespan, *timeline.busy]

    makespan, *busy = measured(config, of)
    return makespan, busy


def alternatives(config: Config) -> list[Config]:
    """A resolved config with each schedule that its layers and its engine allow, and interleaved with two and four chunks."""
    parallel, found = config.parallel, []
    for name, chunks in (*CHUNKS.items(), ("interleaved", 4), ("auto", None)):
        other = config.model_copy(update={"parallel": parallel.model_copy(update={"schedule": name, "chunks": chunks})})
        with suppress(ConfigError):
            check(other, config.world_size)
            found.append(other)
    return found
