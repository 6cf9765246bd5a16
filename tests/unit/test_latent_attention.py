"""Latent attention is that of transformers' DeepSeek-V3, and its texts need only the latents."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.config import Config
from megacore.errors import ConfigError
from megacore.model.batch import Microbatch
from megacore.tools.choices.flops import attention_flops, projection_weights
from megacore.tools.text.cache import KeyValueCache
from tests import training
from tests.build import model_of, run_of
from tests.forks import perturbed
from tests.peers import widened
from tests.unit.test_generate import worst_logits

LATENT = {"head_size": 6, "q_rank": 20, "kv_rank": 12, "plain_size": 10, "value_size": 7}  # no two alike
SIZES = {"norm": "rmsnorm", "position": "rope", "bias": False, "num_layers": 2, **LATENT}
TOLERANCE = 1e-10  # fp64, relative to the largest element
BATCH, TOKENS = 3, 16


def config_of(folder: Path, **model: object) -> Config:
    path = training.write_config(folder, "unused", model=SIZES | model, train={"precision": "fp64"})
    return run_of(path)


def peer_of(config: Config, weights: dict[str, Tensor]) -> tuple[Any, Tensor, Tensor]:
    """transformers' attention with these weights, cos and sin of its positions.

    It pairs features that stand side by side, as DeepSeek's weights do, and megacore those a half apart: so
    the features that turn stand in another order.
    """
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    model, turned, plain = config.model, LATENT["head_size"], LATENT["plain_size"]
    sizes = {
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_heads,
    }
    latent = {"q_lora_rank": model.q_rank, "kv_lora_rank": model.kv_rank, "v_head_dim": model.value_size}
    heads = {"qk_nope_head_dim": plain, "qk_rope_head_dim": turned, "attn_implementation": "eager"}
    settings = deepseek.DeepseekV3Config(**sizes, **latent, **heads)
    theirs = deepseek.DeepseekV3Attention(settings, 0)
    side_by_side = torch.arange(turned).view(2, -1).T.flatten()
    q = weights["query.weight"]
    q = torch.cat((q[:, :plain], q[:, plain:][:, side_by_side]), 1).flatten(0, 1)
    rank = LATENT["kv_rank"]
    named = {
        "kv_a_proj_with_mqa": torch.cat(
            (weights["latent.weight"][:rank], weights["latent.weight"][rank:][side_by_side])
        ),
        "kv_a_layernorm": weights["latent.norm"],
        "kv_b_proj": weights["key_value.weight"].flatten(0, 1),
        "o_proj": weights["output.weight"],
        "q_proj" if model.q_rank is None else "q_b_proj": q,
    }
    if "query_latent.weight" in weights:
        named |= {"q_a_proj": weights["query_latent.weight"], "q_a_layernorm": weights["query_latent.norm"]}
    for name, module in theirs.named_children():
        if name.endswith("norm"):
            module.variance_epsilon = model.norm_eps
    used = torch.func.functional_call
    rotary = deepseek.DeepseekV3RotaryEmbedding(settings)
    mask = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)

    def attend(x: Tensor) -> Tensor:
        angles = rotary(x, torch.arange(TOKENS)[None])
        return used(theirs, {f"{name}.weight": value for name, value in named.items()}, (x, angles, mask))[0]

    return attend


@pytest.mark.parametrize("q_rank", [20, None])
def test_attention_and_gradients_are_those_of_transformers(tmp_path: Path, q_rank: int | None) -> None:
    """A head's features in another order, a norm on the wrong latent, a key that each head has of its own, a
    scale without the part that turns.
    """
    # what it imports must not see `widened`'s types
    pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = config_of(tmp_path, q_rank=q_rank)
    stage = perturbed(config, 0.2)
    attention: Any = stage.inner[0].attention
    x = torch.randn(
        BATCH,
        TOKENS,
        config.model.hidden_size,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(0),
    )
    ours = x.flatten(0, 1).requires_grad_()
    y = attention(ours, stage.context(Microbatch(torch.zeros(BATCH, TOKENS, dtype=torch.int64))))
    weight = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)
    (y * weight).sum().backward()
    with widened():
        weights = {name: p.detach().clone().requires_grad_() for name, p in attention.named_parameters()}
        theirs = x.clone().requires_grad_()
        expected = peer_of(config, weights)(theirs).flatten(0, 1)
        (expected * weight).sum().backward()
    pairs = {"y": (y, expected), "x": (ours.grad, theirs.grad.flatten(0, 1))}
    pairs |= {name: (p.grad, weights[name].grad) for name, p in attention.named_parameters()}
    for name, (found, right) in pairs.items():
        assert float((found - right).detach().abs().max() / right.detach().abs().max()) < TOLERANCE, name


@pytest.mark.parametrize("q_rank", [20, None])
def test_a_text_is_written_as_a_whole_pass_would(tmp_path: Path, q_rank: int | None) -> None:
    """Absorbed matrices give what keys and values of their own do: behind a prompt
    single tokens, and several at once.
    """
    assert worst_logits(config_of(tmp_path, q_rank=q_rank, init_std=0.2), (5, 1, 1, 3, 1, 1)) < 1e-12


def test_of_a_token_only_the_latent_and_the_shared_key_are_kept(tmp_path: Path) -> None:
    """Keys and values of the heads would take 4 · (16 + 7) numbers of a token in each layer, not 12 + 6."""
    config = config_of(tmp_path)
    stage, cache = perturbed(config, 0.0).eval(), KeyValueCache(1, 11)
    with torch.no_grad():
        stage({}, Microbatch(torch.zeros(1, 5, dtype=torch.int64)), cache)
    assert sum(x.nbytes for kept in cache._layers.values() for x in kept) == 2 * 11 * (12 + 6) * 8


@pytest.mark.parametrize("q_rank", [20, None])
def test_operations_are_counted(tmp_path: Path, q_rank: int | None) -> None:
    """A plan, stages and an MFU by the operations of plain attention, whose matrices are others."""
    config = config_of(tmp_path, q_rank=q_rank)
    attention: Any = model_of(config, "meta").inner[0].attention
    assert projection_weights(config) == sum(p.numel() for p in attention.parameters() if p.dim() > 1)
    assert attention_flops(config, causal=False) == 2 * config.train.seq_len * config.model.num_heads * (
        16 + 7
    )


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"kv_rank": None}, "model.q_rank: keys and values have no latent (null, or model.kv_rank=512)"),
    (
        {"kv_rank": None, "q_rank": None, "value_size": 128},
        "model.plain_size: keys and values have no latent (128, or model.kv_rank=512)",
    ),
    (
        {"num_kv_heads": 2},
        "model.num_kv_heads: with model.kv_rank each of 4 heads has a key of its own (4 or null)",
    ),
    ({"window": 4}, "model.window: latent attention does not go with 4 (null, or model.kv_rank=null)"),
    ({"bias": True}, "model.bias: latent attention does not go with true (false, or model.kv_rank=null)"),
    (
        {"position": "learned"},
        "model.position: latent attention does not go with learned (rope, or model.kv_rank=null)",
    ),
    ({"value_size": 2**44}, "model.value_size: with model.hidden_size 32 makes a tensor of"),
]


@pytest.mark.parametrize(("model", "said"), REFUSED)
def test_what_it_has_not_is_refused(tmp_path: Path, model: dict[str, object], said: str) -> None:
    """A window, or a size of the latent's, that would do nothing in silence."""
    with pytest.raises(ConfigError) as refused:
        config_of(tmp_path, **model)
    assert said in str(refused.value)
