"""Converts peers' `config.json` to and from our `model` section.

Reading refuses every setting that would make theirs another function than ours, by name; settings that only
concern training (dropout) or numerics are passed over. What a file leaves out is what transformers takes
where it is missing; sizes must be there.
"""

import math
from typing import Any

from megacore.config import Config
from megacore.config.model import LongRope, ModelConfig, NtkRope
from megacore.errors import CheckpointError
from megacore.model.rotary import stretched_base

CONFIG = "config.json"
REQUIRED = object()


def get(hf: dict[str, Any], key: str, default: Any, kind: type | tuple[type, ...]) -> Any:
    """`hf[key]` of a type, or the default that the peer takes where it is missing (null counts as
    missing where that is so there).
    """
    value = hf.get(key, default)
    if value is REQUIRED:
        raise CheckpointError(CONFIG, f"has no {key}", f"a config.json with {key}")
    if value is not default and (
        not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
    ):
        raise CheckpointError(CONFIG, f"{key} is {value!r}", "a value as transformers writes it")
    return value


def require(hf: dict[str, Any], key: str, default: Any, *right: Any) -> None:
    """`hf[key]`, or else the peer's default, must be one of `right`: any other is a function
    that our models do not compute.
    """
    if hf.get(key, default) not in right:
        known = " or ".join("null" if value is None else str(value).lower() for value in right)
        raise CheckpointError(
            CONFIG, f"{key} is {hf.get(key, default)!r}, which no model here has", f"{key} {known}"
        )


def number(
    hf: dict[str, Any], key: str, default: Any = REQUIRED, kind: type | tuple[type, ...] = (int, float)
) -> Any:
    """A number above 0."""
    value = get(hf, key, default, kind)
    if value is not None and value <= 0:
        raise CheckpointError(CONFIG, f"{key} is {value}", "a number above 0")
    return value


def whole(hf: dict[str, Any], key: str, default: Any = REQUIRED) -> Any:
    """A whole number above 0."""
    return number(hf, key, default, int)


def or_null(hf: dict[str, Any], key: str, default: Any, kind: type | tuple[type, ...] = (int, float)) -> Any:
    """A number above 0, or null, which is another thing than a missing key."""
    return None if key in hf and hf[key] is None else number(hf, key, default, kind)


def flag(hf: dict[str, Any], key: str, default: bool) -> bool:
    """true or false."""
    return bool(get(hf, key, default, bool))


# GPT-2

GPT2_SIZES = {  # ours, and what they are called there
    "num_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_heads": "n_head",
    "vocab_size": "vocab_size",
    "max_positions": "n_positions",
}
GPT2_ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf"}


def read_gpt2(hf: dict[str, Any]) -> dict[str, Any]:
    """See `Family.read`."""
    require(hf, "activation_function", "gelu_new", *GPT2_ACTIVATIONS)
    require(hf, "scale_attn_by_inverse_layer_idx", False, False)
    require(hf, "add_cross_attention", False, False)
    head_size = head_size_of(hf, "n_embd", "n_head")
    return {ours: whole(hf, theirs) for ours, theirs in GPT2_SIZES.items()} | {
        "num_kv_heads": hf["n_head"],
        "head_size": head_size,
        "ffn_size": whole(hf, "n_inner", None) or 4 * hf["n_embd"],
        "norm": "layernorm",
        "norm_eps": number(hf, "layer_norm_epsilon", 1e-5),
        "activation": GPT2_ACTIVATIONS[hf.get("activation_function", "gelu_new")],
        "position": "learned",
        "bias": True,
        "qkv_bias": True,
        "output_bias": True,
        "attention_scale": head_size**-0.5 if flag(hf, "scale_attn_weights", True) else 1.0,
        "tie_embeddings": flag(hf, "tie_word_embeddings", True),
        "init_std": number(hf, "initializer_range", 0.02),
    }


