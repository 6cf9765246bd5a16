"""The average of `optim.ema` in one engine: what a skipped step, a validation and a plan make of it."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megacore.engine.averages import WeightAverages
from megacore.optimizers.ademamix import AdEMAMix, AdEMAMixSettings
from megacore.optimizers.rule import ParameterShard
from megacore.tools.planner.memory import rank_memory
from megacore.tools.startup_lines import decayed_twice
from tests.build import run_of
from tests.one_rank import backward_of, configure, engine_of
from tests.training import write_config


def after_a_bad_step(precision: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Averages before a step that is skipped, and behind it."""
    stage, engine = engine_of(configure(f"optim.ema=0.5 train.precision={precision}"))
    for scale in (1.0, 2.0):
        backward_of(engine, stage, scale)
        engine.step(1e-2)
    before = averages_of(engine)
    backward_of(engine, stage, 1.0)
    engine.buffers[0].gradients[3] = torch.inf
    assert engine.step(1e-2).skipped == 1
    return before, averages_of(engine)


def averages_of(engine: Any) -> dict[str, torch.Tensor]:
    return {
        name: tensor.clone() for name, (tensor, _) in engine.tensors().items() if name.startswith("average/")
    }


def test_a_rate_that_falls_beside_an_average_in_its_place_is_said() -> None:
    """`optim.schedule` is cosine unless a config says otherwise: who names the optimizer alone
    would have both, and not know it.
    """
    entry = 'optim.groups=[{"match":["*norm*"],"kind":"schedule_free"}]'
    for said, overrides in (
        ("cosine", "optim.kind=schedule_free"),
        ("wsd", f"optim.schedule=wsd {entry}"),
        ("", "optim.kind=schedule_free optim.schedule=constant"),
        ("", "optim.kind=schedule_free optim.lr=0.1 optim.min_lr=0.1"),
        ("", "optim.ema=0.5"),
    ):
        lines = [*decayed_twice(configure(overrides))]
        assert [line.partition(" lowers")[0] for line in lines] == [f"WARNING: optim.schedule={said}"] * bool(
            said
        )


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and bool(a) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_a_skipped_step_does_not_move_the_average(precision: str) -> None:
    """It would drift to the weights in a run that skips often; and a resumed run
    would not be what the whole one is.
    """
    assert same(*after_a_bad_step(precision))
    update = WeightAverages.update
    always = mock.patch.object(
        WeightAverages, "update", lambda self, updates, skip: update(self, updates, torch.zeros_like(skip))
    )
    with always:
        assert not same(*after_a_bad_step(precision)), (
            "the planted fault: the mean takes part in skipped steps"
        )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_before_the_first_update_the_average_is_the_weights(precision: str) -> None:
    """A run whose first steps are all skipped would validate a model of zeros."""
    stage, engine = engine_of(configure(f"optim.ema=0.9 train.precision={precision}"))
    weights = {name: parameter.detach().clone() for name, parameter in stage.named_parameters()}
    engine.load_state(engine.state(), engine.tensors())
    with engine.evaluating():
        assert same(weights, {name: parameter.detach() for name, parameter in stage.named_parameters()})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_validation_leaves_everything_as_it_was(precision: str) -> None:
    """Within it, the average computes; behind it, and where it ends in an exception, what was trained."""
    stage, engine = engine_of(configure(f"optim.ema=0.9 train.precision={precision}"))
    for scale in (1.0, 2.0):
        backward_of(engine, stage, scale)
        engine.step(1e-1)
    before = {name: tensor.clone() for name, (tensor, _) in engine.tensors().items()}
    own = {name: parameter.detach().clone() for name, parameter in stage.named_parameters()}
    with pytest.raises(KeyError), engine.evaluating():
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, before[f"average/{name}"].to(parameter.dtype)) and not torch.equal(
                parameter, own[name]
            )
        raise KeyError
    assert same(before, {name: tensor for name, (tensor, _) in engine.tensors().items()})
    assert same(own, {name: parameter.detach() for name, parameter in stage.named_parameters()})


def test_a_validation_swaps_nothing_that_is_being_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather of a step's weights, or of the averages, that ends after the swap would put back the values
    that it began with.
    """
    _, engine = engine_of(configure("optim.ema=0.9"))
    assert engine.averages is not None
    calls: list[str] = []
    monkeypatch.setattr(engine, "settle", lambda: calls.append("settle"))
    monkeypatch.setattr(engine.averages, "swap", lambda: calls.append("swap"))
    monkeypatch.setattr(engine, "behind_loading", lambda: calls.append("gather"))
    with engine.evaluating():
        calls.append("evaluate")
    assert calls == ["settle", "swap", "gather", "evaluate", "settle", "swap", "gather"]


def test_nothing_is_there_without_it() -> None:
    _, engine = engine_of(configure(""))
    assert engine.averages is None and not averages_of(engine)


@pytest.mark.parametrize(
    ("overrides", "each"), [("", 4), ("engine.shard_optimizer=true", 2), ("engine.kind=fsdp", 2)]
)
def test_the_plan_has_its_memory(tmp_path: Path, overrides: str, each: int) -> None:
    """4 bytes a parameter, divided as the masters are."""
    path = write_config(tmp_path, "unused", train={"precision": "bf16"})

    def planned(*more: str) -> int:
        config = run_of(path, *overrides.split(), "parallel.data=2", *more, world=2)
        return rank_memory(config)[0].optimizer

    without = sum(parameter.numel() for parameter in engine_of(run_of(path))[0].parameters())
    assert planned("optim.ema=0.9") - planned() == pytest.approx(each * without, rel=0.02)


def test_a_slow_mean_that_ends_below_the_fast_one_stays_there() -> None:
    """The paper's bound on beta3: without it, a slow_beta below beta1 would be reached from
    above, with a share of 0.17 for 0.5.
    """
    rule, g = (
        AdEMAMix(AdEMAMixSettings(beta1=0.9, slow_beta=0.5, slow_warmup=10)),
        torch.ones(3, dtype=torch.float64),
    )
    before = {kind: torch.zeros(3, dtype=torch.float64) for kind in rule.kinds}
    _, after = rule.direction(ParameterShard(g, before, torch.tensor(1.0, dtype=torch.float64), lambda: g))
    torch.testing.assert_close(after["ademamix_slow"], torch.full((3,), 0.5, dtype=torch.float64))
