"""Whole training runs on Triton's kernels, in its interpreter: the losses of eager, within
fp32 rounding, in tp2·pp2 too.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.kernel_inputs import zipf_tokens
from megacore.distributed.communicator import Communicator, Group
from megacore.distributed.shard import shard_of
from megacore.model.attention import Attention
from megacore.model.batch import Microbatch
from megacore.model.block import FeedForward
from megacore.model.context import Context
from megacore.model.embedding import vocabulary
from megacore.tensor_parallel.gradient import MainGradient, finish_in_turn
from megacore.tensor_parallel.linear import ColumnLinear
from megacore.tools.settings.load import load
from tests import training
from tests.build import run_of
from tests.kernel_checks import TOLERANCE, launches, needs_triton, relative_error, seeded
from tests.pieces import dim_of
from tests.pool import Pool

ATTENTION_TOLERANCE = 1e-5  # fp32, through two products and a softmax
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


Launches = list[tuple[str, dict[str, Any]]]


def feed_forward_errors(path: str, world: int, overrides: list[str]) -> tuple[list[bool], dict[str, float]]:
    """On a rank: whether each launch adds the bias; and how far output and gradients are from plain
    fp64, relative to the largest.
    """

    def exact(x: Tensor, p: dict[str, Tensor]) -> Tensor:
        h = F.gelu(x @ p["up.weight"].T + p["up.bias"], approximate="tanh")
        return h @ p["down.weight"].T + p["down.bias"]

    config = run_of(path, "train.precision=fp32", f"parallel.tensor={world}", *overrides, world=world)
    with tensor_group(world) as group:
        layer = FeedForward(config, group, torch.float32, torch.device("cpu"), 0.1)
        log, errors = layer_errors(layer, layer, exact, group)
    return [options["HAS_BIAS"] for _, options in log if "HAS_BIAS" in options], errors


def attention_errors(
    path: str, world: int, overrides: list[str], fault: bool = False
) -> tuple[list[str], dict[str, float]]:
    """On a rank: the kernels that are launched; and how far output and gradients are from plain fp64.

    fault: the layer of queries, keys and values sums the gradient of its bias, too.
    """
    config = run_of(path, "train.precision=fp32", f"parallel.tensor={world}", *overrides, world=world)
    model, batch, seq = config.model, 2, 3

    def run(x: Tensor) -> Tensor:
        microbatch = Microbatch(torch.zeros(batch, seq))
        return layer(x, Context(batch, seq, None, group, False, 0.0, 0, batch=microbatch))

    def exact(x: Tensor, p: dict[str, Tensor]) -> Tensor:
        qkv = torch.einsum("th,kgdh->tkgd", x, p["qkv.weight"]) + p["qkv.bias"]
        qkv = qkv.unflatten(0, (batch, seq)).movedim(1, 3)  # [batch, kv heads, group + 2, seq, head]
        q, (k, v) = qkv[:, :, :-2], (qkv[:, :, index, None] for index in (-2, -1))
        scores = q @ k.mT / config.head_size**0.5
        mask = torch.full((seq, seq), float("-inf"), dtype=torch.float64).triu(1)
        y = ((scores + mask).softmax(-1) @ v).flatten(1, 2).transpose(1, 2).reshape(batch * seq, -1)
        return y @ p["output.weight"].T + p["output.bias"]

    with tensor_group(world) as group:
        layer = Attention(config, group, torch.float32, torch.device("cpu"), 0.1)
        assert model.position == "learned"
        if fault:
            layer.qkv.forward = lambda x, constant_bias: ColumnLinear.forward(layer.qkv, x)
        log, errors = layer_errors(layer, run, exact, group)
    return [name for name, _ in log], errors


@contextmanager
def tensor_group(world: int) -> Iterator[Group]:
    """The tensor ranks, over gloo."""
    if world == 1:
        yield Group("tp", (0,), 0, None)
        return
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    yield Group("tp", tuple(range(world)), dist.get_rank(), Communicator(dist.group.WORLD, world))
    dist.destroy_process_group()


def layer_errors(
    layer: nn.Module,
    run: Callable[[Tensor], Tensor],
    exact: Callable[[Tensor, dict[str, Tensor]], Tensor],
    group: Group,
) -> tuple[Launches, dict[str, float]]:
    """What `run` launches, forward and backward, and its errors against `exact` with whole parameters."""
    shards = {name: shard_of(parameter) for name, parameter in layer.named_parameters()}
    whole = {
        name: seeded(shard.global_shape, "cpu", seed=i) for i, (name, shard) in enumerate(shards.items())
    }
    for name, parameter in layer.named_parameters():
        dim = dim_of(shards[name])
        parameter.data.copy_(whole[name] if dim is None else whole[name].chunk(group.size, dim)[group.rank])
    weights = [f"{child}.weight" for child, _ in layer.named_children()]
    mains = {name: MainGradient(torch.zeros_like(layer.get_parameter(name))) for name in weights}
    for name, main in mains.items():  # as the native engine has them
        layer.get_parameter(name).main_gradient = main  # type: ignore[attr-defined]
    hidden = next(iter(whole.values())).shape[-1]
    x, dy = (seeded((6, hidden), "cpu", seed=seed).requires_grad_(seed == 8) for seed in (8, 9))
    with launches() as log:
        y = run(x)
        y.backward(dy)
    p = {name: tensor.double().requires_grad_() for name, tensor in whole.items()}
    exact_x = x.detach().double().requires_grad_()
    right = exact(exact_x, p)
    right.backward(dy.double())
    assert x.grad is not None and exact_x.grad is not None
    errors = {"y": relative_error(y, right), "x": relative_error(x.grad, exact_x.grad)}
    for name, parameter in layer.named_parameters():
        dim, exact_grad = dim_of(shards[name]), p[name].grad
        assert exact_grad is not None
        found = mains[name].total if name in mains else parameter.grad
        assert found is not None, name
        own = exact_grad if dim is None else exact_grad.chunk(group.size, dim)[group.rank]
        errors[name] = relative_error(found, own)
    return log, errors


@needs_triton
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("world", [1, 2])
def test_the_activations_kernel_adds_the_bias(
    interpreting: Pool, tmp_path: Path, world: int, recompute: str
) -> None:
    """And sums its gradient; the weights' go to the engine's sums as ever.

    Without a bias in its launch it would be added before.
    """
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


def embedding_error(path: str, world: int, overrides: list[str], deferred: bool) -> tuple[set[str], float]:
    """On a rank: the names of the kernels that ran, and how far the gradient of its rows is from fp64."""
    config = run_of(path, "train.precision=fp32", f"parallel.tensor={world}", *overrides, world=world)
    vocab_size, hidden_size = config.model.vocab_size, config.model.hidden_size
    # More tokens than a program's, and some of them many times: runs cross from block to block.
    tokens = zipf_tokens(vocab_size, (100,), torch.Generator().manual_seed(0))
    grad = seeded((len(tokens), hidden_size), "cpu")

    with tensor_group(world) as group:
        embedding = vocabulary(config, SimpleNamespace(tp=group), torch.float32, torch.device("cpu"))  # type: ignore[arg-type]
        torch.nn.init.normal_(embedding.weight)
        main = MainGradient(torch.full_like(embedding.weight, torch.nan, requires_grad=False))
        embedding.weight.main_gradient = main  # type: ignore[attr-defined]
        with launches() as log:
            vectors = embedding(tokens)
            if deferred:
                with main.deferral.collect() as parts:
                    vectors.backward(grad)
                assert main.empty and len(list(finish_in_turn(parts))) == 1
            else:
                vectors.backward(grad)

    exact = torch.zeros(vocab_size, hidden_size, dtype=torch.float64).index_add_(0, tokens, grad.double())
    last_row = embedding.first_row + len(embedding.weight)
    return {name for name, _ in log}, relative_error(main.total, exact[embedding.first_row : last_row])


@needs_triton
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_the_embeddings_gradient_is_summed_by_its_kernel(
    interpreting: Pool, tmp_path: Path, world: int, deferred: bool
) -> None:
    """At once, or when a schedule wants it. The vocabulary is odd, so the last rank has fewer rows."""
    path = training.write_config(tmp_path, "unused")
    for kernels, launched in (("triton", {"_sum_runs_kernel"}), ("auto", set()), ("eager", set())):
        overrides = ["model.hidden_size=16", "model.vocab_size=77", f"model.kernels={kernels}"]
        for names, error in interpreting.run(world, embedding_error, path, world, overrides, deferred):
            assert names == launched and error < TOLERANCE[torch.float32], (kernels, names, error)


@needs_triton
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("world", [1, 2])
def test_a_kernel_joins_the_gradients_of_queries_keys_and_values(
    interpreting: Pool, tmp_path: Path, world: int, kv_heads: int
) -> None:
    """And sums that of their bias, once; elsewhere the linear layer does."""
    path = training.write_config(tmp_path, "unused")
    overrides = ["model.hidden_size=16", "model.num_heads=4", f"model.num_kv_heads={kv_heads}"]
    joining = ["_join_kernel", "_add_parts_kernel"]
    for kernels, launched in (("triton", joining), ("auto", [])):
        for names, errors in interpreting.run(
            world, attention_errors, path, world, [*overrides, f"model.kernels={kernels}"]
        ):
            assert names == launched and max(errors.values()) < ATTENTION_TOLERANCE, errors


@needs_triton
def test_a_bias_gradient_that_is_summed_twice_is_found(interpreting: Pool, tmp_path: Path) -> None:
    path = training.write_config(tmp_path, "unused")
    overrides = ["model.hidden_size=16", "model.num_heads=4", "model.kernels=triton"]
    ((_, errors),) = interpreting.run(1, attention_errors, path, 1, overrides, True)
    assert [name for name, error in errors.items() if error > ATTENTION_TOLERANCE] == ["qkv.bias"]


def test_triton_without_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would fail in the middle of the first step, with a message of Triton's."""
    from megacore.distributed.rank_info import RankInfo
    from megacore.errors import ConfigError
    from megacore.tools.machine.device import pick_device

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    config: Any = run_of(training.write_config(tmp_path, "unused"), "model.kernels=triton")
    with pytest.raises(
        ConfigError, match=r"model.kernels: triton needs a GPU, .* \(auto, or TRITON_INTERPRET=1\)"
    ):
        pick_device(config, RankInfo())
    with pytest.raises(ConfigError, match=r"model.kernels: .* \(auto or eager\)"):
        load(str(tmp_path / "config.json"), ["model.kernels=triton", "train.precision=fp64"])
