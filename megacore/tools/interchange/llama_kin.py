"""Phi-3, SmolLM3, Gemma 2 and 3, OLMo 2: Llama but for fused tensors, a part that turns, blocks
without positions, norms, or windows.
"""

from typing import Any

import torch
from torch import Tensor

from megacore.config import Config
from megacore.config.schema import resolved
from megacore.errors import CheckpointError
from megacore.tools.interchange.mapped import Mapped, llama_tensors, renamed
from megacore.tools.interchange.rotated import reordered
from megacore.tools.interchange.settings import (
    CONFIG,
    get,
    head_size_of,
    layer_types,
    number,
    or_null,
    read_attention_bias,
    read_biases,
    read_llama_like,
    read_windows,
    require,
    rotary_share,
    whole,
    write_biases,
    write_llama_like,
)


def read_phi3(hf: dict[str, Any]) -> dict[str, Any]:
    """See `Family.read`. It calls LongRoPE also "su" and "yarn", and has no YaRN."""
    hf = {"original_max_position_embeddings": 4096} | hf
    for key in ("rope_parameters", "rope_scaling"):
        rope = get(hf, key, None, dict) or {}
        if rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
            hf[key] = rope | {"rope_type": "longrope"}
    share = rotary_share(hf, head_size_of(hf, "hidden_size", "num_attention_heads"))
    return read_llama_like(
        {"rms_norm_eps": 1e-5} | hf, rotary_share=share, window=whole(hf, "sliding_window", None)
    )


def write_phi3(config: Config) -> dict[str, Any]:
    """See `Family.write`."""
    written = write_llama_like(
        config, "Phi3ForCausalLM", "phi3", sliding_window=config.model.window, pad_token_id=None
    )
    del written["head_dim"]
    dropout = {"resid_pdrop": config.model.dropout, "embd_pdrop": config.model.dropout}
    return written | dropout | {"partial_rotary_factor": config.model.rotary_share}


def fused(tensor: Mapped, peer: str) -> Mapped:
    """The same where the peer keeps all its tensors in one, one behind the other."""
    sizes = [shape[0] for shape in tensor.peers.values()]
    (rest,) = {shape[1:] for shape in tensor.peers.values()}

    def join(theirs: dict[str, Tensor]) -> Tensor:
        return tensor.join(dict(zip(tensor.peers, theirs[peer].split(sizes), strict=True)))

    def split(ours: Tensor) -> dict[str, Tensor]:
        return {peer: torch.cat([*tensor.split(ours).values()])}

    return Mapped(tensor.name, tensor.shape, {peer: (sum(sizes), *rest)}, join, split)


def phi3_tensors(config: Config) -> list[Mapped]:
    """A model with Phi-3's names: Llama's, but for queries, keys and values in one
    tensor, and gate and up.
    """
    tensors = []
    for tensor in llama_tensors(config):
        block = (
            next(iter(tensor.peers)).rpartition(".self_attn.")[0]
            or next(iter(tensor.peers)).rpartition(".mlp.")[0]
        )
        if tensor.name.endswith(".qkv.weight"):
            tensor = reordered(fused(tensor, f"{block}.self_attn.qkv_proj.weight"), config)
        elif tensor.name.endswith(".up.weight"):
            tensor = fused(tensor, f"{block}.mlp.gate_up_proj.weight")
        tensors.append(tensor)
    return tensors


def read_smollm3(hf: dict[str, Any]) -> dict[str, Any]:
    """See `Family.read`. `no_rope_layers` has 1 where a block has rotary positions."""
    require(hf, "use_sliding_window", False, False)
    layers, every = whole(hf, "num_hidden_layers"), whole(hf, "no_rope_layer_interval", 4)
    rotating = get(hf, "no_rope_layers", None, list) or [int((i + 1) % every > 0) for i in range(layers)]
    nope = rotating.index(0) + 1 if 0 in rotating else None
    if rotating[:layers] != [int(nope is None or (i + 1) % nope > 0) for i in range(layers)]:
        raise CheckpointError(
            CONFIG, f"no_rope_layers is {rotating}, which no model here has", "0 in every n-th place alone"
        )
    defaults = {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True}
    return read_llama_like(defaults | hf, **read_biases(hf), nope_every=nope)


def write_smollm3(config: Config) -> dict[str, Any]:
    """See `Family.write`."""
    model = config.model
    own = {
        "no_rope_layers": [int(model.rotates(i)) for i in range(model.num_layers)],
        "no_rope_layer_interval": model.nope_every or 4,
        "use_sliding_window": False,
        "sliding_window": None,
        "pad_token_id": None,
    }
    return write_llama_like(config, "SmolLM3ForCausalLM", "smollm3", **write_biases(config), **own)


