"""The GPT on one device: against a plain one written here, and by the properties that a
causal language model must have.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.config import Config
from megacore.distributed.communicator import SOLO, Group
from megacore.distributed.shard import shard_of
from megacore.kernels.dropout import bias_dropout_residual
from megacore.kernels.rope import rope
from megacore.model import context, head
from megacore.model.batch import Microbatch
from megacore.model.context import Context
from megacore.model.layers import DTYPES
from megacore.model.norm import Norm
from megacore.model.rotary import rope_tables
from megacore.model.stage import Stage
from megacore.tensor_parallel.linear import row_stride
from megacore.tools.planner.parameters import parameters
from megacore.train.loader import Loader
from tests.build import model_of, run_of, topology_of
from tests.pieces import dim_of
from tests.training import VOCAB_SIZE, write_config

CPU = torch.device("cpu")
LLAMA = (
    "model.position=rope model.norm=rmsnorm model.activation=swiglu model.bias=false "
    "model.tie_embeddings=false"
)
VARIANTS = {
    "gpt2": "",
    "llama": LLAMA,
    "grouped queries": "model.num_kv_heads=2",
    "one key head, rope": "model.num_kv_heads=1 model.position=rope",
    "gelu, no bias, untied": "model.bias=false model.tie_embeddings=false",
    "swiglu with biases": "model.activation=swiglu model.norm=rmsnorm",
    "query-key norm, wide heads": f"{LLAMA} model.qk_norm=true model.head_size=12 model.num_kv_heads=2",
    "biases on queries, keys, values": f"{LLAMA} model.qkv_bias=true",
    "biases of attention alone": f"{LLAMA} model.qkv_bias=true model.output_bias=true",
    "scales, more positions": "model.embedding_scale=3 model.attention_scale=0.2 model.residual_scale=0.4 "
    "model.logit_scale=0.3 "
    "model.max_positions=20",
}
Configure = Callable[..., Config]


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """`configure(overrides, world=1)`: the tests' small config in fp64, resolved."""
    path = write_config(tmp_path, "unused", train={"precision": "fp64"})
    return lambda overrides="", world=1: run_of(path, *overrides.split(), world=world)


def tokens_of(config: Config, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        VOCAB_SIZE, (config.train.micro_batch_size, config.train.seq_len), generator=generator
    )


def shake(stage: Stage) -> Stage:
    """Moves every parameter off its initial value: zero biases and unit norms
    would hide what is done with them.
    """
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.add_(
                0.1
                * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
            )
    return stage


