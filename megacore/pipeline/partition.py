"""A config's pipeline plan, and the layers of each stage.

The first stage has the embedding, and the last has the final norm, LM head and loss. In a small model the
head costs as much as several layers, so with an even split every stage would wait for the last one. Whoever
starts a run knows the costs, and gives the
config its `Partition`: `megacore.tools.choices` does.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from megacore.config.implied import splits_backward
from megacore.config.schema import Config
from megacore.pipeline.generators import GENERATORS, build, placement
from megacore.pipeline.schedule import Placement, Plan, lower, unsplit


@dataclass(frozen=True)
class Partition:
    """Which layers each stage of a pipeline has and, if `parallel.schedule` names no generator,
    the compute actions of a step.
    """

    layers: tuple[range, ...]
    plan: Plan | None = None


def partition_of(config: Config) -> Partition:
    """A config's partition, which whoever starts a run has chosen."""
    if not isinstance(config.partition, Partition):
        raise RuntimeError(
            "nobody has cut the model into stages: the config must come from "
            "megacore.tools.choices.partition.partitioned"
        )
    return config.partition


def plans_of(config: Config) -> dict[int, Plan]:
    """The plan of every step, by its number of microbatches: `train.batch_ramp` has some."""
    round_size = config.train.micro_batch_size * config.data_size
    counts = dict.fromkeys(size // round_size for _, size in config.train.batch_ramp) | {
        config.num_microbatches: None
    }
    return {count: plan_of(config, count) for count in counts}


def plan_of(config: Config, microbatches: int | None = None) -> Plan:
    """The plan of a step, for every rank of a resolved config's pipeline; a generator's
    for any number of microbatches.
    """
    parallel, options = config.parallel, plan_options(config)
    if parallel.schedule in GENERATORS:
        return build(
            parallel.schedule,
            parallel.pipeline,
            microbatches or config.num_microbatches,
            config.chunks,
            **options,
        )
    found = _chosen_plan(config)
    return lower(found if options["split"] else unsplit(found), options["shared"])


def _chosen_plan(config: Config) -> Plan:
    plan = partition_of(config).plan
    assert plan is not None
    return plan


def plan_options(config: Config) -> dict[str, Any]:
    """How plans are lowered: which stages share parameters, and whether backwards are split
    where the schedule splits them.
    """
    return {"shared": tuple(shared_parameters(config).values()), "split": splits_backward(config)}


def shared_parameters(config: Config) -> dict[str, tuple[int, ...]]:
    """Which stages use a parameter together, by its name, in one order on every rank.

    The ranks that hold it, and their sum, follow (`Topology.shared`, `schedule.lower`).
    """
    if not config.model.is_custom:  # known without torch, and wherever the model is cut
        ends = tuple(sorted({0, config.parallel.pipeline * config.chunks - 1}))
        return {"embedding.weight": ends} if config.model.tie_embeddings else {}
    users, ranges = import_module("megacore.model.choose").sharing_of(config), layer_ranges(config)
    return {name: stages_of(layers, ranges) for name, layers in users.items()}


def stages_of(layers: Sequence[int], ranges: Sequence[range]) -> tuple[int, ...]:
    """The stages that have these layers."""
    starts = [own.start for own in ranges]
    return tuple(sorted({bisect_right(starts, layer) - 1 for layer in layers}))


def placement_of(config: Config) -> Placement:
    """The stages that each rank of a resolved config's pipeline holds."""
    if config.parallel.schedule not in GENERATORS:
        return _chosen_plan(config).placement
    return placement(config.parallel.schedule, config.parallel.pipeline, config.chunks)


def stage_layers(config: Config) -> list[range]:
    """The layers of every stage of a resolved config."""
    alone = config.parallel.pipeline * config.chunks == 1  # so nothing needs to be chosen
    return [range(config.model.num_layers)] if alone else list(partition_of(config).layers)


def layer_ranges(config: Config) -> list[range]:
    """The numbers of every stage's layers in the model's list (`model.choose.layers_of`), whose first and
    last go with their neighbours.
    """
    split = stage_layers(config)
    return [range(own.start + (i > 0), own.stop + 1 + (i == len(split) - 1)) for i, own in enumerate(split)]
