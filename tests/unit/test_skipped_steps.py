"""Loss scale, steps that are not taken, and the rate of the steps that are."""

import math

import pytest
import torch

from megacore.config.optim import OptimConfig
from megacore.engine.learning_rate import learning_rate
from megacore.engine.loss_scale import LossScale
from megacore.engine.spike_detector import ENOUGH
from megacore.optimizers.rule import RULES
from tests.one_rank import CPU, accumulate, backward_of, configure, engine_of


@pytest.mark.parametrize("precision", ["fp16", "fp32", "fp64"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_changes_nothing(precision: str, bad: float) -> None:
    """One overflow would turn every weight into NaN; a skipped step that counted would
    bend bias correction.
    """
    stage, engine = engine_of(configure(f"train.precision={precision}"))
    backward_of(engine, stage, 1.0)
    engine.step(1e-3)
    before = {name: tensor.clone() for name, (tensor, _) in engine.tensors().items()}
    state = engine.state()
    assert state["updates"] == 1 and state["skipped"] == 0

    backward_of(engine, stage, 1.0)
    engine.buffers[0].gradients[3] = bad  # one element of one parameter's
    statistics = engine.step(1e-3)
    assert not statistics.grad_norm.isfinite() and statistics.skipped == 1
    assert all(torch.equal(tensor, before[name]) for name, (tensor, _) in engine.tensors().items())
    scaling = {"loss_scale": state["loss_scale"] / 2, "good_steps": 0} if precision == "fp16" else {}
    assert engine.state() == {"updates": 1, "skipped": 1} | scaling

    backward_of(engine, stage, 1.0)  # and nothing of it is left behind
    assert engine.step(1e-3).grad_norm.isfinite()
    assert engine.state()["updates"] == 2
    assert not torch.equal(engine.tensors()["model/norm.weight"][0], before["model/norm.weight"])


@pytest.mark.parametrize("bad", ["weight", "loss", "gradient", "spike"])
@pytest.mark.parametrize("kind", RULES)
def test_a_step_that_is_not_taken_leaves_everything(kind: str, bad: str) -> None:
    """By every rule and for every reason: no weight, moment or momentum moves, no norm is
    remembered, and one step is one skip, also where loss and gradient are both bad, as they are
    behind a weight that is not finite.
    """
    average = "" if kind == "schedule_free" else "optim.ema=0.9"  # which keeps an average itself
    config = configure(f"optim.kind={kind} {average} optim.spike_threshold=6 optim.weight_decay=0.3")
    stage, engine = engine_of(config)
    loss = torch.ones((), dtype=torch.float64)
    for _ in range(ENOUGH + 1):
        backward_of(engine, stage, 1.0)
        engine.step(1e-4, loss)
    before = {name: tensor.clone() for name, (tensor, _) in engine.tensors().items()}
    assert engine.spikes is not None
    state, window = engine.state(), engine.spikes.recent.tolist()
    assert state["skipped"] == 0 and len(state["norms"]) == ENOUGH + 1
    if bad == "weight":
        kept = stage.before[0].embedding.weight.data.clone()
        stage.before[0].embedding.weight.data.fill_(math.inf)
        loss = accumulate(config, stage, engine, 1)
        stage.before[0].embedding.weight.data.copy_(kept)
        assert not loss.isfinite()
    else:
        backward_of(engine, stage, 1e4 if bad == "spike" else 1.0)
    if bad == "loss":
        loss = loss * math.nan
    if bad == "gradient":
        engine.buffers[0].gradients[3] = math.nan
    statistics = engine.step(1e-4, loss)
    assert statistics.grad_norm.isfinite() == (bad in ("loss", "spike")) and statistics.skipped == 1
    assert all(torch.equal(tensor, before[name]) for name, (tensor, _) in engine.tensors().items())
    assert engine.state() == state | {"skipped": 1}
    assert str(engine.spikes.recent.tolist()) == str(window), (
        "a norm beyond those that count would move the median"
    )
    assert {float(update.updates) for _, update in engine.optimizer.parts} == {state["updates"]}

    # The next step is the one that would have been taken without the skipped one. Every count that a rule or
    # an average keeps enters it, and a second engine has them all from the state before the skipped step.
    resumed_stage, resumed = engine_of(config)
    for name, (tensor, _) in resumed.tensors().items():
        tensor.copy_(before[name])
    resumed.load_state(state, resumed.tensors())
    for each_stage, each_engine in ((stage, engine), (resumed_stage, resumed)):
        backward_of(each_engine, each_stage, 0.5)
        each_engine.step(1e-4)
    expected = {name: tensor for name, (tensor, _) in resumed.tensors().items()}
    different = [
        name for name, (tensor, _) in engine.tensors().items() if not torch.equal(tensor, expected[name])
    ]
    assert not different
    assert engine.state() == resumed.state() | {"skipped": 1}


def test_a_step_that_is_not_taken_leaves_the_routers_biases() -> None:
    """They would follow the tokens of batches that nothing was learned from."""
    experts = "model.num_experts=4 model.experts_per_token=2 model.router_bias_rate=0.1"
    config = configure(f"{experts} model.router_balance=none")
    stage, engine = engine_of(config)
    accumulate(config, stage, engine, 1)
    engine.step(1e-3)
    before = {name: tensor.clone() for name, (tensor, _) in engine.tensors().items()}
    assert all(before[f"buffer/blocks.{i}.feed_forward.router.bias"].any() for i in (0, 1))
    accumulate(config, stage, engine, 2)
    engine.buffers[0].gradients[3] = math.nan
    assert engine.step(1e-3).skipped == 1
    assert all(torch.equal(tensor, before[name]) for name, (tensor, _) in engine.tensors().items())


def test_spikes_move_neither_their_own_bar_nor_the_loss_scale() -> None:
    """More spikes than norms before them: remembered, they would be the usual norm by the end.

    Nor does a spike overflow: forty of them that halved the loss scale would leave gradients that underflow.
    """
    stage, engine = engine_of(configure("train.precision=fp16 optim.spike_threshold=6"))
    scale = engine.state()["loss_scale"]
    for step in range(60):
        backward_of(engine, stage, 1.0 if step < 20 else 100.0)
        engine.step(1e-4)
    assert engine.state()["skipped"] == 40 and engine.state()["updates"] == 20
    assert engine.state()["loss_scale"] == scale


def test_loss_scale_leaves_the_gradient_as_it_is() -> None:
    """A gradient that is not unscaled before the clip steps by its bound in every step,
    however small it is.
    """
    norms = {}
    for precision, scale in (("fp32", 1.0), ("fp16", 2.0**16 * 4)):  # 4 microbatches
        config = configure(f"train.precision={precision}")
        stage, engine = engine_of(config)
        assert engine.loss_gradient(0.5) == 0.5 * scale
        accumulate(config, stage, engine, 1)
        statistics = engine.step(1e-3)
        norms[precision] = statistics.grad_norm.item()
        moment = torch.cat(
            [t.flatten() for name, (t, _) in engine.tensors().items() if name.startswith("adam_m")]
        )
        assert float(moment.norm()) == pytest.approx(
            (1 - config.optim.beta1) * config.optim.grad_clip, rel=1e-3
        )
        assert statistics.skipped == 0
    assert (
        norms["fp16"] == pytest.approx(norms["fp32"], rel=1e-2) and norms["fp32"] > 2 * config.optim.grad_clip
    )


def test_loss_scale_grows_and_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that never grew back would end at zero; one that ignored overflows would skip for ever."""
    assert LossScale.INTERVAL >= 1000, "a scale that is as large as it can be loses a step with each doubling"
    monkeypatch.setattr(LossScale, "INTERVAL", 3)
    scale = LossScale(True, 1024.0, CPU)
    seen = []
    for overflowed in (0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0):
        scale.update(torch.tensor(float(overflowed)))
        seen.append(scale.value.item())
    assert seen == [1024, 1024, 2048, 2048, 2048, 1024, 1024, 1024, 512, 256, 256, 256, 512]
    constant = LossScale(False, 1024.0, CPU)
    constant.update(torch.tensor(1.0))
    assert constant.value == 1


@pytest.mark.parametrize(
    ("schedule", "points"),
    [
        ("cosine", {1: 0.1, 5: 0.5, 10: 1.0, 35: 0.775, 60: 0.55, 85: 0.325, 110: 0.1, 111: 0.1, 200: 0.1}),
        ("linear", {1: 0.1, 10: 1.0, 60: 0.55, 85: 0.325, 110: 0.1, 200: 0.1}),
        ("constant", {1: 0.1, 10: 1.0, 11: 1.0, 200: 1.0}),
        ("wsd", {1: 0.1, 10: 1.0, 90: 1.0, 145: 0.55, 200: 0.1}),
    ],
)
def test_learning_rate_at_its_corners(schedule: str, points: dict[int, float]) -> None:
    """Warmup that begins at zero, or a decay that ends a step early or late, is not the
    documented schedule.
    """
    optim = OptimConfig.model_validate(
        {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 10, "decay_steps": 110, "schedule": schedule}
    )
    cosine = {35: 0.1 + 0.45 * (1 + math.cos(math.pi / 4)), 85: 0.1 + 0.45 * (1 - math.cos(math.pi / 4))}
    for step, rate in (points | cosine if schedule == "cosine" else points).items():
        assert learning_rate(optim, step, 200) == pytest.approx(rate, abs=1e-12), step


def test_learning_rate_without_room() -> None:
    """No warmup, warmup longer than the run, decay that starts where warmup ends: no
    division by zero, no step at lr 0.
    """
    for kind in ("cosine", "linear", "constant", "wsd"):
        flat = OptimConfig.model_validate({"lr": 1.0, "warmup_steps": 0, "decay_steps": 1, "schedule": kind})
        assert learning_rate(flat, 1, 1) == (1.0 if kind == "constant" else 0.0)
        cut = OptimConfig.model_validate({"lr": 1.0, "warmup_steps": 30, "decay_steps": 30, "schedule": kind})
        assert [learning_rate(cut, step, 20) for step in (1, 15, 20)] == pytest.approx([1 / 30, 0.5, 2 / 3])


def test_scaling_starts_afresh_behind_a_run_without() -> None:
    """fp16 on from a bf16 checkpoint at a loss scale of 1 would lose its gradients to underflow."""
    _, bf16 = engine_of(configure("train.precision=bf16"))
    _, fp16 = engine_of(configure("train.precision=fp16"))
    initial = float(fp16.loss_scale.value)
    fp16.load_state(bf16.state(), fp16.tensors())
    assert float(fp16.loss_scale.value) == initial > 1


@pytest.mark.parametrize("scale", [4.0, 1.0, 0.5, 2.0**-20])
def test_every_loss_scale_is_restored(scale: float) -> None:
    """One that many overflows have made small would be taken for that of a run that did not scale: the
    resumed run would start afresh, skip all those steps again, and part from the uninterrupted one.
    """
    (_, engine), (_, resumed) = (engine_of(configure("train.precision=fp16")) for _ in range(2))
    engine.loss_scale.value.fill_(scale)
    engine.loss_scale.good_steps.fill_(7)
    resumed.load_state(engine.state(), resumed.tensors())
    assert resumed.state() == engine.state() and engine.state()["loss_scale"] == scale
