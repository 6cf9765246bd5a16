"""The native engine's step, against torch's own optimizer on an ordinary copy of the model."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megacore.config import Config
from megacore.config.optim import OptimConfig
from megacore.config.optim_groups import ParameterGroups
from megacore.config.schema import resolved
from megacore.distributed.collectives import Done
from megacore.distributed.communicator import SOLO, Group
from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import RankInfo
from megacore.distributed.shard import AxisPlacement, hold, shard_of
from megacore.engine import reduce
from megacore.engine.choose import ATTACHED, build_engine
from megacore.engine.flat_buffer import fill_buffers
from megacore.engine.learning_rate import learning_rate
from megacore.engine.loss_scale import LossScale
from megacore.engine.native import NativeEngine
from megacore.engine.reduce import GradientReducer
from megacore.engine.spike_detector import ENOUGH
from megacore.model.batch import Microbatch
from megacore.model.stage import Stage, whole_model
from megacore.optimizers.rule import RULES
from megacore.pipeline import generators
from megacore.pipeline.runtime import Runtime
from megacore.tools.settings.load import load
from megacore.train.checkpointing import engine_state
from tests.training import VOCAB_SIZE, write_config

CPU = torch.device("cpu")
Configure = Callable[..., Config]


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """`configure(overrides)`: the tests' small config, resolved."""
    path = write_config(tmp_path, "unused", model={"num_layers": 2})
    return lambda overrides="": load(path, overrides.split()).config


def engine_of(config: Config) -> tuple[Stage, NativeEngine]:
    stage = whole_model(config)
    return stage, NativeEngine(config, [stage], Mesh(config, RankInfo(), CPU))


def batch_of(config: Config, step: int) -> list[Microbatch]:
    """A global batch: the same sequences, however they are cut into microbatches."""
    train = config.train
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB_SIZE, (2, train.global_batch_size, train.seq_len), generator=generator)
    parts = zip(*(t.split(train.micro_batch_size) for t in tokens), strict=True)
    return [Microbatch(inputs, targets, key) for key, (inputs, targets) in enumerate(parts)]


def accumulate(config: Config, stage: Stage, engine: NativeEngine, step: int) -> Tensor:
    """Forward and backward of a step's whole batch; its mean loss."""
    plan = generators.build(config.parallel.schedule, 1, config.num_microbatches)
    weight = 1 / (config.train.global_batch_size * config.train.seq_len)
    return Runtime([stage], engine, SOLO).run(plan, batch_of(config, step), {"cross_entropy": weight})["cross_entropy"] * weight


@pytest.mark.parametrize(
    "overrides", ["optim.grad_clip=0.9", "model.norm=rmsnorm model.bias=false model.tie_embeddings=false optim.grad_clip=0"]
)
def test_steps_equal_torch_adamw(configure: Configure, overrides: str) -> None:
    """Clipping, decay on matrices only, bias correction, accumulation: a slip in any gives other weights after a step or two."""
    config = configure(f"train.precision=fp64 optim.weight_decay=0.3 {overrides}")
    optim = config.optim
    stage, engine = engine_of(config)
    copy = whole_model(config)
    parameters = dict(copy.named_parameters())
    matrices = {name for name in parameters if name.endswith(("embedding.weight", "head.weight", "position"))}
    matrices |= {name for name in parameters if name.startswith("blocks") and "norm" not in name and name.endswith("weight")}
    groups = [
        {"params": [p for n, p in parameters.items() if n in matrices], "weight_decay": optim.weight_decay},
        {"params": [p for n, p in parameters.items() if n not in matrices], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(groups, lr=0.0, betas=(optim.beta1, optim.beta2), eps=optim.eps)
    clipped = set()
    for step in range(1, 7):
        rate = 1e-3 * step
        loss = accumulate(config, stage, engine, step)
        statistics = engine.step(rate)

        whole = [torch.cat(tensors) for tensors in zip(*((m.tokens, m.targets) for m in batch_of(config, step)), strict=True)]
        right = copy.loss(copy.hidden(whole[0]), whole[1]) / whole[1].numel()
        plain.zero_grad()
        right.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in copy.parameters() if p.grad is not None])
        if optim.grad_clip:
            torch.nn.utils.clip_grads_with_norm_(copy.parameters(), optim.grad_clip, norm)
            clipped.add(bool(norm > optim.grad_clip))
        for group in plain.param_groups:
            group["lr"] = rate
        plain.step()

        assert loss.item() == pytest.approx(right.item(), rel=1e-13)
        assert statistics.grad_norm.item() == pytest.approx(norm.item(), rel=1e-12)
        for name, parameter in stage.named_parameters():
            assert float((parameter - parameters[name]).detach().abs().max()) < 1e-12, f"{name}, step {step}"
    assert clipped == ({True, False} if optim.grad_clip else set()), "steps with and without clipping must both be tried"


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_accumulation_equals_one_large_batch(configure: Configure, micro: int) -> None:
    """Gradients of microbatches averaged instead of summed, or scaled by their own number of tokens."""
    stages = []
    for size in (8, micro):
        config = configure(f"train.precision=fp64 train.micro_batch_size={size}")
        stage, engine = engine_of(config)
        for step in (1, 2, 3):
            accumulate(config, stage, engine, step)
            engine.step(1e-3)
        stages.append(stage)
    for large, small in zip(*(stage.parameters() for stage in stages), strict=True):
        assert float((large - small).detach().abs().max()) < 1e-12


