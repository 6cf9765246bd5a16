"""Plans of very many microbatches are measured by formula, and not built."""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from megacore.config import Config
from megacore.config.parallel import V_SHAPED
from megacore.distributed.shard import shard_of
from megacore.model.layers import LayerSpec
from megacore.pipeline import generators
from megacore.pipeline.generators import GENERATORS, generated
from megacore.pipeline.partition import plan_of
from megacore.pipeline.schedule import SENDS, Plan
from megacore.tools.choices import partition
from megacore.tools.choices.held import peak_held, peak_live
from megacore.tools.choices.partition import measured
from megacore.tools.planner import activations, memory, parameters, traffic
from megacore.tools.planner.memory import rank_memory
from megacore.tools.planner.traffic import rank_traffic
from megacore.tools.schedules.simulate import simulate
from megacore.tools.settings.group_table import parameter_shards
from tests import training
from tests.build import model_of, run_of


def config_of(folder: Path, schedule: str, ranks: int, microbatches: int) -> Config:
    sizes = [f"model.num_layers={2 * ranks}", f"parallel.pipeline={ranks}", f"parallel.schedule={schedule}"]
    batch = [f"train.global_batch_size={microbatches}", "train.micro_batch_size=1"]
    return run_of(training.write_config(folder, "nothing"), *sizes, *batch, world=ranks)


def sends(plan: Plan) -> list[int]:
    return [sum(action.op in SENDS for action in actions) for actions in plan.actions]


@pytest.mark.parametrize("schedule", GENERATORS)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 40), (3, 50), (4, 64), (5, 81)])
def test_counts_are_those_of_the_whole_plan(
    schedule: str, ranks: int, microbatches: int, tmp_path: Path
) -> None:
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


def test_no_long_plan_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built action by action, a quarter of a million microbatches take seconds and a gigabyte, and a search
    asks for thousands of plans. Messages need no plan at all.
    """
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
    config = config_of(tmp_path, "1f1b", 7, 2**15)
    assert rank_traffic(config) and not built
    rank_memory(config)
    assert built and max(built) <= (partition.ROUNDS + 2) * 7


@contextmanager
def calls_of(monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> Iterator[list[str]]:
    """Has an entry for each call of a function or method meanwhile."""
    calls, whole = list[str](), getattr(where, name)
    with monkeypatch.context() as patched:
        patched.setattr(where, name, lambda *args, **named: calls.append(name) or whole(*args, **named))
        yield calls


@pytest.mark.parametrize("engine", ["native", "fsdp"])
def test_ranks_that_hold_alike_layers_are_laid_out_once(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1,024 ranks each was laid out by itself, twice, for minutes.

    A rank whose names choose another optimizer is not alike.
    """
    layout = ["parallel.pipeline=40", "parallel.data=2", "model.num_layers=80", f"engine.kind={engine}"]
    config = run_of(training.write_config(tmp_path, "nothing"), *layout, world=80)
    parameters._MEASURED.clear()
    name = "units_of" if engine == "fsdp" else "buffers_of"
    with calls_of(monkeypatch, memory, name) as of_memory, calls_of(monkeypatch, traffic, name) as of_traffic:
        assert len(rank_memory(config)) == len(rank_traffic(config)) == 40
    assert max(len(of_memory), len(of_traffic)) <= 4
    groups = '[{"match": ["blocks.7.*"], "kind": "sgd"}]'
    config = run_of(training.write_config(tmp_path, "nothing"), *layout, f"optim.groups={groups}", world=80)
    state = [rank.optimizer for rank in rank_memory(config)]
    assert sum(own < max(state[5:-5]) for own in state[1:-1]) == 1, (
        "one rank has SGD, with half the state, in one block"
    )


def test_many_layers_are_counted_and_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of each of 16,384 layers' parameters were made for every question."""
    config = run_of(training.write_config(tmp_path, "nothing"), "model.num_layers=500")
    with (
        calls_of(monkeypatch, parameters.Parameter, "named") as named,
        calls_of(monkeypatch, LayerSpec, "build") as built,
    ):
        assert (
            parameters.parameters(config)
            == sum(prod(shard.global_shape) for shard in parameter_shards(config).values())
            and not named
        )
    assert len(built) <= 6, "three layers for each"
    for more in (
        [],
        ["model.num_experts=4", "model.bias=false", "model.first_dense=2", "model.experts_every=3"],
    ):
        few = run_of(training.write_config(tmp_path, "nothing"), "model.num_layers=12", *more)
        whole = [
            (name, shard_of(parameter).global_shape)
            for name, parameter in model_of(few, "meta").named_parameters()
        ]
        assert [(name, shard.global_shape) for name, shard in parameter_shards(few).items()] == whole, (
            "with experts in some blocks"
        )


def test_the_fullest_states_are_not_compared_each_with_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank's 512 states each was compared with all others, on each of 1,024 ranks."""
    for schedule, ranks, microbatches in (("1f1b", 32, 32), ("zb_v", 6, 30)):
        plan = generated(schedule, ranks, microbatches)
        with calls_of(monkeypatch, activations.State, "holds_no_more_than") as compared:
            found = activations.states_of(plan)
        states = [
            activations.states_of(Plan((own,), (stages,)))[0]
            for own, stages in zip(plan.actions, plan.placement, strict=True)
        ]
        assert found == states and len(compared) <= 2 * sum(map(len, plan.actions))
        for own in found:
            assert not any(a is not b and a.holds_no_more_than(b) for a in own for b in own)


@pytest.mark.parametrize("schedule", V_SHAPED)
def test_a_rank_that_waits_is_not_asked_at_every_tick(schedule: str) -> None:
    """Ranks times ticks: with 1,024 ranks millions of questions for a few microbatches."""
    asked = list[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "can_begin":
            asked.append(schedule)

    sys.setprofile(note)
    try:
        plan = generated(schedule, 24, 3)
    finally:
        sys.setprofile(None)
    assert asked and len(asked) <= 3 * sum(map(len, plan.actions))


def test_where_stages_are_needs_no_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of one microbatch was made to ask it."""
    monkeypatch.setattr(generators, "Action", pytest.fail)
    assert [len(generators.placement(name, 5)) for name in GENERATORS] == [5] * len(GENERATORS)