def read_gemma2(hf: dict[str, Any]) -> dict[str, Any]:
    """See `Family.read`."""
    return read_gemma({"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0} | hf, 2)


def read_gemma(hf: dict[str, Any], every: int, **settings: Any) -> dict[str, Any]:
    """What Gemma 2 and 3 share; every such block is global if no `layer_types` say otherwise."""
    require(hf, "hidden_activation", "gelu_pytorch_tanh", "gelu_pytorch_tanh", None)
    require(hf, "use_bidirectional_attention", None, None, False)
    defaults = {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True}
    window, global_every = read_windows(hf, every)
    return read_llama_like(
        defaults | hf,
        activation="geglu",
        norm_offset=True,
        norm_place="both",
        embedding_scale=whole(hf, "hidden_size") ** 0.5,
        attention_scale=number(hf, "query_pre_attn_scalar", 256) ** -0.5,
        attention_cap=or_null(hf, "attn_logit_softcapping", None),
        logit_cap=or_null(hf, "final_logit_softcapping", None),
        **read_attention_bias(hf),
        window=window,
        global_every=global_every,
        **settings,
    )


def read_gemma3(hf: dict[str, Any]) -> dict[str, Any]:
    """See `Family.read`.

    Of blocks with a window and of global ones, transformers 5 has rotary settings each, and 4 two bases.
    """
    rope = get(hf, "rope_parameters", None, dict) or {}
    every, local = get(rope, "full_attention", None, dict), get(rope, "sliding_attention", None, dict)
    every = every or {"rope_theta": hf.get("rope_theta", 1e6)} | (get(hf, "rope_scaling", None, dict) or {})
    local = local or {"rope_theta": hf.get("rope_local_base_freq", 1e4)}
    require(local, "rope_type", "default", "default")
    hf = {key: value for key, value in hf.items() if key not in ("rope_theta", "rope_scaling")} | {
        "rope_parameters": every
    }
    found = read_gemma(hf, whole(hf, "sliding_window_pattern", 6), qk_norm=True)
    base = number(local, "rope_theta", 1e4)
    alike = found["window"] is None or (base == found["rope_theta"] and found["rope_scaling"] is None)
    return found | {"window_rope_theta": None if alike else float(base)}


def write_gemma3(config: Config) -> dict[str, Any]:
    """See `Family.write`."""
    model = config.model
    return write_gemma2(config, "Gemma3ForCausalLM", "gemma3_text") | {
        "rope_local_base_freq": model.window_rope_theta or model.rope_theta
    }


def write_gemma2(
    config: Config, architecture: str = "Gemma2ForCausalLM", model_type: str = "gemma2"
) -> dict[str, Any]:
    """See `Family.write`."""
    model = config.model
    own = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(resolved(model.attention_scale) ** -2),
        "attn_logit_softcapping": model.attention_cap,
        "final_logit_softcapping": model.logit_cap,
        "sliding_window": model.window,
        "layer_types": layer_types(model.num_layers, model.window, model.global_every),
        "attention_bias": model.qkv_bias,
        "pad_token_id": None,
    }
    written = write_llama_like(config, architecture, model_type, **own)
    del written["hidden_act"]
    return written


def gemma2_tensors(config: Config) -> list[Mapped]:
    """A model with Gemma 2's names: Llama's, and norms behind attention and the feed-forward layer."""
    tensors = []
    for tensor in llama_tensors(config):
        ours, _, own = tensor.name.partition(".norm2.")
        if own:
            theirs = ours.replace("blocks", "model.layers")
            names = {
                "post_norm1": "post_attention",
                "norm2": "pre_feedforward",
                "post_norm2": "post_feedforward",
            }
            tensors += [
                renamed(f"{ours}.{norm}.weight", tensor.shape, f"{theirs}.{name}_layernorm.weight")
                for norm, name in names.items()
            ]
        else:
            tensors.append(tensor)
    return tensors


def read_olmo2(hf: dict[str, Any]) -> dict[str, Any]:
    """See `Family.read`."""
    return read_llama_like(
        {"rms_norm_eps": 1e-5} | hf,
        norm_place="post",
        qk_norm=True,
        qk_norm_heads="all",
        **read_attention_bias(hf),
    )


def write_olmo2(config: Config) -> dict[str, Any]:
    """See `Family.write`."""
    return write_llama_like(
        config, "Olmo2ForCausalLM", "olmo2", attention_bias=config.model.qkv_bias, pad_token_id=None
    )


def olmo2_tensors(config: Config) -> list[Mapped]:
    """A model with OLMo 2's names: Llama's, but for the place of its norms."""
    tensors = []
    for tensor in llama_tensors(config):
        ours, _, own = tensor.name.partition(".norm")
        if own not in ("1.weight", "2.weight"):
            tensors.append(tensor)
            continue
        theirs = {"1.weight": "post_attention", "2.weight": "post_feedforward"}[own]
        peer = f"{ours.replace('blocks', 'model.layers')}.{theirs}_layernorm.weight"
        tensors.append(renamed(f"{ours}.post_norm{own}", tensor.shape, peer))
    return tensors