def loss_and_gradients(stage: Stage, key: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    inputs, targets = tokens_of(stage.config), tokens_of(stage.config, 1)
    loss = stage.loss(stage.hidden(inputs, key), targets)
    names, values = zip(*stage.named_parameters(), strict=True)
    return loss.detach(), dict(zip(names, torch.autograd.grad(loss, values), strict=True))


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Of any two tensors of the same name, relative to the second's largest element."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max() / b[name].abs().max()) for name in a)


def plain_gpt(config: Config, p: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits ``[batch, seq, vocab]`` of `tokens` ``[batch, seq]``: a head at a time,
    rotary positions as complex numbers.
    """
    model, seq = config.model, tokens.shape[1]
    head, group = config.head_size, model.num_heads // config.kv_heads

    def norm(x: Tensor, name: str) -> Tensor:
        if model.norm == "rmsnorm":
            return x / (x.square().mean(-1, keepdim=True) + model.norm_eps).sqrt() * p[name + ".weight"]
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + model.norm_eps).sqrt() * p[name + ".weight"]
        return x + p[name + ".bias"] if model.bias else x

    def linear(x: Tensor, name: str) -> Tensor:
        y = torch.tensordot(x, p[name + ".weight"], dims=([-1], [-1]))
        has_bias = {"qkv": model.qkv_bias, "output": model.output_bias}.get(
            name.rpartition(".")[2], model.bias
        )
        return y + p[name + ".bias"] if has_bias else y

    def normed(x: Tensor, name: str) -> Tensor:
        if not model.qk_norm:
            return x
        return x / (x.square().mean(-1, keepdim=True) + model.norm_eps).sqrt() * p[name + ".weight"]

    def positioned(x: Tensor) -> Tensor:
        if model.position != "rope":
            return x
        pairs = torch.complex(x[..., : head // 2], x[..., head // 2 :])
        frequency = torch.tensor(
            [model.rope_theta ** (-2 * i / head) for i in range(head // 2)], dtype=torch.float64
        )
        pairs = pairs * torch.exp(1j * torch.arange(seq)[:, None] * frequency)
        return torch.cat((pairs.real, pairs.imag), -1)

    x = p["embedding.weight"][tokens] * model.embedding_scale
    if model.position == "learned":
        x = x + p["position"][:seq]
    for i in range(model.num_layers):
        # [batch, seq, kv heads, group + 2, head]
        qkv = linear(norm(x, f"blocks.{i}.norm1"), f"blocks.{i}.attention.qkv")
        heads = []
        for h in range(model.num_heads):
            q, k, v = (qkv[:, :, h // group, j] for j in (h % group, group, group + 1))
            q, k = normed(q, f"blocks.{i}.attention.query_norm"), normed(k, f"blocks.{i}.attention.key_norm")
            scores = positioned(q) @ positioned(k).transpose(1, 2) * model.attention_scale
            scores[:, *torch.triu_indices(seq, seq, 1)] = -torch.inf
            heads.append(scores.softmax(-1) @ v)
        x = x + linear(torch.cat(heads, -1), f"blocks.{i}.attention.output") * model.residual_scale
        up = linear(norm(x, f"blocks.{i}.norm2"), f"blocks.{i}.feed_forward.up")
        if model.activation == "swiglu":
            up = up[:, :, 0] * up[:, :, 0].sigmoid() * up[:, :, 1]
        else:
            up = 0.5 * up * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (up + 0.044715 * up**3)))
        x = x + linear(up, f"blocks.{i}.feed_forward.down") * model.residual_scale
    return (
        norm(x, "norm")
        @ p["embedding.weight" if model.tie_embeddings else "head.weight"].T
        * model.logit_scale
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_a_plain_gpt(configure: Configure, variant: str) -> None:
    """A block wired, scaled or masked differently would still train, only worse."""
    config = configure(VARIANTS[variant])
    stage = shake(model_of(config))
    p = {name: parameter.detach().clone().requires_grad_() for name, parameter in stage.named_parameters()}
    logits = plain_gpt(config, p, tokens_of(config))
    right = F.cross_entropy(logits.flatten(0, 1), tokens_of(config, 1).flatten(), reduction="sum")
    right.backward()
    loss, gradients = loss_and_gradients(stage)
    assert torch.equal(loss, stage.loss(stage.hidden(tokens_of(config)), tokens_of(config, 1)).detach())
    assert float((loss - right.detach()).abs() / right.detach()) < 1e-12
    assert (
        largest_difference(gradients, {name: q.grad for name, q in p.items() if q.grad is not None}) < 1e-12
    )


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE + 1, 8191])
def test_padding_between_logits_is_never_counted(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, vocab_size: int
) -> None:
    """In 16 bits on a GPU the rows of logits are apart, and what is between them
    is of no use: here it is NaN.
    """

    def poisoned(size: tuple[int, int], stride: tuple[int, int], **options: Any) -> Tensor:
        room = torch.full((size[0] * stride[0],), torch.nan, **options)
        return torch.empty(0, **options).set_(room.untyped_storage(), 0, size, stride)

    stage = shake(model_of(configure(f"model.vocab_size={vocab_size}")))
    right, wanted = loss_and_gradients(stage)
    with torch.no_grad():
        logits = stage.logits(stage.hidden(tokens_of(stage.config)))
        monkeypatch.setattr(head, "row_stride", lambda x, outputs: -(-outputs // 64) * 64)
        monkeypatch.setattr(torch, "empty_strided", poisoned)
        apart = stage.logits(stage.hidden(tokens_of(stage.config)))
    assert apart.shape == logits.shape and apart.stride(0) % 64 == 0 and apart.stride(0) > vocab_size
    assert float((apart - logits).abs().max()) < 1e-12
    loss, gradients = loss_and_gradients(stage)
    assert float((loss - right).abs() / right) < 1e-12 and largest_difference(gradients, wanted) < 1e-12
    assert next(p for n, p in stage.named_parameters() if n == "embedding.weight").shape[0] == vocab_size


@pytest.mark.parametrize(
    ("device", "dtype", "stride"), [("cuda", "bf16", 128), ("cuda", "fp32", 65), ("cpu", "bf16", 65)]
)
def test_where_logits_are_padded(device: str, dtype: str, stride: int) -> None:
    """On CPUs and in 32 bits nothing is gained."""
    x: Any = SimpleNamespace(device=torch.device(device), element_size=lambda: DTYPES[dtype].itemsize)
    assert row_stride(x, 65) == stride and row_stride(x, 128) == 128


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (1, 3), (2, 2)])
def test_layouts_cut_the_same_initial_parameters(
    configure: Configure, variant: str, tp: int, pp: int
) -> None:
    """Counted once each, they are as many as planned; and put together, bitwise those of one device."""
    alone = model_of(configure(VARIANTS[variant]))
    whole = dict(alone.named_parameters())
    tp = min(tp, alone.config.kv_heads)  # a key head is not cut
    config = configure(
        f"{VARIANTS[variant]} parallel.tensor={tp} parallel.pipeline={pp} parallel.sequence=true",
        world=tp * pp,
    )
    counted = 0
    for stage in range(pp):
        # anywhere, also between the ends and their neighbours
        layers = range(7 * stage // pp, 7 * (stage + 1) // pp)
        topologies = [topology_of(config, stage * tp + rank) for rank in range(tp)]
        ranks = [Stage(config, layers, topology, CPU) for topology in topologies]
        held_by = [
            (topology, *named)
            for topology, rank in zip(topologies, ranks, strict=True)
            for named in rank.named_parameters()
        ]
        counted += sum(
            p.numel() for topology, name, p in held_by if topology.placed(shard_of(p), name).counted
        )
        for pieces in zip(*(rank.named_parameters() for rank in ranks), strict=True):
            name, dim = pieces[0][0], dim_of(shard_of(pieces[0][1]))
            held = [piece.detach() for _, piece in pieces]
            for logical in held if dim is None else [torch.cat(held, dim)]:
                assert torch.equal(logical, whole[name]), name
    assert counted == parameters(config)


def test_initial_deviations(configure: Configure) -> None:
    """GPT-2's: 0.02, for layers that write to the residual over the root of their
    number; zero biases; unit norms.
    """
    config = configure("model.hidden_size=128 model.num_layers=8")
    for name, parameter in model_of(config).named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            right = 0.02 / 4 if "output" in name or "down" in name else 0.02
            assert float(parameter.detach().std()) == pytest.approx(
                right, rel=5 / parameter.numel() ** 0.5
            ), name


@pytest.mark.parametrize(
    "overrides", ["", LLAMA, "model.attention=eager", "model.attention=fused train.precision=fp32"]
)
def test_no_position_sees_a_later_one(configure: Configure, overrides: str) -> None:
    """A leak makes the training loss fall for nothing: the model copies its target."""
    stage = shake(model_of(configure(overrides))).eval()
    tokens = tokens_of(stage.config)
    batch, seq = tokens.shape
    logits = stage.logits(stage.hidden(tokens)).view(batch, seq, -1)
    for t in (0, 5, seq - 1):
        changed = tokens.clone()
        changed[0, t] = (changed[0, t] + 1) % VOCAB_SIZE
        moved = (stage.logits(stage.hidden(changed)).view(batch, seq, -1) != logits).any(-1)
        assert not moved[0, :t].any() and not moved[1:].any()
        assert moved[0, t:].all(), "or the comparison would prove nothing"


def test_rotary_scores_depend_on_distance_alone() -> None:
    """The one property that rotary positions are for; and they turn, so lengths stay."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=generator, dtype=torch.float64).expand(2, 1, 1, 32, 8)
    cos, sin = rope_tables(np.arange(32), 8, 10000.0, torch.float64, CPU)
    # the same q and k at every position
    scores = (rope(q, cos, sin) @ rope(k, cos, sin).transpose(-2, -1))[0, 0]
    for distance in range(-31, 32):
        diagonal = scores.diagonal(distance)
        assert float((diagonal - diagonal[0]).abs().max()) < 1e-12
    assert float(scores.std()) > 0.1
    assert torch.allclose(rope(q, cos, sin).norm(dim=-1), q.norm(dim=-1), rtol=1e-12)
    assert torch.equal(rope(q, cos, sin)[..., 0, :], q[..., 0, :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_angles_at_long_context(dtype: torch.dtype) -> None:
    """Angles in fp32, of position times frequency, would be off by 1e-2 at a million positions."""
    position, head = 2**20 - 1, 8
    cos, sin = rope_tables(np.arange(position + 1), head, 10000.0, torch.float32, CPU)
    angle = torch.tensor(
        [position * 10000.0 ** (-2 * i / head) for i in range(head // 2)], dtype=torch.float64
    )
    x = torch.ones(1, 1, 1, head, dtype=dtype)
    right = torch.cat((angle.cos() - angle.sin(), angle.sin() + angle.cos()))
    assert (
        float((rope(x, cos[-1:], sin[-1:]) - right).abs().max())
        < {torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
    )


@pytest.mark.parametrize("overrides", ["", LLAMA, "model.num_kv_heads=2"])
def test_eager_attention_equals_sdpa(configure: Configure, overrides: str) -> None:
    losses = [
        loss_and_gradients(shake(model_of(configure(f"{overrides} model.attention={a}"))))
        for a in ("sdpa", "eager")
    ]
    assert torch.allclose(losses[0][0], losses[1][0], rtol=1e-13)
    assert largest_difference(losses[0][1], losses[1][1]) < 1e-12


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_grouped_queries_equal_repeated_key_heads(configure: Configure, attention: str) -> None:
    """A query head that read another group's keys would be a different, undocumented model."""
    grouped = shake(model_of(configure(f"model.num_kv_heads=2 model.attention={attention}")))
    full = model_of(configure(f"model.attention={attention}"))
    state = grouped.state_dict()
    for name in [name for name in state if ".qkv." in name]:
        groups = state[name]  # [2, 2 queries + key + value, head, …]
        state[name] = torch.stack([torch.stack((g[query], g[2], g[3])) for g in groups for query in (0, 1)])
    full.load_state_dict(state)
    tokens = tokens_of(grouped.config)
    assert torch.allclose(
        grouped.logits(grouped.hidden(tokens)), full.logits(full.hidden(tokens)), rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_heads_without_rotation_are_views(configure: Configure, kv_heads: int) -> None:
    """A copy of keys and values would be a pass over memory in every block.

    Queries of groups need one: no one stride has their heads.
    """
    attention = model_of(configure(f"model.num_kv_heads={kv_heads}")).blocks["0"].attention
    qkv = torch.randn(2, 5, kv_heads, 4 // kv_heads + 2, attention.head_size)
    views = [
        x.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr() for x in attention.heads(qkv, None)
    ]
    assert views == [kv_heads == 4, True, True]


@pytest.mark.parametrize("overrides", ["", LLAMA, "model.attention=eager model.num_kv_heads=2"])
def test_recomputation_changes_memory_and_nothing_else(configure: Configure, overrides: str) -> None:
    """With dropout, so that a mask drawn anew in the recomputation would show; and each must
    keep less than the one before.
    """
    results, kept = [], []
    for recompute in ("none", "selective", "full"):
        stage = shake(model_of(configure(f"{overrides} model.dropout=0.2 train.recompute={recompute}")))
        own = {parameter.data_ptr() for parameter in stage.parameters()}
        saved: dict[int, int] = {}

        def keep(x: Tensor, own: set[int] = own, saved: dict[int, int] = saved) -> Tensor:
            if x.data_ptr() not in own:
                saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            results.append(loss_and_gradients(stage, key=3))
        kept.append(sum(saved.values()))
    for loss, gradients in results[1:]:
        assert torch.equal(loss, results[0][0])
        assert largest_difference(gradients, results[0][1]) < 1e-12
    assert kept[0] > kept[1] > kept[2]


def test_dropout_by_microbatch_and_site(configure: Configure) -> None:
    """Equal masks in two layers or two microbatches are not independent noise; and a
    recomputation must draw the same again.
    """
    ones = torch.ones(32, 64, dtype=torch.float64)

    def dropped(key: int, *site: object, group: Group = SOLO, sequence: bool = False) -> Tensor:
        context = Context(2, 16, None, group, sequence, 0.25, key, batch=Microbatch(torch.zeros(2, 16)))
        return context.drop(ones[: 32 // group.size] if sequence else ones, *site)

    masks = [
        dropped(1, 0, "attention"),
        dropped(2, 0, "attention"),
        dropped(1, 1, "attention"),
        dropped(1, 0, "feed_forward"),
    ]
    for i, mask in enumerate(masks):
        assert sorted(mask.unique().tolist()) == [0.0, pytest.approx(4 / 3)]
        assert float(mask.mean()) == pytest.approx(1, abs=0.06)
        assert all(0.5 < float((mask == other).double().mean()) < 0.75 for other in masks[:i])
    assert torch.equal(dropped(1, 0, "attention"), masks[0])
    parts = [dropped(1, 0, "attention", group=Group("tp", (0, 1), rank), sequence=True) for rank in range(2)]
    assert torch.equal(torch.cat(parts), masks[0]), "sequence parallelism must cut the mask, not draw another"

    stage = shake(model_of(configure("model.dropout=0.2")))
    still = shake(model_of(configure()))
    tokens = tokens_of(stage.config)
    assert torch.equal(stage.hidden(tokens, 1), stage.hidden(tokens, 1))
    assert not torch.equal(stage.hidden(tokens, 1), stage.hidden(tokens, 2))
    assert torch.equal(stage.eval().hidden(tokens, 1), still.hidden(tokens)), "no dropout in validation"


def test_every_microbatch_has_a_key_of_its_own(configure: Configure) -> None:
    """Keys follow the place in the global batch, not the rank: else dropout would
    repeat, or depend on the layout.
    """
    stream: Any = SimpleNamespace(
        samples=lambda indices: np.repeat(indices[:, None], 17, 1), learned=lambda indices: None
    )

    def keys(data: int) -> dict[tuple[int, int], int]:
        config = configure(f"parallel.data={data}", world=data)
        found = {}
        for rank in range(data):
            mesh: Any = SimpleNamespace(
                sample_group=Group("dp", tuple(range(data)), rank), cp=SOLO, device=CPU
            )
            for step in (1, 2):
                for microbatch in Loader(config, mesh, stream).read(step):
                    found[step, int(microbatch.tokens[0, 0])] = microbatch.key
        return found

    alone = keys(1)
    assert len(alone) == len(set(alone.values())) == 8
    assert keys(2) == keys(4) == alone


def test_every_place_has_a_mask_of_its_own_whichever_stage_holds_it(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two places with one key drop the same elements twice over: noise that is not independent.

    Uneven stages must not count anew.
    """
    keys: list[int] = []

    def noted(x: Tensor, bias: Any, residual: Any, probability: float, key: int, **options: Any) -> Tensor:
        keys.append(key)
        return bias_dropout_residual(x, bias, residual, probability, key, **options)

    monkeypatch.setattr(context, "bias_dropout_residual", noted)
    config = configure("model.dropout=0.2")
    model_of(config).hidden(tokens_of(config), 1)
    in_one = keys.copy()
    assert len(in_one) == len(set(in_one)) == 1 + 2 * config.model.num_layers, (
        "the embedding, and two in every block"
    )
    keys.clear()
    flow: dict[str, Tensor] = {}
    for layers in (range(4), range(4, 7)):
        flow, _ = Stage(config, layers, topology_of(config, 0), CPU)(
            flow, Microbatch(tokens_of(config), key=1)
        )
    assert keys == in_one


def test_another_seed_draws_other_weights(configure: Configure) -> None:
    """Runs of several seeds, to see what is chance, would all begin with one model; and two
    parameters of a shape with one tensor.
    """
    models = [dict(model_of(configure(f"train.seed={seed}")).named_parameters()) for seed in (0, 1)]
    drawn = [p for model in models for p in model.values() if shard_of(p).init_std is not None]
    for i, p in enumerate(drawn):
        assert not any(p.shape == other.shape and (p == other).any() for other in drawn[:i])


@pytest.mark.parametrize("variant", ["gpt2", "scales, more positions"])
def test_a_chunked_loss_is_the_models_loss(configure: Configure, variant: str) -> None:
    """Of the whole model, trained and evaluated, in several chunks: the head's
    scale, and every chunk, are in both.
    """
    sizes = "train.micro_batch_size=17 train.global_batch_size=17"
    results = []
    for chunked in ("false", "true"):
        stage = shake(model_of(configure(f"{VARIANTS[variant]} {sizes} model.chunked_loss={chunked}")))
        results.append(loss_and_gradients(stage))
        with torch.no_grad():
            evaluated = stage.eval().loss(stage.hidden(tokens_of(stage.config)), tokens_of(stage.config, 1))
        assert float(evaluated) == pytest.approx(float(results[0][0]), rel=1e-12)
    assert float(results[1][0]) == pytest.approx(float(results[0][0]), rel=1e-12)
    assert largest_difference(results[1][1], results[0][1]) < 1e-12


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norm_statistics_in_bf16(configure: Configure, kind: str) -> None:
    """Statistics of 4096 features in bf16 are off by percents: the sum stops growing
    where its step passes the values.
    """
    model = configure(f"model.norm={kind} model.hidden_size=4096").model
    norm = Norm(model, SOLO, False, torch.bfloat16, CPU)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(
                torch.ones_like(parameter) if parameter is norm.weight else torch.zeros_like(parameter)
            )
    x = (10 + torch.randn(16, 4096, generator=torch.Generator().manual_seed(0))).bfloat16()

    def mean(x: Tensor) -> Tensor:
        return sum(x.unbind(-1), torch.zeros_like(x[:, 0]))[:, None] / x.shape[1]  # rounds at every addition

    def plain(x: Tensor) -> Tensor:
        centred = x - mean(x) if kind == "layernorm" else x
        return centred / mean(centred.square()).sqrt()

    def error(y: Tensor) -> float:
        right = plain(x.double())
        return float(((y.double() - right).abs() / right.abs().clamp(min=0.1)).max())

    assert error(norm(x).detach()) < 2**-7
    assert error(plain(x)) > 2**-5, "the planted fault: statistics in bf16"
