"""DeepSeek-V3: latent attention, and experts that a sigmoid chooses by groups, with a bias for balance.

Its files pair the features of a head that turn side by side, 2j with 2j + 1, and ours j with j + half: so
these stand in another order.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megacore.config import Config
from megacore.config.schema import resolved
from megacore.tools.interchange.expert_families import (
    QWEN,
    apart,
    number_of_experts,
    together,
    viewed,
    with_experts,
)
from megacore.tools.interchange.mapped import Mapped, renamed, stacked
from megacore.tools.interchange.settings import (
    flag,
    get,
    number,
    or_null,
    read_llama_like,
    require,
    whole,
    write_llama_like,
)

BIAS_RATE = 0.001  # of the published run; the files of others do not say
SIZES = {  # ours, what they are called there, and their defaults
    "kv_rank": ("kv_lora_rank", 512),
    "plain_size": ("qk_nope_head_dim", 128),
    "value_size": ("v_head_dim", 128),
    "head_size": ("qk_rope_head_dim", 64),
    "expert_ffn_size": ("moe_intermediate_size", 2048),
    "shared_experts": ("n_shared_experts", 1),
    "experts_per_token": ("num_experts_per_tok", 8),
    "expert_groups": ("n_group", 8),
    "groups_per_token": ("topk_group", 4),
}


def read_deepseek_v3(hf: dict[str, Any]) -> dict[str, Any]:
    """See `Family.read`.

    Layers behind the last, which guess tokens further ahead, are no part of the function.
    """
    for key, right in (
        ("attention_bias", False),
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("moe_layer_freq", 1),
    ):
        require(hf, key, right, right)
    require(hf, "rms_norm_eps", 1e-6, 1e-6)  # which norms of latents have in any case
    heads = whole(hf, "num_attention_heads")
    require(hf, "num_key_value_heads", heads, heads, None)
    own = {ours: whole(hf, theirs, default) for ours, (theirs, default) in SIZES.items()}
    rope = get(hf, "rope_parameters", None, dict) or get(hf, "rope_scaling", None, dict) or {}
    return read_llama_like(
        hf | {"num_key_value_heads": heads, "head_dim": own["head_size"]},
        **own,
        q_rank=or_null(hf, "q_lora_rank", 1536, int),
        attention_scale=(own["plain_size"] + own["head_size"]) ** -0.5 * mscale(rope) ** 2,
        num_experts=number_of_experts(
            {"num_experts": hf["n_routed_experts"]} if "n_routed_experts" in hf else hf, 256
        ),
        first_dense=get(hf, "first_k_dense_replace", 3, int),
        router_scores="sigmoid",
        router_scale=number(hf, "routed_scaling_factor", 2.5),
        router_normalised=flag(hf, "norm_topk_prob", True),
        router_bias=True,
        router_bias_rate=get(hf, "router_bias_rate", BIAS_RATE, (int, float)),
    )


def mscale(rope: dict[str, Any]) -> float:
    """What queries and keys are multiplied by, beyond what their rotation has:
    YaRN's factor of `mscale_all_dim`.
    """
    factor = number(rope, "factor", 1.0)
    return 1.0 + 0.1 * (get(rope, "mscale_all_dim", 0, (int, float)) or 0) * math.log(max(factor, 1.0))


def write_deepseek_v3(config: Config) -> dict[str, Any]:
    """See `Family.write`."""
    model = config.model
    sizes = {"num_experts": ("n_routed_experts", 256)} | SIZES
    own = {theirs: size for ours, (theirs, _) in sizes.items() if (size := getattr(model, ours))} | {
        "rms_norm_eps": 1e-6,
        "q_lora_rank": model.q_rank,
        "first_k_dense_replace": model.first_dense,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": model.router_scale,
        "norm_topk_prob": model.router_normalised,
        "router_bias_rate": model.router_bias_rate,
        "attention_bias": False,
        "num_nextn_predict_layers": 0,
        "rope_interleave": True,
    }
    written = write_llama_like(config, "DeepseekV3ForCausalLM", "deepseek_v3", **own)
    factor = getattr(model.rope_scaling, "factor", 1.0)
    beyond = (resolved(model.attention_scale) * (model.plain_size + config.head_size) ** 0.5) ** 0.5
    if factor > 1 and not math.isclose(beyond, 1.0, rel_tol=1e-12):
        # 1 and not 1.0000000000000002
        written["rope_scaling"]["mscale_all_dim"] = float(f"{(beyond - 1) / (0.1 * math.log(factor)):.12g}")
    return written


def deepseek_tensors(
    config: Config, rope_interleave: bool = True, mixture: Callable[..., list[Mapped]] | None = None
) -> list[Mapped]:
    """A model with DeepSeek-V3's names.

    `rope_interleave`: whether features that turn together stand side by side.
    """
    mixture, tensors = mixture or partial(apart, config, QWEN), list[Mapped]()
    for tensor in with_experts(config, partial(with_shared, config, mixture)):
        block, attention, own = tensor.name.partition(".attention.")
        if not attention:
            tensors.append(tensor)
        elif own == "output.weight":
            tensors += attention_tensors(config, block, rope_interleave)
    return tensors


def held_deepseek_tensors(config: Config, rope_interleave: bool = True) -> list[Mapped]:
    """The same as transformers 5 holds it: a block's experts in one tensor."""
    return deepseek_tensors(config, rope_interleave, partial(together, config))


