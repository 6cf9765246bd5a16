"""Plans of very many microbatches are measured by formula, and not built."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megacore.config import Config, load
from megacore.pipeline import partition
from megacore.pipeline.generators import GENERATORS
from megacore.pipeline.partition import measured, plan_of
from megacore.pipeline.schedule import SENDS, Plan
from megacore.pipeline.simulate import peak_held, peak_live, simulate
from megacore.tools.planner import activations
from megacore.tools.planner.memory import rank_memory
from megacore.tools.planner.traffic import rank_traffic
from tests import training


def config_of(folder: Path, schedule: str, ranks: int, microbatches: int) -> Config:
    sizes = [f"model.num_layers={2 * ranks}", f"parallel.pipeline={ranks}", f"parallel.schedule={schedule}"]
    batch = [f"train.global_batch_size={microbatches}", "train.micro_batch_size=1"]
    return load(training.write_config(folder, "nothing"), [*sizes, *batch], ranks).config


def sends(plan: Plan) -> list[int]:
    return [sum(action.op in SENDS for action in actions) for actions in plan.actions]


@pytest.mark.parametrize("schedule", GENERATORS)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 40), (3, 50), (4, 64), (5, 81)])
def test_counts_are_those_of_the_whole_plan(schedule: str, ranks: int, microbatches: int, tmp_path: Path) -> None:
    """Memory of a long step would be that of a short one, or messages would be lost with every round."""
    config = config_of(tmp_path, schedule, ranks, microbatches)
    whole = plan_of(config)
    sizes = [random.Random(0).uniform(1, 9) for _ in range(whole.stages)]
    for measure in (sends, peak_live, lambda plan: peak_held(plan, sizes)):
        assert measured(config, measure) == pytest.approx(measure(whole), rel=1e-12)


@pytest.mark.parametrize("schedule", GENERATORS)
def test_times_are_those_of_the_whole_plan(schedule: str, tmp_path: Path) -> None:
    """With stages of unequal cost: the slowest one sets the pace."""
    config = config_of(tmp_path, schedule, 4, 102)
    forward = [1.0, 1.5, 1.2, 2.0, 0.9, 1.1, 1.0, 1.3][: 4 * config.chunks]

    def makespan(plan: Plan) -> Sequence[float]:
        return [simulate(plan, forward, [2 * cost for cost in forward]).makespan]

    assert measured(config, makespan) == pytest.approx(makespan(plan_of(config)), rel=1e-12)


@pytest.mark.parametrize("predict", [rank_memory, rank_traffic])
def test_no_long_plan_is_built(predict: Callable[[Config], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built action by action, a quarter of a million microbatches take seconds and a gigabyte, and a search asks for thousands of plans."""
    built = []

    def noted(make: Callable[..., Plan]) -> Callable[..., Plan]:
        def made(name: str, ranks: int, microbatches: int, *rest: Any, **options: Any) -> Plan:
            built.append(microbatches)
            return make(name, ranks, microbatches, *rest, **options)

        return made

    partition._built.cache_clear()
    activations._fullest.cache_clear()
    monkeypatch.setattr(partition, "build", noted(partition.build))
    monkeypatch.setattr(activations, "generated", noted(activations.generated))
    predict(config_of(tmp_path, "1f1b", 7, 2**15))
    assert built and max(built) <= (partition.ROUNDS + 2) * 7