def backward_of(engine: NativeEngine, stage: Stage, gradient: float, times: int = 1) -> None:
    """Accumulates `times` × `gradient` into every element of every parameter, through autograd in the parameters' dtype."""
    for i in range(times):
        total = sum((p.sum() * 1.0 for p in stage.parameters()), torch.zeros((), dtype=next(stage.parameters()).dtype))
        engine.backward(0, get_gradient_edge(total), torch.full_like(total, gradient), last=i == times - 1)
    engine.reduce_gradients()


def test_bf16_keeps_what_bf16_cannot_hold(configure: Configure) -> None:
    """Masters and moments in fp32: an update of 1e-4 on a weight of 1, whose next bf16 neighbour is 4e-3 away, must add up."""
    config = configure("train.precision=bf16 optim.weight_decay=0 optim.grad_clip=0")
    stage, engine = engine_of(config)
    weight = stage.behind[0].norm.weight
    assert weight.dtype == torch.bfloat16
    assert {tensor.dtype for tensor, _ in engine.tensors().values()} == {torch.float32}
    naive = torch.nn.Parameter(weight.detach().clone())
    plain = torch.optim.AdamW([naive], lr=1e-4, weight_decay=0.0)
    for _ in range(40):  # Adam moves by the learning rate where the gradient stays the same
        backward_of(engine, stage, 1.0)
        engine.step(1e-4)
        naive.grad = torch.ones_like(naive)
        plain.step()
    master = engine.tensors()["model/norm.weight"][0]
    assert torch.allclose(master, torch.full_like(master, 1 - 40e-4), atol=1e-5)
    assert torch.equal(weight, master.bfloat16()) and weight[0] < 1
    assert (naive == 1).all(), "the planted fault: without masters nothing moves"


def test_bf16_gradients_add_up_in_fp32(configure: Configure) -> None:
    """512 microbatches of 2⁻⁹ on top of 1: in bf16 each of them alone would be rounded away."""
    stage, engine = engine_of(configure("train.precision=bf16"))
    backward_of(engine, stage, 1.0)
    backward_of(engine, stage, 2.0**-9, times=512)
    assert all((slot.view(buffer.gradients) == 2.0).all() for buffer in engine.buffers for slot in buffer.slots)
    assert torch.tensor(1.0).bfloat16() + torch.tensor(2.0**-9).bfloat16() == 1.0


def test_bf16_losses_add_up_in_fp32(configure: Configure) -> None:
    """A sum in bf16 has three digits: the curve that is logged would move in steps of a few thousandths of a nat."""
    config = configure("train.precision=bf16")
    stage, engine = engine_of(config)
    found = accumulate(config, stage, engine, 1)
    with torch.no_grad():
        losses = [stage.loss(stage.hidden(m.tokens, m.key), m.targets) for m in batch_of(config, 1)]
    targets = config.train.global_batch_size * config.train.seq_len
    assert found.item() == pytest.approx(sum(loss.double().item() for loss in losses) / targets, rel=1e-6)


