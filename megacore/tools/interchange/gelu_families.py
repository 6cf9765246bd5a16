"""GPT-NeoX (Pythia), StarCoder2 and Phi-1 and 2: layer norms, biases everywhere, rotary positions, GELU."""

from typing import Any

from megacore.config import Config
from megacore.config.schema import resolved
from megacore.tools.interchange.mapped import (
    Mapped,
    fused_qkv,
    grouped_qkv,
    inputs_of,
    lm_head,
    qkv_shape,
    renamed,
)
from megacore.tools.interchange.rotated import reordered
from megacore.tools.interchange.settings import (
    GPT2_ACTIVATIONS,
    LLAMA_SIZES,
    as_peers_have_it,
    flag,
    head_size_of,
    heading,
    number,
    read_rope,
    read_sizes,
    require,
    rotary_share,
    whole,
    written_positions,
    written_scaling,
)


def read_common(hf: dict[str, Any], eps: str, **settings: Any) -> dict[str, Any]:
    """What both share; `eps` is the key of the norms' epsilon."""
    require(hf, "quantization_config", None, None)
    require(hf, "hidden_act", settings["activation"], *GPT2_ACTIVATIONS)
    theta, scaling = read_rope(hf, partial="rotary_share" in settings)
    sizes = read_sizes(hf, scaling)
    head_size = head_size_of(hf, "hidden_size", "num_attention_heads")
    own = {
        "head_size": head_size,
        "norm": "layernorm",
        "norm_eps": number(hf, eps, 1e-5),
        "position": "rope",
        "rope_theta": theta,
        "rope_scaling": scaling,
        "bias": True,
        "qkv_bias": True,
        "output_bias": True,
        "attention_scale": head_size**-0.5,
        "init_std": number(hf, "initializer_range", 0.02),
    }
    return (
        sizes
        | own
        | settings
        | {"activation": GPT2_ACTIVATIONS[hf.get("hidden_act", settings["activation"])]}
    )


def write_common(config: Config, architecture: str, model_type: str, eps: str) -> dict[str, Any]:
    """What both share."""
    activation = {"gelu": "gelu_pytorch_tanh"}.get(config.model.activation, "gelu")
    own = {
        "hidden_act": activation,
        eps: config.model.norm_eps,
        "pad_token_id": None,
        "attention_dropout": 0.0,
    }
    sizes = heading(config, architecture, model_type, LLAMA_SIZES) | written_positions(config.model)
    return sizes | own


def read_neox(hf: dict[str, Any]) -> dict[str, Any]:
    """See `Family.read`. Transformers 4 calls base and share otherwise than other families."""
    hf = {
        "rope_theta": hf.get("rotary_emb_base", 10000),
        "partial_rotary_factor": hf.get("rotary_pct", 0.25),
    } | hf
    require(hf, "attention_bias", True, True)
    return read_common(
        hf,
        "layer_norm_eps",
        activation="gelu",
        num_kv_heads=whole(hf, "num_attention_heads"),
        rotary_share=rotary_share(hf, head_size_of(hf, "hidden_size", "num_attention_heads")),
        branches="parallel" if flag(hf, "use_parallel_residual", True) else "serial",
        tie_embeddings=flag(hf, "tie_word_embeddings", False),
    )


def write_neox(config: Config) -> dict[str, Any]:
    """See `Family.write`."""
    model = as_peers_have_it(config)
    return write_common(config, "GPTNeoXForCausalLM", "gpt_neox", "layer_norm_eps") | {
        "rotary_emb_base": model.rope_theta,
        "rotary_pct": model.rotary_share,
        "rope_scaling": written_scaling(model),
        "use_parallel_residual": model.branches == "parallel",
        "attention_bias": True,
        "hidden_dropout": model.dropout,
    }


def neox_tensors(config: Config) -> list[Mapped]:
    """A model with GPT-NeoX's names."""
    model = config.model
    h, f = model.hidden_size, resolved(model.ffn_size)
    tensors = [renamed("embedding.weight", (model.vocab_size, h), "gpt_neox.embed_in.weight")]
    for i in range(model.num_layers):
        ours, theirs = f"blocks.{i}", f"gpt_neox.layers.{i}"
        for kind in ("weight", "bias"):
            qkv = (*qkv_shape(config), *inputs_of(kind, h))
            fused = fused_qkv(
                f"{ours}.attention.qkv.{kind}",
                qkv,
                f"{theirs}.attention.query_key_value.{kind}",
                "(heads three head) ...",
            )
            tensors += [
                renamed(f"{ours}.norm1.{kind}", (h,), f"{theirs}.input_layernorm.{kind}"),
                reordered(fused, config),
                renamed(
                    f"{ours}.attention.output.{kind}",
                    (h, *inputs_of(kind, h)),
                    f"{theirs}.attention.dense.{kind}",
                ),
                renamed(f"{ours}.norm2.{kind}", (h,), f"{theirs}.post_attention_layernorm.{kind}"),
                renamed(
                    f"{ours}.feed_forward.up.{kind}",
                    (f, *inputs_of(kind, h)),
                    f"{theirs}.mlp.dense_h_to_4h.{kind}",
                ),
                renamed(
                    f"{ours}.feed_forward.down.{kind}",
                    (h, *inputs_of(kind, f)),
                    f"{theirs}.mlp.dense_4h_to_h.{kind}",
                ),
            ]
    tensors += [
        renamed(f"norm.{kind}", (h,), f"gpt_neox.final_layer_norm.{kind}") for kind in ("weight", "bias")
    ]
    # which transformers 5 calls lm_head.weight in memory
    return tensors + lm_head(config, "embed_out.weight")


