"""The native engine's step, against torch's own optimizer on an ordinary copy of the model."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.config import Config
from megacore.config.optim_groups import ParameterGroups
from megacore.config.schema import resolved
from megacore.distributed.collectives import Done
from megacore.distributed.communicator import Group
from megacore.distributed.shard import AxisPlacement, hold, shard_of
from megacore.engine import reduce
from megacore.engine.choose import build_engine
from megacore.engine.flat_buffer import fill_buffers
from megacore.engine.reduce import GradientReducer
from megacore.model.stage import Stage
from tests.build import mesh_of, model_of
from tests.one_rank import accumulate, backward_of, batch_of, configure, engine_of


@pytest.mark.parametrize(
    "overrides",
    [
        "optim.grad_clip=0.9",
        "model.norm=rmsnorm model.bias=false model.tie_embeddings=false optim.grad_clip=0",
    ],
)
def test_steps_equal_torch_adamw(overrides: str) -> None:
    """Clipping, decay on matrices only, bias correction, accumulation: a slip in any gives
    other weights after a step or two.
    """
    config = configure(f"train.precision=fp64 optim.weight_decay=0.3 {overrides}")
    optim = config.optim
    stage, engine = engine_of(config)
    copy = model_of(config)
    parameters = dict(copy.named_parameters())
    matrices = {name for name in parameters if name.endswith(("embedding.weight", "head.weight", "position"))}
    matrices |= {
        name
        for name in parameters
        if name.startswith("blocks") and "norm" not in name and name.endswith("weight")
    }
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

        whole = [
            torch.cat(tensors)
            for tensors in zip(*((m.tokens, m.targets) for m in batch_of(config, step)), strict=True)
        ]
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
    assert clipped == ({True, False} if optim.grad_clip else set()), (
        "steps with and without clipping must both be tried"
    )


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_accumulation_equals_one_large_batch(micro: int) -> None:
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


def test_bf16_keeps_what_bf16_cannot_hold() -> None:
    """Masters and moments in fp32: an update of 1e-4 on a weight of 1, whose next bf16
    neighbour is 4e-3 away, must add up.
    """
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


def test_bf16_gradients_add_up_in_fp32() -> None:
    """512 microbatches of 2⁻⁹ on top of 1: in bf16 each of them alone would be rounded away."""
    stage, engine = engine_of(configure("train.precision=bf16"))
    backward_of(engine, stage, 1.0)
    backward_of(engine, stage, 2.0**-9, times=512)
    assert all(
        (slot.view(buffer.gradients) == 2.0).all() for buffer in engine.buffers for slot in buffer.slots
    )
    assert torch.tensor(1.0).bfloat16() + torch.tensor(2.0**-9).bfloat16() == 1.0


def test_bf16_losses_add_up_in_fp32() -> None:
    """A sum in bf16 has three digits: the curve that is logged would move in
    steps of a few thousandths of a nat.
    """
    config = configure("train.precision=bf16")
    stage, engine = engine_of(config)
    found = accumulate(config, stage, engine, 1)
    with torch.no_grad():
        losses = [stage.loss(stage.hidden(m.tokens, m.key), m.targets) for m in batch_of(config, 1)]
    targets = config.train.global_batch_size * config.train.seq_len
    assert found.item() == pytest.approx(sum(loss.double().item() for loss in losses) / targets, rel=1e-6)


def reducer_of(config: Config, stage: Stage) -> GradientReducer:
    mesh = mesh_of(config)
    return GradientReducer(
        fill_buffers([stage], resolved(config.engine.bucket_mib), ParameterGroups(config.optim), mesh)
    )


def test_buckets_hold_every_gradient_once_in_backward_order() -> None:
    """A gradient outside every bucket is never reduced; one in two is counted twice."""
    config = configure("engine.bucket_mib=0.01")
    stage = model_of(config)
    reducer = reducer_of(config, stage)
    limit = 0.01 * 2**20 / 4
    largest = max(p.numel() for p in stage.parameters())
    assert len(reducer.buckets) > 4 and sum(len(bucket.slots) for _, bucket in reducer.buckets) == len(
        list(stage.parameters())
    )
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
def test_buckets_start_within_the_last_backward_and_in_order(
    monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """Started in an earlier microbatch, a bucket would be reduced before it is whole; out of
    order, ranks would mix buckets up.
    """
    config = configure(f"train.precision={precision} engine.bucket_mib=0.01 model.tie_embeddings=false")
    stage = model_of(config)
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
    starts = [
        (buffer.sum.first, buffer.gradients[bucket.start :].data_ptr()) for buffer, bucket in reducer.buckets
    ]
    whole = [("data", start) for partial, start in starts if not partial]
    partial = [(kind, start) for partial, start in starts if partial for kind in ("tensor", "data")]
    assert len(whole) > 4 and partial
    assert started == whole + partial, (
        "each once, in one order; partial gradients over the tensor ranks first"
    )
    assert within == len(whole), "all of them behind backward, not after it"


@pytest.mark.parametrize("tied", ["true", "false"])
def test_reduction_overlaps_backward(monkeypatch: pytest.MonkeyPatch, tied: str) -> None:
    """One bucket that is completed late, such as the norms', would hold up all others
    until backward is over.
    """
    config = configure(f"engine.bucket_mib=0.01 model.tie_embeddings={tied}")
    stage = model_of(config)
    done, started = [], []
    monkeypatch.setattr(reduce, "all_reduce_start", lambda x, group: started.append(len(done)) or Done())
    for parameter in stage.parameters():
        parameter.register_post_accumulate_grad_hook(done.append)
    reducer = reducer_of(config, stage)
    inputs = torch.zeros(2, 16, dtype=torch.long)
    with reducer.completing(True):
        stage.loss(stage.hidden(inputs), inputs).backward()
    assert started == sorted(started) and started[0] < len(done) / 2, (
        f"starts behind gradient {started} of {len(done)}"
    )
    assert len(set(started)) > 3


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_state_round_trip_is_bitwise(precision: str) -> None:
    """A resumed run would part from the uninterrupted one: a moment, a counter, the
    loss scale or the norms that judge spikes left behind.
    """
    overrides = f"train.precision={precision} optim.spike_threshold=1e9"
    config = configure(overrides)
    stage, engine = engine_of(config)
    for step in (1, 2, 3):
        accumulate(config, stage, engine, step)
        engine.step(1e-3)
    if precision == "fp16":
        engine.loss_scale.value.mul_(0.5)  # off its initial value
    other_stage, other = engine_of(configure(f"{overrides} train.seed=1"))
    saved = {name: tensor.clone() for name, (tensor, _) in engine.tensors().items()}
    assert saved.keys() == {
        f"{kind}/{name}" for kind in ("model", "adam_m", "adam_v") for name, _ in stage.named_parameters()
    }
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


def test_what_is_read_into_is_not_being_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather that ends behind a checkpoint's reading, or a rollback's, would put back
    the values that it began with.
    """
    _, engine = engine_of(configure())
    settled: list[bool] = []
    monkeypatch.setattr(engine, "settle", lambda: settled.append(True))
    engine.tensors()
    assert settled


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_of_one_buffer_have_versions_of_their_own(device: str) -> None:
    """Autograd would take a gather of later parameters for a change of those that
    forward has used already.
    """
    buffer, parameter = torch.zeros(8), torch.nn.Parameter(torch.empty(2, 2, device=device))
    hold(parameter, buffer[:4].view(2, 2))
    before = parameter._version
    buffer.add_(1.0)
    assert parameter._version == before and bool((parameter == 1.0).all())


def test_an_engine_of_another_package_is_built_or_the_missing_one_is_named() -> None:
    """A run would silently step with another engine than its config names."""
    config: Any = SimpleNamespace(engine=SimpleNamespace(kind="deepspeed"), token_ranks=1)
    mesh: Any = None
    engines: Any = {"deepspeed": lambda *arguments: arguments}
    assert build_engine(config, [], mesh, engines) == (config, [], mesh)
    for others in (None, {}, {"another": engines["deepspeed"]}):
        with pytest.raises(RuntimeError, match="pass engines=ENGINES of megacore.tools.deepspeed.engine"):
            build_engine(config, [], mesh, others)