def write_gpt2(config: Config) -> dict[str, Any]:
    """See `Family.write`."""
    model = config.model
    return heading(config, "GPT2LMHeadModel", "gpt2", GPT2_SIZES) | {
        "n_inner": model.ffn_size,
        "activation_function": {"gelu": "gelu_new"}.get(model.activation, "gelu"),
        "layer_norm_epsilon": model.norm_eps,
        "scale_attn_weights": model.attention_scale != 1.0,
        "embd_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "attn_pdrop": 0.0,
    }


def head_size_of(hf: dict[str, Any], hidden_key: str, heads_key: str) -> int:
    """The head size of a peer that wants all heads to make up the hidden size."""
    hidden, heads = whole(hf, hidden_key), whole(hf, heads_key)
    if hidden % heads:
        raise CheckpointError(
            CONFIG, f"{hidden_key} {hidden} is not a multiple of {heads_key} {heads}", "sizes that divide"
        )
    return hidden // heads


def heading(config: Config, architecture: str, model_type: str, sizes: dict[str, str]) -> dict[str, Any]:
    """What every config.json has; `sizes` are ours, and what they are called there.

    Token ids are null, lest the peer take its own defaults, of another vocabulary.
    """
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": "float64" if config.train.precision == "fp64" else "float32",
        "tie_word_embeddings": config.model.tie_embeddings,
        "initializer_range": config.model.init_std,
        "bos_token_id": None,
        "eos_token_id": None,
    } | {theirs: getattr(config.model, ours) for ours, theirs in sizes.items()}


# Llama and those after it: RMS norms, swiglu, rotary positions

LLAMA_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "ffn_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
}


