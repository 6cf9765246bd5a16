"""Whole training runs on Triton's kernels, in its interpreter: the losses of eager, within fp32 rounding, in tp2·pp2 too."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megacore.distributed.communicator import Communicator, Group
from megacore.distributed.shard import shard_of
from megacore.model.block import FeedForward
from megacore.tensor_parallel.gradient import MainGradient
from megacore.tools.settings.load import load
from tests import training
from tests.kernel_checks import TOLERANCE, launches, needs_triton, relative_error, seeded
from tests.pieces import dim_of
from tests.pool import Pool

STEPS = 2  # the interpreter takes a thousand times as long as a compiled kernel
SMALL = [
    "model.num_layers=2",
    "model.hidden_size=16",
    "train.seq_len=8",
    "train.micro_batch_size=1",
    "train.global_batch_size=2",
]
SMALL += [f"train.steps={STEPS}", "optim.warmup_steps=1"]
# Between them, every kernel that a model can use.
MODELS = {
    "layer norm, gelu, learned, dropout": ["model.dropout=0.1"],
    "RMS norm, swiglu, rope, grouped, fused softmax": [
        *(
            "model.norm=rmsnorm",
            "model.activation=swiglu",
            "model.position=rope",
            "model.num_kv_heads=2",
            "model.attention=fused",
        ),
        *("model.bias=false", "model.tie_embeddings=false"),
    ],
    "mixture of experts": [
        "model.num_experts=4",
        "model.experts_per_token=2",
        "model.expert_ffn_size=16",
        "model.bias=false",
    ],
    "query-key norm, gelu_erf, chunked loss": [
        *(
            "model.qk_norm=true",
            "model.position=rope",
            "model.activation=gelu_erf",
            "model.chunked_loss=true",
        ),
    ],
}
LAYOUTS = {1: [], 4: ["parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence=true"]}


@pytest.fixture(scope="module")
def interpreting() -> Iterator[Pool]:
    """Workers in which Triton interprets: it looks at the variable once, when it is imported."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    pool = Pool(bare=True)
    try:
        yield pool
    finally:
        pool.close()
        os.environ.pop("TRITON_INTERPRET") if before is None else os.environ.update(TRITON_INTERPRET=before)


def figures(pool: Pool, folder: Path, world: int, overrides: list[str]) -> list[tuple[float, float]]:
    log_dir = str(folder / f"run{len(list(folder.iterdir()))}")
    assert (
        pool.run(world, training.run_rank, str(folder / "config.json"), [*SMALL, *overrides], log_dir)
        == [0] * world
    )
    return [(m["loss"], m["grad_norm"]) for m in training.metrics(log_dir)]


@needs_triton
@pytest.mark.parametrize("world", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_triton_trains_as_eager_does(interpreting: Pool, tmp_path: Path, model: str, world: int) -> None:
    training.write_config(tmp_path, training.write_corpus(tmp_path, tokens=600))
    layout = [*MODELS[model], *LAYOUTS[world]]
    fused = figures(interpreting, tmp_path, world, [*layout, "model.kernels=triton"])
    eager = figures(interpreting, tmp_path, 1, [*MODELS[model], "model.kernels=eager"])
    assert len(fused) == STEPS and fused != eager, "the same bits: Triton was not used"
    for step, (got, right) in enumerate(zip(fused, eager, strict=True), 1):
        assert got == pytest.approx(right, rel=1e-5), f"step {step}"


def feed_forward_errors(path: str, world: int, overrides: list[str]) -> tuple[list[bool], dict[str, float]]:
    """On a rank: whether each launch adds the bias; and how far output and gradients are from plain fp64, relative to the largest."""
    config = load(path, ["train.precision=fp32", f"parallel.tensor={world}", *overrides], world).config
    if world > 1:
        dist.init_process_group("gloo")
    wire = Communicator(dist.group.WORLD, world) if world > 1 and dist.group.WORLD is not None else None
    group = Group("tp", tuple(range(world)), dist.get_rank() if world > 1 else 0, wire)
    layer = FeedForward(config, group, torch.float32, torch.device("cpu"), 0.1)
    shards = {name: shard_of(parameter) for name, parameter in layer.named_parameters()}
    whole = {
        name: seeded(shard.global_shape, "cpu", seed=i) for i, (name, shard) in enumerate(shards.items())
    }
    for name, parameter in layer.named_parameters():
        dim = dim_of(shards[name])
        parameter.data.copy_(whole[name] if dim is None else whole[name].chunk(world, dim)[group.rank])
    mains = {
        f"{layer_name}.weight": MainGradient(torch.zeros_like(part.weight))
        for layer_name, part in layer.named_children()
    }
    for name, main in mains.items():  # as the native engine has them
        layer.get_parameter(name).main_gradient = main  # type: ignore[attr-defined]
    x, dy = (
        seeded((6, config.model.hidden_size), "cpu", seed=seed).requires_grad_(seed == 8) for seed in (8, 9)
    )
    with launches() as log:
        y = layer(x)
        y.backward(dy)
    p = {name: tensor.double().requires_grad_() for name, tensor in whole.items()}
    exact_x = x.detach().double().requires_grad_()
    h = F.gelu(exact_x @ p["up.weight"].T + p["up.bias"], approximate="tanh")
    right = h @ p["down.weight"].T + p["down.bias"]
    right.backward(dy.double())
    assert x.grad is not None and exact_x.grad is not None
    errors = {"y": relative_error(y, right), "x": relative_error(x.grad, exact_x.grad)}
    for name, parameter in layer.named_parameters():
        dim, exact = dim_of(shards[name]), p[name].grad
        assert exact is not None
        found = mains[name].total if name in mains else parameter.grad
        assert found is not None, name
        errors[name] = relative_error(found, exact if dim is None else exact.chunk(world, dim)[group.rank])
    if world > 1:
        dist.destroy_process_group()
    return [options["HAS_BIAS"] for _, options in log], errors


@needs_triton
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("world", [1, 2])
def test_the_activations_kernel_adds_the_bias(
    interpreting: Pool, tmp_path: Path, world: int, recompute: str
) -> None:
    """And sums its gradient; the weights' go to the engine's sums as ever. Without a bias in its launch it would be added before."""
    path = training.write_config(tmp_path, "unused")
    overrides = [f"train.recompute={recompute}", "model.hidden_size=16"]
    for added, errors in interpreting.run(
        world, feed_forward_errors, path, world, [*overrides, "model.kernels=triton"]
    ):
        assert added == [True] * (3 if recompute == "selective" else 2)
        assert max(errors.values()) < TOLERANCE[torch.float32], errors
    for added, errors in interpreting.run(
        world, feed_forward_errors, path, world, [*overrides, "model.kernels=auto"]
    ):
        assert not added and max(errors.values()) < TOLERANCE[torch.float32], (
            "on a CPU the linear layer adds it"
        )


def test_triton_without_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would fail in the middle of the first step, with a message of Triton's."""
    from megacore.distributed.rank_info import RankInfo
    from megacore.errors import ConfigError
    from megacore.tools.machine.device import pick_device

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    config: Any = load(training.write_config(tmp_path, "unused"), ["model.kernels=triton"]).config
    with pytest.raises(
        ConfigError, match=r"model.kernels: triton needs a GPU, .* \(auto, or TRITON_INTERPRET=1\)"
    ):
        pick_device(config, RankInfo())
    with pytest.raises(ConfigError, match=r"model.kernels: .* \(auto or eager\)"):
        load(str(tmp_path / "config.json"), ["model.kernels=triton", "train.precision=fp64"])