def read_starcoder2(hf: dict[str, Any]) -> dict[str, Any]:
    """See `Family.read`."""
    require(hf, "use_bias", True, True)
    kv_heads, tied = whole(hf, "num_key_value_heads", 2), flag(hf, "tie_word_embeddings", True)
    hf, window = {"initializer_range": 0.018042} | hf, whole(hf, "sliding_window", None)
    return read_common(
        hf,
        "norm_epsilon",
        activation="gelu_pytorch_tanh",
        num_kv_heads=kv_heads,
        tie_embeddings=tied,
        window=window,
    )


def write_starcoder2(config: Config) -> dict[str, Any]:
    """See `Family.write`."""
    model = as_peers_have_it(config)
    return write_common(config, "Starcoder2ForCausalLM", "starcoder2", "norm_epsilon") | {
        "num_key_value_heads": model.num_kv_heads,
        "rope_theta": model.rope_theta,
        "rope_scaling": written_scaling(model),
        "sliding_window": model.window,
        "use_bias": True,
        "residual_dropout": model.dropout,
        "embedding_dropout": model.dropout,
    }


def starcoder2_tensors(config: Config) -> list[Mapped]:
    """A model with StarCoder2's names: attention's are Llama's, the feed-forward layer's GPT-2's."""
    model = config.model
    h, f = model.hidden_size, resolved(model.ffn_size)
    tensors = [renamed("embedding.weight", (model.vocab_size, h), "model.embed_tokens.weight")]
    for i in range(model.num_layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        for kind in ("weight", "bias"):
            qkv = [f"{theirs}.self_attn.{letter}_proj.{kind}" for letter in "qkv"]
            tensors += [
                renamed(f"{ours}.norm1.{kind}", (h,), f"{theirs}.input_layernorm.{kind}"),
                grouped_qkv(f"{ours}.attention.qkv.{kind}", (*qkv_shape(config), *inputs_of(kind, h)), qkv),
                renamed(
                    f"{ours}.attention.output.{kind}",
                    (h, *inputs_of(kind, h)),
                    f"{theirs}.self_attn.o_proj.{kind}",
                ),
                renamed(f"{ours}.norm2.{kind}", (h,), f"{theirs}.post_attention_layernorm.{kind}"),
                renamed(
                    f"{ours}.feed_forward.up.{kind}", (f, *inputs_of(kind, h)), f"{theirs}.mlp.c_fc.{kind}"
                ),
                renamed(
                    f"{ours}.feed_forward.down.{kind}",
                    (h, *inputs_of(kind, f)),
                    f"{theirs}.mlp.c_proj.{kind}",
                ),
            ]
    tensors += [renamed(f"norm.{kind}", (h,), f"model.norm.{kind}") for kind in ("weight", "bias")]
    return tensors + lm_head(config)


def read_phi(hf: dict[str, Any]) -> dict[str, Any]:
    """See `Family.read`."""
    hf = {"partial_rotary_factor": 0.5} | hf
    require(hf, "qk_layernorm", False, False)
    return read_common(
        hf,
        "layer_norm_eps",
        activation="gelu_new",
        num_kv_heads=whole(hf, "num_key_value_heads", None) or whole(hf, "num_attention_heads"),
        rotary_share=rotary_share(hf, head_size_of(hf, "hidden_size", "num_attention_heads")),
        branches="shared_norm",
        head_bias=True,
        tie_embeddings=flag(hf, "tie_word_embeddings", False),
    )


def write_phi(config: Config) -> dict[str, Any]:
    """See `Family.write`."""
    model = as_peers_have_it(config)
    return write_common(config, "PhiForCausalLM", "phi", "layer_norm_eps") | {
        "hidden_act": {"gelu": "gelu_new"}.get(model.activation, "gelu"),
        "num_key_value_heads": model.num_kv_heads,
        "rope_theta": model.rope_theta,
        "partial_rotary_factor": model.rotary_share,
        "rope_scaling": written_scaling(model),
        "qk_layernorm": False,
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
    }


def phi_tensors(config: Config) -> list[Mapped]:
    """A model with Phi's names. Both branches of a block read the same norm."""
    model = config.model
    h, f = model.hidden_size, resolved(model.ffn_size)
    tensors = [renamed("embedding.weight", (model.vocab_size, h), "model.embed_tokens.weight")]
    for i in range(model.num_layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        for kind in ("weight", "bias"):
            qkv = [f"{theirs}.self_attn.{letter}_proj.{kind}" for letter in "qkv"]
            grouped = grouped_qkv(
                f"{ours}.attention.qkv.{kind}", (*qkv_shape(config), *inputs_of(kind, h)), qkv
            )
            tensors += [
                renamed(f"{ours}.norm1.{kind}", (h,), f"{theirs}.input_layernorm.{kind}"),
                reordered(grouped, config),
                renamed(
                    f"{ours}.attention.output.{kind}",
                    (h, *inputs_of(kind, h)),
                    f"{theirs}.self_attn.dense.{kind}",
                ),
                renamed(
                    f"{ours}.feed_forward.up.{kind}", (f, *inputs_of(kind, h)), f"{theirs}.mlp.fc1.{kind}"
                ),
                renamed(
                    f"{ours}.feed_forward.down.{kind}", (h, *inputs_of(kind, f)), f"{theirs}.mlp.fc2.{kind}"
                ),
            ]
    tensors += [renamed(f"norm.{kind}", (h,), f"model.final_layernorm.{kind}") for kind in ("weight", "bias")]
    return tensors + lm_head(config)