def read_llama_like(hf: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """What Llama and its descendants share; `settings` are the family's own of our `model` section."""
    if "activation" not in settings:
        require(hf, "hidden_act", "silu", "silu", "swish")
    require(hf, "quantization_config", None, None)
    if "window" not in settings and any(
        kind != "full_attention" for kind in get(hf, "layer_types", None, list) or ()
    ):
        raise CheckpointError(
            CONFIG, "layer_types has other layers than full_attention", "full attention in every layer"
        )
    theta, scaling = read_rope(hf, partial="rotary_share" in settings)
    sizes = read_sizes(hf, scaling)
    head_size = whole(hf, "head_dim", None) or head_size_of(hf, "hidden_size", "num_attention_heads")
    own = {
        "num_kv_heads": whole(hf, "num_key_value_heads", None) or sizes["num_heads"],
        "head_size": head_size,
        "norm": "rmsnorm",
        "norm_eps": number(hf, "rms_norm_eps", 1e-6),
        "activation": "swiglu",
        "position": "rope",
        "rope_theta": theta,
        "rope_scaling": scaling,
        "bias": False,
        "qkv_bias": False,
        "output_bias": False,
        "attention_scale": head_size**-0.5,
        "tie_embeddings": flag(hf, "tie_word_embeddings", False),
        "init_std": number(hf, "initializer_range", 0.02),
    }
    return sizes | own | settings


def read_rope(hf: dict[str, Any], *, partial: bool = False) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling of the rotary frequencies, from `rope_parameters` (transformers 5) or
    `rope_theta` and `rope_scaling` (4).

    `partial`: whether the family may turn a part of a head's features, see `rotary_share`.
    """
    rope = get(hf, "rope_parameters", None, dict) or get(hf, "rope_scaling", None, dict) or {}
    theta = number({"rope_theta": 10000.0} | hf | rope, "rope_theta")
    if not partial:
        require(hf | rope, "partial_rotary_factor", 1.0, 1.0, None)
    kind = {"rope_type": rope.get("rope_type", rope.get("type", "default"))}
    require(kind, "rope_type", None, "default", "linear", "llama3", "dynamic", "yarn", "longrope")
    # "dynamic" changes the frequencies of texts that are longer than all positions only, which our models
    # refuse.
    if kind["rope_type"] in ("default", "dynamic"):
        return theta, None
    # Where it is missing, transformers takes a value of the top level, or else all positions.
    fallback = hf.get("original_max_position_embeddings", hf.get("max_position_embeddings", REQUIRED))
    if kind["rope_type"] == "longrope":
        return theta, read_longrope(hf, rope, fallback)
    scaling = {"type": kind["rope_type"], "factor": number(rope, "factor")}
    if kind["rope_type"] == "linear":
        return theta, scaling
    scaling["original_max_position_embeddings"] = whole(rope, "original_max_position_embeddings", fallback)
    if kind["rope_type"] == "llama3":
        return theta, scaling | {key: number(rope, key) for key in ("low_freq_factor", "high_freq_factor")}
    scaling |= {
        "beta_fast": number(rope, "beta_fast", None) or 32.0,
        "beta_slow": number(rope, "beta_slow", None) or 1.0,
    }
    return theta, scaling | {
        "attention_factor": yarn_attention_factor(rope),
        "truncate": flag(rope, "truncate", True),
    }


def read_longrope(hf: dict[str, Any], rope: dict[str, Any], original_default: Any) -> dict[str, Any]:
    """Read LongRoPE, whose factor on queries and keys follows from the two lengths unless it is stated."""
    longest = whole(hf, "max_position_embeddings")
    original = whole(rope, "original_max_position_embeddings", original_default)
    factors = {}
    for key in ("short_factor", "long_factor"):
        values = get(rope, key, REQUIRED, list)
        if not all(isinstance(value, int | float) and value > 0 for value in values):
            raise CheckpointError(CONFIG, f"{key} is {values}", "numbers above 0")
        factors[key] = tuple(map(float, values))
    attention_factor = number(rope, "attention_factor", None)
    if attention_factor is None:
        ratio = number(rope, "factor", None) or longest / original
        attention_factor = 1.0
        if ratio > 1 and original > 1:
            attention_factor = math.sqrt(1 + math.log(ratio) / math.log(original))
    return {
        "type": "longrope",
        **factors,
        "original_max_position_embeddings": original,
        "max_position_embeddings": longest,
        "attention_factor": attention_factor,
    }


def read_sizes(hf: dict[str, Any], scaling: dict[str, Any] | None) -> dict[str, Any]:
    """Read the sizes that all these families call alike.

    Longer texts than LongRoPE's original length have other frequencies, so the model has no such positions.
    """
    sizes = {ours: whole(hf, theirs) for ours, theirs in LLAMA_SIZES.items()}
    if scaling is not None and scaling["type"] == "longrope":
        sizes["max_positions"] = min(sizes["max_positions"], scaling["original_max_position_embeddings"])
    return sizes


def rotary_share(hf: dict[str, Any], head_size: int) -> float:
    """The share of a head's features that turn, of which there are whole ones."""
    rope = get(hf, "rope_parameters", None, dict) or get(hf, "rope_scaling", None, dict) or {}
    share = number({"partial_rotary_factor": 1.0} | hf | rope, "partial_rotary_factor")
    if share > 1 or int(head_size * share) % 2 or not int(head_size * share):
        raise CheckpointError(
            CONFIG, f"partial_rotary_factor is {share} of {head_size} features", "an even number of features"
        )
    return float(share)


def yarn_attention_factor(rope: dict[str, Any]) -> float | None:
    """What queries and keys are multiplied by: given, or by the ratio of DeepSeek's two scales.

    None leaves it to `factor`.
    """
    own, both = (
        number(rope, "attention_factor", None),
        [number(rope, key, None) for key in ("mscale", "mscale_all_dim")],
    )
    if own is not None or None in both:
        return own
    upper, lower = (
        0.1 * scale * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0 for scale in both
    )
    return upper / lower


def write_llama_like(config: Config, architecture: str, model_type: str, **settings: Any) -> dict[str, Any]:
    """What Llama and its descendants share; `settings` are the family's own of their config.json."""
    model = as_peers_have_it(config)
    own = {
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "attention_dropout": 0.0,
        # Rotary settings as transformers 4 has them, which 5 reads as well.
        "rope_theta": model.rope_theta,
        "rope_scaling": written_scaling(model),
    }
    sizes = heading(config, architecture, model_type, LLAMA_SIZES) | written_positions(model)
    return sizes | own | settings


def written_scaling(model: ModelConfig) -> dict[str, Any] | None:
    """Return how rotary frequencies are stretched, as transformers 4 has it."""
    scaling = model.rope_scaling
    if scaling is None:
        return None
    fields = scaling.model_dump(
        mode="json", exclude={"type", "max_position_embeddings"}, exclude_defaults=True
    )
    if isinstance(scaling, LongRope):
        fields["attention_factor"] = scaling.attention_factor  # else it follows from the two lengths
    return {"rope_type": scaling.type} | fields


def written_positions(model: ModelConfig) -> dict[str, Any]:
    """Return the two lengths of a model with LongRoPE, for the top level of config.json."""
    scaling = model.rope_scaling
    if not isinstance(scaling, LongRope):
        return {}
    original = scaling.original_max_position_embeddings
    positions = {"original_max_position_embeddings": original}
    if model.max_positions == original:
        positions["max_position_embeddings"] = scaling.max_position_embeddings
    return positions


def as_peers_have_it(config: Config) -> ModelConfig:
    """The same function without NTK-aware scaling, which peers have as another base, and
    with mup's factors in the scales.
    """
    model = config.model
    update: dict[str, Any] = {} if model.router_bias else {"router_bias": None}  # of which they do not speak
    if isinstance(model.rope_scaling, NtkRope):
        theta = stretched_base(config.head_size, model.rope_theta, model.rope_scaling.factor)
        update |= {"rope_theta": theta, "rope_scaling": None}
    if model.parametrization == "mup":
        update |= dict.fromkeys(("base_width", "base_head_size", "base_layers")) | {
            "parametrization": "standard"
        }
        update |= {"residual_scale": config.residual_scale, "logit_scale": config.logit_scale}
    return model.model_copy(update=update) if update else model


def read_windows(hf: dict[str, Any], every_default: int) -> tuple[int | None, int | None]:
    """Return `window` and `global_every` of a model whose every n-th block is global by default."""
    kinds = layer_types(whole(hf, "num_hidden_layers"), 1, every_default)
    return read_layer_types(hf, kinds)


def read_layer_types(hf: dict[str, Any], default: list[str]) -> tuple[int | None, int | None]:
    """Return `window` and `global_every` of a model whose `layer_types` are these if it has none."""
    count, window = whole(hf, "num_hidden_layers"), or_null(hf, "sliding_window", 4096, int)
    kinds = get(hf, "layer_types", None, list) or default
    every = kinds.index("full_attention") + 1 if "full_attention" in kinds else None
    if every == 1 or window is None:
        window, every = None, None
    if kinds[:count] != layer_types(count, window, every):
        raise CheckpointError(
            CONFIG,
            f"layer_types is {kinds}, which no model here has",
            "full_attention in every n-th place alone",
        )
    return window, every


def layer_types(count: int, window: int | None, every: int | None) -> list[str]:
    """Return the kinds of attention of the blocks as transformers calls them."""
    full = [window is None or (every is not None and (i + 1) % every == 0) for i in range(count)]
    return ["full_attention" if is_full else "sliding_attention" for is_full in full]


def read_biases(hf: dict[str, Any]) -> dict[str, Any]:
    """Read `attention_bias` and `mlp_bias`, which Llama, Granite and SmolLM3 have."""
    return {"bias": flag(hf, "mlp_bias", False)} | read_attention_bias(hf)


def read_attention_bias(hf: dict[str, Any]) -> dict[str, Any]:
    """Read `attention_bias`, of queries, keys, values and attention's output alike."""
    has_bias = flag(hf, "attention_bias", False)
    return {"qkv_bias": has_bias, "output_bias": has_bias}


def write_biases(config: Config) -> dict[str, Any]:
    """Write the settings that `read_biases` reads."""
    return {"attention_bias": config.model.qkv_bias, "mlp_bias": config.model.bias}


def read_llama(hf: dict[str, Any]) -> dict[str, Any]:
    """See `Family.read`."""
    head_size_of(hf, "hidden_size", "num_attention_heads")  # LlamaConfig's rule
    return read_llama_like(hf, **read_biases(hf))


def write_llama(config: Config) -> dict[str, Any]:
    """See `Family.write`."""
    return write_llama_like(config, "LlamaForCausalLM", "llama", **write_biases(config))


def read_mistral(hf: dict[str, Any]) -> dict[str, Any]:
    """See `Family.read`."""
    return read_llama_like({"num_key_value_heads": 8} | hf, window=or_null(hf, "sliding_window", 4096, int))


def write_mistral(config: Config) -> dict[str, Any]:
    """See `Family.write`."""
    return write_llama_like(config, "MistralForCausalLM", "mistral", sliding_window=config.model.window)


def read_qwen2(hf: dict[str, Any]) -> dict[str, Any]:
    """See `Family.read`."""
    return read_llama_like({"num_key_value_heads": 32} | hf, qkv_bias=True, **read_qwen_windows(hf))


def read_qwen_windows(hf: dict[str, Any]) -> dict[str, Any]:
    """Read the windows of Qwen2 and Qwen3, which count with `use_sliding_window` alone.

    Without `layer_types`, the blocks from number `max_window_layers` have them.
    """
    if not flag(hf, "use_sliding_window", False) or or_null(hf, "sliding_window", 4096, int) is None:
        return {}
    count, first = whole(hf, "num_hidden_layers"), get(hf, "max_window_layers", 28, int)
    kinds = get(hf, "layer_types", None, list)
    if kinds is None and 0 < first < count:
        wrong = f"max_window_layers is {first}, so only the last {count - first} blocks have a window"
        right = f"a model with max_window_layers 0, or at least {count}; this one cannot be imported"
        raise CheckpointError(CONFIG, f"{wrong}, which no model here has", right)
    kinds = kinds or layer_types(count, window=None if first >= count else 1, every=None)
    if set(kinds[:count]) == {"full_attention"}:
        return {}
    window, global_every = read_layer_types(hf, kinds)
    return {"window": window, "global_every": global_every}


def write_qwen_windows(model: ModelConfig) -> dict[str, Any]:
    """Write the settings that `read_qwen_windows` reads."""
    if model.window is None:
        return {"use_sliding_window": False, "sliding_window": None}
    return {
        "use_sliding_window": True,
        "sliding_window": model.window,
        "max_window_layers": 0,  # for transformers 4, which has no layer_types in some versions
        "layer_types": layer_types(model.num_layers, model.window, model.global_every),
    }


def write_qwen2(config: Config) -> dict[str, Any]:
    """See `Family.write`."""
    return write_llama_like(config, "Qwen2ForCausalLM", "qwen2", **write_qwen_windows(config.model))


def read_qwen3(hf: dict[str, Any]) -> dict[str, Any]:
    """See `Family.read`."""
    own = read_attention_bias(hf) | read_qwen_windows(hf)
    return read_llama_like({"num_key_value_heads": 32, "head_dim": 128} | hf, qk_norm=True, **own)


def write_qwen3(config: Config) -> dict[str, Any]:
    """See `Family.write`."""
    keys = write_qwen_windows(config.model) | {"attention_bias": config.model.qkv_bias}
    return write_llama_like(config, "Qwen3ForCausalLM", "qwen3", **keys)


def read_granite(hf: dict[str, Any]) -> dict[str, Any]:
    """See `Family.read`.

    Its logits are *divided* by `logits_scaling`, and scores multiplied by 1 unless it says otherwise.
    """
    scales = {
        "embedding_scale": number(hf, "embedding_multiplier", 1.0),
        "attention_scale": number(hf, "attention_multiplier", 1.0),
        "residual_scale": number(hf, "residual_multiplier", 1.0),
        "logit_scale": 1.0 / number(hf, "logits_scaling", 1.0),
    }
    return read_llama_like(hf, **read_biases(hf), **scales)


def write_granite(config: Config) -> dict[str, Any]:
    """See `Family.write`."""
    model = as_peers_have_it(config)
    scales = {
        "embedding_multiplier": model.embedding_scale,
        "attention_multiplier": model.attention_scale,
        "residual_multiplier": model.residual_scale,
        "logits_scaling": float(f"{1.0 / model.logit_scale:.15g}"),  # 49 and not 48.99999999999999
    }
    return write_llama_like(config, "GraniteForCausalLM", "granite", **write_biases(config), **scales)