@pytest.mark.parametrize("precision", ["fp16", "fp32", "fp64"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_changes_nothing(configure: Configure, precision: str, bad: float) -> None:
    """One overflow would turn every weight into NaN; a skipped step that counted would bend bias correction."""
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
def test_a_step_that_is_not_taken_leaves_everything(configure: Configure, kind: str, bad: str) -> None:
    """By every rule and for every reason: no weight, moment or momentum moves, no norm is remembered, and one step is one skip, also
    where loss and gradient are both bad, as they are behind a weight that is not finite."""
    config = configure(f"optim.kind={kind} optim.spike_threshold=6 optim.weight_decay=0.3")
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
    assert str(engine.spikes.recent.tolist()) == str(window), "a norm beyond those that count would move the median"


def test_spikes_move_neither_their_own_bar_nor_the_loss_scale(configure: Configure) -> None:
    """More spikes than norms before them: remembered, they would be the usual norm by the end. Nor does a spike overflow: forty of
    them that halved the loss scale would leave gradients that underflow."""
    stage, engine = engine_of(configure("train.precision=fp16 optim.spike_threshold=6"))
    scale = engine.state()["loss_scale"]
    for step in range(60):
        backward_of(engine, stage, 1.0 if step < 20 else 100.0)
        engine.step(1e-4)
    assert engine.state()["skipped"] == 40 and engine.state()["updates"] == 20
    assert engine.state()["loss_scale"] == scale


def test_loss_scale_leaves_the_gradient_as_it_is(configure: Configure) -> None:
    """A gradient that is not unscaled before the clip steps by its bound in every step, however small it is."""
    norms = {}
    for precision, scale in (("fp32", 1.0), ("fp16", 2.0**16 * 4)):  # 4 microbatches
        config = configure(f"train.precision={precision}")
        stage, engine = engine_of(config)
        assert engine.loss_gradient(0.5) == 0.5 * scale
        accumulate(config, stage, engine, 1)
        statistics = engine.step(1e-3)
        norms[precision] = statistics.grad_norm.item()
        moment = torch.cat([t.flatten() for name, (t, _) in engine.tensors().items() if name.startswith("adam_m")])
        assert float(moment.norm()) == pytest.approx((1 - config.optim.beta1) * config.optim.grad_clip, rel=1e-3)
        assert statistics.skipped == 0
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=1e-2) and norms["fp32"] > 2 * config.optim.grad_clip


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
    """Warmup that begins at zero, or a decay that ends a step early or late, is not the documented schedule."""
    optim = OptimConfig.model_validate({"lr": 1.0, "min_lr": 0.1, "warmup_steps": 10, "decay_steps": 110, "schedule": schedule})
    cosine = {35: 0.1 + 0.45 * (1 + math.cos(math.pi / 4)), 85: 0.1 + 0.45 * (1 - math.cos(math.pi / 4))}
    for step, rate in (points | cosine if schedule == "cosine" else points).items():
        assert learning_rate(optim, step, 200) == pytest.approx(rate, abs=1e-12), step


def test_learning_rate_without_room() -> None:
    """No warmup, warmup longer than the run, decay that starts where warmup ends: no division by zero, no step at lr 0."""
    for kind in ("cosine", "linear", "constant", "wsd"):
        flat = OptimConfig.model_validate({"lr": 1.0, "warmup_steps": 0, "decay_steps": 1, "schedule": kind})
        assert learning_rate(flat, 1, 1) == (1.0 if kind == "constant" else 0.0)
        cut = OptimConfig.model_validate({"lr": 1.0, "warmup_steps": 30, "decay_steps": 30, "schedule": kind})
        assert [learning_rate(cut, step, 20) for step in (1, 15, 20)] == pytest.approx([1 / 30, 0.5, 2 / 3])


def reducer_of(config: Config, stage: Stage) -> GradientReducer:
    mesh = Mesh(config, RankInfo(), CPU)
    return GradientReducer(fill_buffers([stage], resolved(config.engine.bucket_mib), ParameterGroups(config.optim), mesh))


def test_buckets_hold_every_gradient_once_in_backward_order(configure: Configure) -> None:
    """A gradient outside every bucket is never reduced; one in two is counted twice."""
    config = configure("engine.bucket_mib=0.01")
    stage = whole_model(config)
    reducer = reducer_of(config, stage)
    limit = 0.01 * 2**20 / 4
    largest = max(p.numel() for p in stage.parameters())
    assert len(reducer.buckets) > 4 and sum(len(bucket.slots) for _, bucket in reducer.buckets) == len(list(stage.parameters()))
    for buffer, bucket in reducer.buckets:
        buffer.gradients[bucket.start : bucket.stop].add_(1.0)
        assert bucket.stop - bucket.start < limit + largest + 64
    for buffer in reducer.buffers:
        assert (buffer.gradients == 1).all()
        names = [slot.name for slot in buffer.slots]
        forward = [name for name, _ in stage.named_parameters() if name in names]
        assert names == forward[::-1]
        for slot in buffer.slots:
            assert slot.parameter.data_ptr() == slot.view(buffer.values).data_ptr() and slot.start % 64 == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_buckets_start_within_the_last_backward_and_in_order(configure: Configure, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """Started in an earlier microbatch, a bucket would be reduced before it is whole; out of order, ranks would mix buckets up."""
    config = configure(f"train.precision={precision} engine.bucket_mib=0.01 model.tie_embeddings=false")
    stage = whole_model(config)
    # As sequence parallelism marks them: norms' gradients are of this rank's tokens only.
    for parameter in stage.parameters():
        if shard_of(parameter).fill:
            parameter.shard = replace(shard_of(parameter), along=(AxisPlacement("tp", 0, 2, partial=True),))  # type: ignore[attr-defined]
    started: list[tuple[str, int]] = []

    def record(kind: str) -> Callable[[Tensor, Group], Done]:
        def collective(x: Tensor, group: Group) -> Done:
            started.append((kind, x.data_ptr()))
            return Done()

        return collective

    monkeypatch.setattr(reduce, "all_reduce_start", record("data"))
    monkeypatch.setattr(reduce, "all_reduce", record("tensor"))
    reducer = reducer_of(config, stage)
    for last in (False, False, True):
        assert not started
        inputs = torch.zeros(2, 16, dtype=torch.long)
        with reducer.completing(last):
            stage.loss(stage.hidden(inputs), inputs).backward()
    within = len(started)
    reducer.finish()
    starts = [(buffer.sum.first, buffer.gradients[bucket.start :].data_ptr()) for buffer, bucket in reducer.buckets]
    whole = [("data", start) for partial, start in starts if not partial]
    partial = [(kind, start) for partial, start in starts if partial for kind in ("tensor", "data")]
    assert len(whole) > 4 and partial
    assert started == whole + partial, "each once, in one order; partial gradients over the tensor ranks first"
    assert within == len(whole), "all of them behind backward, not after it"


@pytest.mark.parametrize("tied", ["true", "false"])
def test_reduction_overlaps_backward(configure: Configure, monkeypatch: pytest.MonkeyPatch, tied: str) -> None:
    """One bucket that is completed late, such as the norms', would hold up all others until backward is over."""
    config = configure(f"engine.bucket_mib=0.01 model.tie_embeddings={tied}")
    stage = whole_model(config)
    done, started = [], []
    monkeypatch.setattr(reduce, "all_reduce_start", lambda x, group: started.append(len(done)) or Done())
    for parameter in stage.parameters():
        parameter.register_post_accumulate_grad_hook(done.append)
    reducer = reducer_of(config, stage)
    inputs = torch.zeros(2, 16, dtype=torch.long)
    with reducer.completing(True):
        stage.loss(stage.hidden(inputs), inputs).backward()
    assert started == sorted(started) and started[0] < len(done) / 2, f"starts behind gradient {started} of {len(done)}"
    assert len(set(started)) > 3


def test_scaling_starts_afresh_behind_a_run_without(configure: Configure) -> None:
    """fp16 on from a bf16 checkpoint at a loss scale of 1 would lose its gradients to underflow."""
    _, bf16 = engine_of(configure("train.precision=bf16"))
    _, fp16 = engine_of(configure("train.precision=fp16"))
    initial = float(fp16.loss_scale.value)
    fp16.load_state(bf16.state(), fp16.tensors())
    assert float(fp16.loss_scale.value) == initial > 1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_older_checkpoints_say_a_scale_of_1_without_scaling(configure: Configure, precision: str) -> None:
    """Taken at its word, an fp16 run on from a bf16 checkpoint would begin at 1."""
    _, fp16 = engine_of(configure("train.precision=fp16"))
    engine = {"updates": 3.0, "skipped": 1.0, "loss_scale": 1.0, "good_steps": 0.0}
    sections: dict[str, Any] = {"model": {}, "data": {}, "train": {"precision": precision}}
    reader: Any = SimpleNamespace(state={"engine": engine, "config": sections})
    initial = fp16.state()["loss_scale"]
    fp16.load_state(engine_state(reader), fp16.tensors())
    assert fp16.state()["loss_scale"] == (initial if precision == "bf16" else 1.0) and fp16.state()["updates"] == 3


@pytest.mark.parametrize("scale", [4.0, 1.0, 0.5, 2.0**-20])
def test_every_loss_scale_is_restored(configure: Configure, scale: float) -> None:
    """One that many overflows have made small would be taken for that of a run that did not scale: the resumed run would start
    afresh, skip all those steps again, and part from the uninterrupted one."""
    (_, engine), (_, resumed) = (engine_of(configure("train.precision=fp16")) for _ in range(2))
    engine.loss_scale.value.fill_(scale)
    engine.loss_scale.good_steps.fill_(7)
    resumed.load_state(engine.state(), resumed.tensors())
    assert resumed.state() == engine.state() and engine.state()["loss_scale"] == scale


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_state_round_trip_is_bitwise(configure: Configure, precision: str) -> None:
    """A resumed run would part from the uninterrupted one: a moment, a counter or the loss scale left behind."""
    config = configure(f"train.precision={precision}")
    stage, engine = engine_of(config)
    for step in (1, 2, 3):
        accumulate(config, stage, engine, step)
        engine.step(1e-3)
    if precision == "fp16":
        engine.loss_scale.value.mul_(0.5)  # off its initial value
    other_stage, other = engine_of(configure(f"train.precision={precision} train.seed=1"))
    saved = {name: tensor.clone() for name, (tensor, _) in engine.tensors().items()}
    assert saved.keys() == {f"{kind}/{name}" for kind in ("model", "adam_m", "adam_v") for name, _ in stage.named_parameters()}
    tensors = other.tensors()
    for name, (tensor, shard) in tensors.items():
        assert tensor.shape == shard.local_shape
        tensor.copy_(saved[name])
    other.load_state(engine.state(), tensors)
    assert all(torch.equal(a, b) for a, b in zip(stage.parameters(), other_stage.parameters(), strict=True))
    for step in (4, 5):
        losses = [accumulate(config, s, e, step) for s, e in ((stage, engine), (other_stage, other))]
        assert torch.equal(*losses)
        norms = [e.step(1e-3).grad_norm for e in (engine, other)]
        assert torch.equal(*norms)
    assert engine.state() == other.state()
    assert all(torch.equal(a, b) for a, b in zip(stage.parameters(), other_stage.parameters(), strict=True))


def test_what_is_read_into_is_not_being_gathered(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather that ends behind a checkpoint's reading, or a rollback's, would put back the values that it began with."""
    _, engine = engine_of(configure())
    settled: list[bool] = []
    monkeypatch.setattr(engine, "settle", lambda: settled.append(True))
    engine.tensors()
    assert settled


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_of_one_buffer_have_versions_of_their_own(device: str) -> None:
    """Autograd would take a gather of later parameters for a change of those that forward has used already."""
    buffer, parameter = torch.zeros(8), torch.nn.Parameter(torch.empty(2, 2, device=device))
    hold(parameter, buffer[:4].view(2, 2))
    before = parameter._version
    buffer.add_(1.0)
    assert parameter._version == before and bool((parameter == 1.0).all())


def test_an_engine_is_attached_or_its_place_is_named() -> None:
    """A run would silently step with another engine than its config names."""
    config: Any = SimpleNamespace(engine=SimpleNamespace(kind="deepspeed"), token_ranks=1)
    mesh: Any = None
    with mock.patch.dict(ATTACHED, {"deepspeed": lambda *given: given}):
        assert build_engine(config, [], mesh) == (config, [], mesh)
    with mock.patch.dict(ATTACHED, clear=True), pytest.raises(RuntimeError, match="imports megacore.tools.deepspeed.engine"):
        build_engine(config, [], mesh)
