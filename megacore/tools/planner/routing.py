"""How unevenly a run's router spread tokens over experts: the loads that it logged say how
many rows the busiest rank has.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

from megacore.config.schema import Config
from megacore.errors import ConfigError
from megacore.files import read_text
from megacore.pipeline.partition import placement_of, stage_layers
from megacore.tools.choices.layer_cost import BALANCED, BlockLoad, Loads
from megacore.tools.choices.partition import partitioned

# a block's figures of single experts (`monitoring.expert_load`): tokens as a part of the mean
LOAD = "expert_load/"


@dataclass(frozen=True, eq=False)
class Routing:
    """Loads of the experts of every block, of some steps."""

    steps: tuple[tuple[BlockLoad, ...], ...]

    def busiest(self, ranks: int, most: float = inf) -> float:
        """Rows of the rank that has most, of `ranks` that divide the experts, as a part of the mean: the mean
        of steps and blocks. `most`: that an expert takes.
        """
        found = [max(loads) for step in _of_ranks(self, ranks, most) for loads in step]
        return sum(found) / len(found)


@cache
def _of_ranks(routing: Routing, ranks: int, most: float) -> list[list[list[float]]]:
    """By step and block the load of each of `ranks`."""
    return [[replace(load, most=most).of_ranks(ranks) for load in step] for step in routing.steps]


@cache
def _fullest(routing: Routing, ranks: int, most: float, blocks: tuple[int, ...]) -> tuple[int, int]:
    """The step and the rank with most rows of all `blocks` together."""
    every = _of_ranks(routing, ranks, most)
    return max(
        product(range(len(every)), range(ranks)),
        key=lambda at: sum(every[at[0]][block][at[1]] for block in blocks),
    )


def loads_of(config: Config, routing: Routing | None, expert_rank: int | None = None) -> Loads:
    """The loads of a model's blocks, as the fullest of the ranks that divide experts sees them, or this one.

    Each rank of the pipeline has those of the step in which a rank of its stages has most rows: a plan must
    fit then too.

    A model with other blocks than the run's takes those that stand at the same height.
    """
    config, sizes = partitioned(config), config.expert_sizes
    if routing is None or sizes["ep"] * sizes["etp"] == 1:  # else no row travels
        return BALANCED
    layers, most, measured = (
        stage_layers(config),
        config.model.capacity_factor or inf,
        min(map(len, routing.steps)),
    )
    mixed = list(filter(config.model.has_experts, range(config.model.num_layers)))
    at, found = {block: i * measured // len(mixed) for i, block in enumerate(mixed)}, dict[int, BlockLoad]()
    for stages in placement_of(config):
        if own := [block for stage in stages for block in layers[stage] if block in at]:
            step, fullest = _fullest(routing, sizes["ep"], most, tuple(at[block] for block in own))
            first = fullest if expert_rank is None else expert_rank
            found |= {block: replace(routing.steps[step][at[block]], most=most, first=first) for block in own}
    return found


def _are_loads(loads: Any) -> bool:
    known = isinstance(loads, list) and all(
        isinstance(load, int | float) and 0 <= load < inf for load in loads
    )
    return known and 0 < sum(loads) < inf


def read_routing(path: str, experts: int | None) -> Routing:
    """The loads in the second half of a run's metrics.jsonl. Raises `ConfigError`."""
    right = "the metrics.jsonl of a run with experts"
    if experts is None:
        raise ConfigError("--routing", "the model has no experts", "a config with model.num_experts")
    try:
        lines = read_text(Path(path)).splitlines()
        records = [record for line in lines if LOAD in line and isinstance(record := json.loads(line), dict)]
    except (OSError, ValueError) as error:
        raise ConfigError("--routing", f"cannot read {path}: {error}", right) from None
    steps = []
    for record in records[len(records) // 2 :]:
        blocks = [loads for name, loads in record.items() if name.startswith(LOAD) and _are_loads(loads)]
        if blocks:
            steps.append(
                tuple(BlockLoad(tuple(load * len(loads) / sum(loads) for load in loads)) for loads in blocks)
            )
    counts = {len(block.loads) for step in steps for block in step}
    if counts != {experts}:
        has = (
            "no list of experts' loads"
            if not counts
            else f"loads of {', '.join(map(str, sorted(counts)))} experts"
        )
        raise ConfigError("--routing", f"{path} has {has}", f"loads of model.num_experts {experts}")
    return Routing(tuple(steps))
