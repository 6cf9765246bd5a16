"""What published models do otherwise than GPT-2, compared with plain formulas."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.config import Config
from megacore.config.schema import IGNORED
from megacore.errors import ConfigError
from megacore.model.batch import Microbatch
from megacore.model.stage import Stage
from megacore.tools.choices.activations import stage_activations
from megacore.tools.choices.flops import block_flops
from tests.build import model_of, run_of

SIZES = {
    "num_layers": 3,
    "hidden_size": 24,
    "num_heads": 2,
    "vocab_size": 61,
    "ffn_size": 40,
    "bias": False,
    "norm": "rmsnorm",
}


def config_of(**model: Any) -> Config:
    train = {"seq_len": 12, "precision": "fp64", "device": "cpu", "global_batch_size": 1}
    return run_of({"model": SIZES | model, "train": train})


def built(**model: Any) -> Stage:
    """A model whose norms are off one, and whose layers do not begin at zero."""
    stage = model_of(config_of(**model))
    for parameter in stage.parameters():
        parameter.data.add_(
            0.2
            * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        )
    return stage


def rms(x: Tensor, norm: Any) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * norm.weight


def arranged(block: Any, x: Tensor, place: str, branches: str, context: Any) -> Tensor:
    """A block, written plainly."""

    def branch(x: Tensor, layer: Any, before: str, behind: str) -> Tensor:
        x = rms(x, getattr(block, before)) if place != "post" else x
        x = layer(x)
        return rms(x, getattr(block, behind)) if place != "pre" else x

    attended = branch(x, lambda x: block.attention(x, context), "norm1", "post_norm1")
    second = "norm1" if branches == "shared_norm" else "norm2"
    return (
        x
        + attended
        + branch(x + attended if branches == "serial" else x, block.feed_forward, second, "post_norm2")
    )


@pytest.mark.parametrize("place", ["pre", "post", "both"])
@pytest.mark.parametrize("branches", ["serial", "parallel", "shared_norm"])
def test_where_norms_and_branches_stand(place: str, branches: str) -> None:
    """A norm in a wrong place trains as well, and is another model than the one that it is called after."""
    if place == "post" and branches == "shared_norm":
        with pytest.raises(ConfigError, match="shared_norm"):
            config_of(norm_place=place, branches=branches)
        return
    stage = built(norm_place=place, branches=branches)
    (context,) = contexts(stage)
    x = torch.randn(12, 24, dtype=torch.float64)
    for block in stage.inner:
        right = arranged(block, x, place, branches, context)
        torch.testing.assert_close(block(x, context), right, rtol=1e-12, atol=1e-12)


def contexts(stage: Stage) -> list[Any]:
    """The context that blocks are told."""
    seen: list[Any] = []
    handle = stage.inner[0].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[1]))
    stage.hidden(torch.arange(12)[None])
    handle.remove()
    return seen


def clamped_by_transformers(x: torch.Tensor) -> torch.Tensor:
    """gpt-oss's activation, whose gate and up stand side by side."""
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    theirs = gpt_oss.GptOssExperts(
        gpt_oss.GptOssConfig(hidden_size=2, intermediate_size=2, num_local_experts=1)
    )
    assert (x.abs() > theirs.limit).any()
    return theirs._apply_gate(x.unflatten(-1, (2, -1)).mT.flatten(-2))


@pytest.mark.parametrize(
    ("activation", "right"),
    [
        ("relu2", lambda x: F.relu(x) ** 2),
        ("geglu", lambda x: F.gelu(x[..., :40], approximate="tanh") * x[..., 40:]),
        ("geglu_erf", lambda x: F.gelu(x[..., :40]) * x[..., 40:]),
        ("swiglu_clamped", lambda x: clamped_by_transformers(x)),
    ],
)
def test_activations(activation: str, right: Any) -> None:
    feed_forward: Any = built(activation=activation).inner[0].feed_forward
    x = 40 * torch.randn(5, 24, dtype=torch.float64)  # beyond a clamp
    up, down = feed_forward.up.weight.flatten(0, -2), feed_forward.down.weight
    torch.testing.assert_close(feed_forward(x), right(x @ up.T) @ down.T, rtol=1e-12, atol=1e-12)