def with_shared(
    config: Config, mixture: Callable[[str, str], list[Mapped]], ours: str, theirs: str
) -> list[Mapped]:
    """A mixture with its bias, and the experts that all tokens share."""
    model, theirs_shared = config.model, f"{theirs}.mlp.shared_experts"
    hidden, ffn = model.hidden_size, model.shared_experts * resolved(model.expert_ffn_size)
    bias = renamed(
        f"{ours}.router.bias", (resolved(model.num_experts),), f"{theirs}.mlp.gate.e_score_correction_bias"
    )
    return [
        *mixture(ours, theirs),
        *([replace(bias, buffer=True)] if model.router_bias else []),
        stacked(
            f"{ours}.shared.up.weight",
            (2, ffn, hidden),
            [f"{theirs_shared}.{part}_proj.weight" for part in ("gate", "up")],
        ),
        renamed(f"{ours}.shared.down.weight", (hidden, ffn), f"{theirs_shared}.down_proj.weight"),
    ]


def attention_tensors(config: Config, block: str, interleaved: bool) -> list[Mapped]:
    """The latents of a block, and what heads make of them."""
    model, turned = config.model, config.head_size
    hidden, heads, plain, value = model.hidden_size, model.num_heads, model.plain_size, model.value_size
    rank, q_rank = resolved(model.kv_rank), model.q_rank
    ours, theirs = f"{block}.attention", f"{block.replace('blocks', 'model.layers')}.self_attn"
    query, of_query = f"{theirs}.{'q_proj' if q_rank is None else 'q_b_proj'}.weight", q_rank or hidden
    flat = renamed(f"{ours}.query.weight", (heads * (plain + turned), of_query), query)
    made = renamed(f"{ours}.key_value.weight", (heads * (plain + value), rank), f"{theirs}.kv_b_proj.weight")
    latent = renamed(f"{ours}.latent.weight", (rank + turned, hidden), f"{theirs}.kv_a_proj_with_mqa.weight")
    of_queries = (
        []
        if q_rank is None
        else [
            renamed(f"{ours}.query_latent.weight", (q_rank, hidden), f"{theirs}.q_a_proj.weight"),
            renamed(f"{ours}.query_latent.norm", (q_rank,), f"{theirs}.q_a_layernorm.weight"),
        ]
    )
    return [
        *of_queries,
        half_apart(viewed(flat, (heads, plain + turned, of_query)), turned, interleaved),
        half_apart(latent, turned, interleaved),
        renamed(f"{ours}.latent.norm", (rank,), f"{theirs}.kv_a_layernorm.weight"),
        viewed(made, (heads, plain + value, rank)),
        renamed(f"{ours}.output.weight", (hidden, heads * value), f"{theirs}.o_proj.weight"),
    ]


def half_apart(tensor: Mapped, turned: int, interleaved: bool) -> Mapped:
    """The same where the peer has the last `turned` features, of the last dim but one, side by side."""
    if not interleaved:
        return tensor
    plain = torch.arange(tensor.shape[-2] - turned)
    ours_in_theirs = torch.cat((plain, len(plain) + torch.arange(turned).view(2, -1).T.flatten()))

    def join(theirs: dict[str, Tensor]) -> Tensor:
        return tensor.join(theirs).index_select(-2, ours_in_theirs.argsort())

    return replace(tensor, join=join, split=lambda ours: tensor.split(ours.index_select(-2, ours_in_theirs)))