def test_the_layers_that_write_to_the_residual_begin_at_zero() -> None:
    stage = model_of(config_of(zero_init=True))
    zero = {name for name, parameter in stage.named_parameters() if not parameter.any()}
    assert zero == {
        f"blocks.{i}.{layer}.weight" for i in range(3) for layer in ("attention.output", "feed_forward.down")
    }
    tokens = torch.arange(12)[None]
    assert torch.equal(
        stage.hidden(tokens), model_of(config_of(num_layers=1, zero_init=True)).hidden(tokens)
    ), "blocks change nothing"


def test_the_embedding_is_normed() -> None:
    stage = built(embedding_norm=True)
    tokens = torch.arange(12)[None]
    embedding: Any = stage.before[0]
    x = embedding.embedding.weight[:12] + embedding.position[:12]
    found = embedding(stage.context(Microbatch(tokens)))
    torch.testing.assert_close(found, rms(x, embedding.embedding_norm), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunked", [False, True])
def test_the_z_loss_is_a_loss_of_its_own(chunked: bool) -> None:
    """Of the targets that count; its gradient comes with cross entropy's."""
    stage = built(z_loss=0.1, chunked_loss=chunked)
    tokens, targets = torch.arange(12)[None], torch.arange(12).flip(0)[None].clone()
    targets[0, 3] = IGNORED
    _, found = stage({}, Microbatch(tokens, targets))
    logits = stage.logits(stage.hidden(tokens))
    right = (
        F.cross_entropy(logits, targets[0], reduction="sum"),
        logits.logsumexp(1)[targets[0] != IGNORED].square().sum(),
    )
    gradients = torch.autograd.grad(right[0] + 0.1 * right[1], list(stage.parameters()))
    (0.5 * found["cross_entropy"] + 0.05 * found["z_loss"]).backward()
    torch.testing.assert_close(tuple(found.values()), right, rtol=1e-12, atol=1e-12)
    for parameter, gradient in zip(stage.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, 0.5 * gradient, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kind", ["headwise", "elementwise"])
def test_gates_of_attention(kind: str) -> None:
    """Each head, or each feature, by the input of its own token; gates are products, and counted."""
    stage, plain = (built(attention_gate=gate, num_heads=4) for gate in (kind, None))
    (context,) = contexts(stage)
    ours, other = (model.inner[1].attention for model in (stage, plain))
    x, seen = torch.randn(12, 24, dtype=torch.float64), list[Tensor]()
    other.load_state_dict({name: tensor for name, tensor in ours.state_dict().items() if name != "qkv.gate"})
    other.output.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    other(x, context)
    right = (seen[0].view(12, 4, 6) * torch.sigmoid(x @ ours.qkv.gate.T).view(12, 4, -1)).view(
        12, 24
    ) @ ours.output.weight.T
    torch.testing.assert_close(ours(x, context), right, rtol=1e-12, atol=1e-12)
    rows = 4 if kind == "headwise" else 24
    assert len(ours.qkv.gate) == rows
    assert block_flops(stage.config, False) - block_flops(plain.config, False) == 2 * 24 * rows


def test_blocks_without_positions_are_every_nth() -> None:
    """In these the order of the tokens before a token must not matter; in the others it must."""
    stage = built(position="rope", nope_every=3)
    (context,) = contexts(stage)
    x = torch.randn(12, 24, dtype=torch.float64)
    swapped = torch.cat((x[:5].flip(0), x[5:]))
    for number, block in enumerate(stage.inner):
        alike = torch.allclose(block(x, context)[-1], block(swapped, context)[-1], rtol=1e-10)
        assert alike == (number == 2)


def test_the_planner_tells_kinds_of_blocks_apart() -> None:
    """One without positions keeps other tensors; taken for the first, the plan of its
    stage would be wrong.
    """
    config = config_of(position="rope", nope_every=2)
    assert [config.model.alike(block) for block in range(3)] == [0, 1, 0]
    third, second, rotating = (
        stage_activations(config_of(num_layers=6, position="rope", **own), [range(6)])[0].kept
        for own in ({"nope_every": 3}, {"nope_every": 2}, {})
    )
    assert 3 * (rotating - third) == 2 * (rotating - second) > 0


def test_a_gate_is_a_third_product() -> None:
    assert block_flops(config_of(activation="geglu"), False) == block_flops(
        config_of(activation="swiglu"), False
    )
    assert block_flops(config_of(activation="relu2"), False) == block_flops(config_of(), False)
