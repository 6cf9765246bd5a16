"""The mapping to Hugging Face's families: every tensor once, both ways; settings in old and
new spelling; refusals by name.
"""

import json
import math
from typing import Any

import pytest
import torch

from megacore.config import Config
from megacore.config.model import LongRope, ModelConfig
from megacore.distributed.buffers import buffers_of
from megacore.errors import CheckpointError, ConfigError
from megacore.tools.interchange.families import FAMILIES, family_for_config, family_for_hf
from megacore.tools.interchange.mapped import stored_name
from tests.build import model_of, run_of
from tests.peers import LLAMA, PEERS, VOCAB_SIZE

ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "phi": "PhiForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
RMS = {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False}
MOE = {"num_experts": 4, "expert_ffn_size": 20}
DEEPSEEK = {
    "kv_rank": 8,
    "shared_experts": 1,
    "router_scores": "sigmoid",
    "router_bias_rate": 0.1,
    "norm_eps": 1e-6,
}
STRETCHED = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}


def config_of(model: dict[str, Any]) -> Config:
    """A resolved config with this model section."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": VOCAB_SIZE, "ffn_size": 48}
    train = {"seq_len": 12, "precision": "fp32", "device": "cpu"}
    return run_of({"model": sizes | model, "train": train})


def settings(name: str) -> dict[str, Any]:
    """A config.json of a peer, in the spelling of transformers 4."""
    kind, own = PEERS[name]
    return {"architectures": [ARCHITECTURES[kind]], "vocab_size": VOCAB_SIZE} | own


def read(hf: dict[str, Any]) -> dict[str, Any]:
    """Our model section, complete, as the schema has it."""
    return ModelConfig.model_validate(family_for_hf(hf, "config.json").read(hf)).model_dump()


@pytest.mark.parametrize("name", PEERS)
def test_every_parameter_is_mapped_once_and_back(name: str) -> None:
    """A tensor left out would keep its random values; one that does not come back as it
    went in would be lost in export.
    """
    hf = settings(name)
    family, config = family_for_hf(hf, "config.json"), config_of(read(hf))
    mapping = family.mapped(config)
    model = model_of(config)
    held = {n: tuple(p.shape) for n, p in model.named_parameters()}
    held |= {n: tuple(b.value.shape) for n, b in buffers_of([model]).items() if n.endswith(".bias")}
    assert {t.name: t.shape for t in mapping} == held
    assert len({peer for t in mapping for peer in t.peers}) == sum(len(t.peers) for t in mapping)
    for tensor in mapping:
        ours = torch.randn(tensor.shape, dtype=torch.bfloat16)
        theirs = tensor.split(ours)
        assert {peer: tuple(t.shape) for peer, t in theirs.items()} == tensor.peers
        assert all(t.is_contiguous() for t in theirs.values()), "safetensors stores nothing else"
        assert torch.equal(tensor.join(theirs), ours) and tensor.join(theirs).dtype == ours.dtype


@pytest.mark.parametrize("name", PEERS)
def test_settings_come_back(name: str) -> None:
    """What is written would be read as another model, or be of another family."""
    config = config_of(read(settings(name)))
    family = family_for_config(config)
    assert family.architecture == ARCHITECTURES[PEERS[name][0]]
    written = json.loads(json.dumps(family.write(config)))
    known = {"router_bias": config.model.router_bias or None}  # peers do not speak of one that is not there
    assert read(written) == config.model.model_dump() | known


@pytest.mark.parametrize("name", PEERS)
def test_transformers_reads_what_is_written(name: str) -> None:
    """The exported config.json would make transformers build another model: compared with the
    one built from its own settings.
    """
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install -e '.[test]'"
    )
    kind, own = PEERS[name]
    config = config_of(read(settings(name)))
    written = FAMILIES[ARCHITECTURES[kind]].write(config)
    theirs = transformers.AutoConfig.for_model(kind, vocab_size=VOCAB_SIZE, **own).to_dict()
    back = transformers.AutoConfig.for_model(**written).to_dict()
    passed_over = {
        "bos_token_id",
        "eos_token_id",
        "dtype",
        "architectures",
        "n_inner",
        "head_dim",
        "sliding_window",
        "max_window_layers",  # counts without layer_types alone
    }
    if kind == "deepseek_v3":  # YaRN's factor, not two scales of which it is the ratio; features side by side
        passed_over |= {"rope_parameters", "rope_interleave"}
    if (
        name == "phi3, longrope"
    ):  # the factor on queries and keys is stated, and else follows from two lengths
        passed_over |= {"rope_parameters"}
    assert {key for key in theirs if theirs[key] != back[key]} <= passed_over
    assert str(back["dtype"]).removeprefix("torch.") == "float32" and back["bos_token_id"] is None
    sizes = {"head_dim": config.head_size, "n_inner": config.model.ffn_size}
    assert all(back[key] == size for key, size in sizes.items() if key in written)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 2.0}, LLAMA3])
def test_rotary_settings_of_transformers_4_and_5(scaling: dict[str, Any] | None) -> None:
    """A model saved by one of the two would be read without its base or its scaling,
    and answer nonsense at length.
    """
    bare = {"architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB_SIZE} | LLAMA
    del bare["rope_theta"]
    old = bare | {"rope_theta": 500.0, "rope_scaling": scaling}
    new = bare | {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"} | (scaling or {})}
    legacy = bare | {
        "rope_theta": 500.0,
        "rope_scaling": scaling and {"type" if k == "rope_type" else k: v for k, v in scaling.items()},
    }
    found = read(old)
    assert found == read(new) == read(legacy)
    assert found["rope_theta"] == 500.0
    assert found["rope_scaling"] == (
        scaling and {"type": scaling["rope_type"]} | {k: v for k, v in scaling.items() if k != "rope_type"}
    )


@pytest.mark.parametrize(
    ("name", "rope", "more", "expected"),
    [
        ("phi3, longrope", {"rope_type": "su"}, {}, (16, math.sqrt(1 + math.log(4) / math.log(16)))),
        ("phi3, longrope", {"rope_type": "yarn"}, {}, (16, math.sqrt(1 + math.log(4) / math.log(16)))),
        ("phi3, longrope", {"factor": 2.0}, {}, (16, math.sqrt(1 + math.log(2) / math.log(16)))),
        ("phi3, longrope", {}, {"max_position_embeddings": 16}, (16, 1.0)),
        ("phi3, longrope", {"original_max_position_embeddings": 32}, {}, (32, math.sqrt(1 + 0.2))),
        ("llama, longrope", {}, {}, (16, 1.25)),
    ],
)
def test_lengths_of_longrope(
    name: str, rope: dict[str, Any], more: dict[str, Any], expected: tuple[int, float]
) -> None:
    """Positions beyond the original length have other frequencies, so a model here has none of them."""
    hf = settings(name)
    model = config_of(read(hf | more | {"rope_scaling": hf["rope_scaling"] | rope})).model
    assert model.max_positions == expected[0] and isinstance(model.rope_scaling, LongRope)
    assert model.rope_scaling.attention_factor == pytest.approx(expected[1], rel=1e-12)


def test_granite_divides_its_logits() -> None:
    model = read(settings("granite"))
    assert model["logit_scale"] == pytest.approx(1 / 3)
    assert (
        FAMILIES["GraniteForCausalLM"].write(config_of(model | {"logit_scale": 1 / 49}))["logits_scaling"]
        == 49.0
    )


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("gpt2", {"activation_function": "relu"}, "activation_function"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"n_head": 5}, "n_embd"),
        ("gpt2", {"n_layer": "3"}, "n_layer"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"attention_bias": 1}, "attention_bias"),
        ("llama", {"mlp_bias": "yes"}, "mlp_bias"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "has no short_factor"),
        ("llama", {"rope_scaling": {"rope_type": "proportional"}}, "rope_type"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [0]}},
            "long_factor is \\[0\\]",
        ),
        ("llama", {"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("llama", {"hidden_size": 0}, "hidden_size"),
        ("llama", {"num_attention_heads": True}, "num_attention_heads"),
        ("mistral, wide heads", {"sliding_window": 0}, "sliding_window"),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation"),
        ("gemma2", {"attention_bias": "true"}, "attention_bias"),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_type",
        ),
        ("gemma3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ("olmo2", {"attention_bias": 0}, "attention_bias"),
        ("qwen2", {"use_sliding_window": "true"}, "use_sliding_window"),
        (
            "qwen2",
            {"use_sliding_window": True, "max_window_layers": 1},
            "max_window_layers is 1, so only the last 2 blocks",
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0},
            "sliding_window",
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "layer_types": ["full_attention", *["sliding_attention"] * 2]},
            "layer_types",
        ),
        ("qwen3", {"attention_bias": 1}, "attention_bias"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("granite", {"logits_scaling": 0}, "logits_scaling"),
        ("phi3", {"partial_rotary_factor": 0.1}, "partial_rotary_factor"),
        (
            "phi3",
            {"rope_scaling": {"rope_type": "su", "short_factor": [1.0], "long_factor": 1.0}},
            "long_factor is 1.0",
        ),
        ("smollm3", {"no_rope_layers": [0, 1, 1]}, "no_rope_layers"),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window"),
        ("gpt_neox", {"attention_bias": False}, "attention_bias"),
        ("gpt_neox", {"rotary_pct": 0.1}, "partial_rotary_factor"),
        ("gpt_neox", {"hidden_act": "relu"}, "hidden_act"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm"),
        ("starcoder2", {"use_bias": False}, "use_bias"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": "4"}, "sliding_window"),
        ("qwen3_moe", {"num_experts": "4"}, "num_experts"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("olmoe", {"head_dim": 12}, "head_dim"),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "dequantise it"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit"),
        (
            "gpt_oss",
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "layer_types",
        ),
        ("granite", {"vocab_size": None}, "vocab_size"),
        ("llama", {"architectures": ["T5ForConditionalGeneration"]}, "T5ForConditionalGeneration"),
        ("llama", {"architectures": None, "model_type": None}, "architecture"),
    ],
)
def test_what_no_model_here_has_is_refused(name: str, change: dict[str, Any], says: str) -> None:
    """Read as if it were not there, the setting would make the imported model another function."""
    with pytest.raises(CheckpointError, match=says):
        read(settings(name) | change)


@pytest.mark.parametrize("missing", ["num_hidden_layers", "hidden_size", "max_position_embeddings"])
def test_sizes_must_be_there(missing: str) -> None:
    hf = settings("llama")
    del hf[missing]
    with pytest.raises(CheckpointError, match=f"has no {missing}"):
        read(hf)


def test_a_missing_setting_is_what_transformers_takes() -> None:
    """Each class has its own defaults: Qwen3's heads have 128 features whatever its hidden
    size, Mistral's window is 4096.
    """
    hf = settings("qwen3")
    del hf["head_dim"]
    assert read(hf)["head_size"] == 128
    assert (
        read(settings("llama"))["tie_embeddings"] is False
        and read(settings("gpt2"))["tie_embeddings"] is True
    )
    hf = settings("mistral, wide heads")
    del hf["sliding_window"]
    assert read(hf)["window"] == 4096


@pytest.mark.parametrize("dense", [(0, 1), (2, 1), (0, 3), (3, 3), (1, 3), (5, 2)])
def test_places_of_experts(dense: tuple[int, int]) -> None:
    """Qwen3-MoE counts from the first block; experts in another block would find no
    weights, or those of a dense layer.
    """
    first, every = dense
    config = config_of(
        RMS | MOE | {"qk_norm": True, "num_layers": 9, "first_dense": first, "experts_every": every}
    )
    written = FAMILIES["Qwen3MoeForCausalLM"].write(config)
    sparse = [
        i not in written["mlp_only_layers"] and (i + 1) % written["decoder_sparse_step"] == 0
        for i in range(9)
    ]
    assert sparse == [config.model.has_experts(i) for i in range(9)]
    assert (read(written)["first_dense"], read(written)["experts_every"]) == dense


@pytest.mark.parametrize(
    ("name", "change", "window", "global_every"),
    [
        ("qwen2", {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0}, None, None),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4}, None, None),  # from block 28
        ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, None, None),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, 4096, None),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 4}, None, None),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 4,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            4,
            2,
        ),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}, 4, None),
    ],
)
def test_windows_of_qwen(
    name: str, change: dict[str, Any], window: int | None, global_every: int | None
) -> None:
    model = config_of(read(settings(name) | change)).model
    assert (model.window, model.global_every) == (window, global_every)


def test_a_mixture_without_experts_is_dense() -> None:
    """All blocks are listed as dense, or the first that could have experts is beyond the last."""
    for change in ({"mlp_only_layers": [0, 1, 2]}, {"decoder_sparse_step": 4, "mlp_only_layers": []}):
        config = config_of(read(settings("qwen3_moe") | change))
        assert config.model.num_experts is None
        assert family_for_config(config).architecture == "Qwen3ForCausalLM"


def test_rotary_settings_of_gemma_3() -> None:
    """Transformers 5 has them for each kind of block, and files of old one pattern and two bases."""
    old = settings("gemma3")
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": old["rope_theta"]}
    gone = ("rope_theta", "rope_local_base_freq", "rope_scaling", "layer_types")
    bare = {key: value for key, value in old.items() if key not in gone} | {"sliding_window_pattern": 2}
    new = bare | {
        "rope_parameters": {
            "full_attention": linear,
            "sliding_attention": {"rope_type": "default", "rope_theta": 40.0},
        }
    }
    assert read(new) == read(old)
    found = read(bare)
    assert (found["rope_theta"], found["window_rope_theta"], found["global_every"]) == (1e6, 1e4, 2)


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ({"bias": False}, "model.bias"),  # layernorms without biases
        ({"norm": "rmsnorm"}, "model.norm"),
        ({"position": "rope", "embedding_norm": True}, "model.embedding_norm"),
        ({"position": "rope", "rotary_share": 0.5, "num_kv_heads": 2}, "model.num_kv_heads"),
        (RMS | {"nope_every": 2, "embedding_scale": 2.0}, "model.nope_every"),
        (RMS | {"norm_place": "post"}, "model.norm_place"),
        (RMS | {"zero_init": True, "activation": "relu2"}, "model.activation"),
        ({"logit_scale": 0.5}, "model.logit_scale"),
        (RMS | MOE | {"window": 5, "router_normalised": False}, "model.qk_norm"),
        (RMS | MOE | {"shared_experts": 1}, "model.shared_experts"),
        (RMS | MOE | {"router_bias_rate": 0.1}, "model.router_bias"),
        (RMS | MOE | {"qk_norm": True, "router_scores": "sigmoid"}, "model.router_scores"),
        ({"num_kv_heads": 2}, "model.num_kv_heads"),
        (RMS | {"qk_norm": True, "qkv_bias": True}, "model.qk_norm"),
        (RMS | {"qk_norm": True, "residual_scale": 0.5}, "model.residual_scale"),
        (RMS | {"bias": True, "qkv_bias": False}, "model.output_bias"),
        (RMS | {"activation": "gelu"}, "model.activation"),
    ],
)
def test_a_model_that_no_family_has_is_not_exported(model: dict[str, Any], key: str) -> None:
    """transformers would compute something else from the same tensors."""
    with pytest.raises(ConfigError) as error:
        family_for_config(config_of(model))
    assert error.value.where == key


def test_the_nearest_family_differs_in_a_list_of_keys() -> None:
    """It read "norm and branches, activation"."""
    with pytest.raises(ConfigError, match="the nearest, differs in norm, embedding_norm and activation "):
        family_for_config(
            config_of({"bias": False, "position": "rope", "embedding_norm": True, "activation": "relu2"})
        )


def test_the_nearest_family_has_layers_of_the_same_kind() -> None:
    """A model with latents was told that Granite is the nearest, with `kv_rank None`; of several
    values the first alone was named.
    """
    of_latents = RMS | {"kv_rank": 8, "num_experts": 4}
    for model, right in (
        (RMS | {"kv_rank": 8}, r"DeepseekV3ForCausalLM, .* \(num_experts 256, norm_eps 1e-06\)"),
        (of_latents, r"DeepseekV3ForCausalLM, .* \(.*shared_experts 1, router_scores \"sigmoid\".*\)"),
        (
            RMS | MOE | {"shared_experts": 1, "first_dense": 1},
            r"Qwen3MoeForCausalLM, .* \(shared_experts 0, qk_norm true\)",
        ),
        (
            RMS | MOE | {"window": 5, "global_every": 2, "qk_norm": True},
            r"Qwen3MoeForCausalLM, .* \(global_every null\)",
        ),
    ):
        with pytest.raises(ConfigError, match=right):
            family_for_config(config_of(model))


MUP = {"parametrization": "mup", "base_width": 16, "base_layers": 1}


def test_mup_is_folded_into_the_scales_of_a_family_that_has_some() -> None:
    """Else a peer would compute the logits, and add to the residual, as at another width; other
    families refuse by the first scale.
    """
    config = config_of(RMS | MUP)
    written = FAMILIES["GraniteForCausalLM"].write(config)
    assert family_for_config(config).architecture == "GraniteForCausalLM"
    assert (
        (written["logits_scaling"], written["residual_multiplier"])
        == (1 / config.logit_scale, config.residual_scale)
        != (1.0, 1.0)
    )
    with pytest.raises(ConfigError, match="residual_scale and logit_scale"):
        family_for_config(config_of(MUP))


@pytest.mark.parametrize(
    ("model", "architecture"),
    [
        ({}, "GPT2LMHeadModel"),
        ({"activation": "gelu_erf", "tie_embeddings": False, "max_positions": 99}, "GPT2LMHeadModel"),
        (RMS, "LlamaForCausalLM"),
        (RMS | {"bias": True}, "LlamaForCausalLM"),
        (RMS | {"qkv_bias": True}, "Qwen2ForCausalLM"),
        (RMS | {"qkv_bias": True, "output_bias": True}, "LlamaForCausalLM"),
        (RMS | {"bias": True, "qkv_bias": False, "output_bias": False}, "LlamaForCausalLM"),
        (RMS | {"qkv_bias": True, "output_bias": True, "residual_scale": 0.5}, "GraniteForCausalLM"),
        (RMS | {"qkv_bias": True, "output_bias": True, "qk_norm": True}, "Qwen3ForCausalLM"),
        (RMS | {"qkv_bias": True, "window": 5}, "Qwen2ForCausalLM"),
        (RMS | {"qk_norm": True, "window": 5, "global_every": 2}, "Qwen3ForCausalLM"),
        (RMS | {"qk_norm": True, "head_size": 64}, "Qwen3ForCausalLM"),
        (RMS | {"attention_scale": 0.1}, "GraniteForCausalLM"),
        (RMS | {"rotary_share": 0.5}, "Phi3ForCausalLM"),
        (RMS | {"norm_place": "post", "qk_norm": True, "qk_norm_heads": "all"}, "Olmo2ForCausalLM"),
        (RMS | {"nope_every": 2}, "SmolLM3ForCausalLM"),
        (RMS | MOE, "MixtralForCausalLM"),
        (
            RMS
            | MOE
            | {"qk_norm": True, "router_normalised": False, "router_balance": "global", "ffn_size": 99},
            "Qwen3MoeForCausalLM",
        ),
        (
            RMS | MOE | {"qk_norm": True, "first_dense": 1, "experts_every": 2, "num_layers": 5},
            "Qwen3MoeForCausalLM",
        ),
        (RMS | MOE | {"qk_norm": True, "qk_norm_heads": "all"}, "OlmoeForCausalLM"),
        (RMS | MOE | DEEPSEEK, "DeepseekV3ForCausalLM"),
        (RMS | MOE | DEEPSEEK | {"router_bias_rate": 0.0, "router_bias": True}, "DeepseekV3ForCausalLM"),
        (RMS | MOE | DEEPSEEK | {"rope_scaling": STRETCHED, "attention_scale": 0.2}, "DeepseekV3ForCausalLM"),
        ({"position": "rope"}, "GPTNeoXForCausalLM"),
        ({"position": "rope", "branches": "parallel", "rotary_share": 0.25}, "GPTNeoXForCausalLM"),
        ({"position": "rope", "num_kv_heads": 2}, "Starcoder2ForCausalLM"),
        # LlamaConfig wants hidden sizes that heads divide
        (RMS | {"hidden_size": 34, "head_size": 8}, "MistralForCausalLM"),
        # free
        (
            RMS | {"dropout": 0.3, "attention": "eager", "kernels": "eager", "chunked_loss": True},
            "LlamaForCausalLM",
        ),
    ],
)
def test_the_family_of_a_config(model: dict[str, Any], architecture: str) -> None:
    assert family_for_config(config_of(model)).architecture == architecture


def test_old_files() -> None:
    """Names without their prefix, and buffers that are no parameters."""
    assert stored_name("transformer.wte.weight", {"wte.weight"}) == "wte.weight"
    assert stored_name("model.norm.weight", ["model.norm.weight", "norm.weight"]) == "model.norm.weight"
    assert stored_name("lm_head.weight", {"weight"}) is None
    for architecture, name, ignored in (
        ("GPT2LMHeadModel", "h.0.attn.bias", True),
        ("GPT2LMHeadModel", "transformer.h.11.attn.masked_bias", True),
        ("GPT2LMHeadModel", "transformer.h.0.attn.c_attn.bias", False),
        ("LlamaForCausalLM", "model.layers.3.self_attn.rotary_emb.inv_freq", True),
        ("LlamaForCausalLM", "model.layers.3.self_attn.q_proj.weight", False),
    ):
        assert any(pattern.fullmatch(name) for pattern in FAMILIES[architecture].ignored) == ignored, name


def test_a_path_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"some/folder/config\.json.*one of GPT2LMHeadModel"):
        family_for_hf({"architectures": ["Mamba"]}, "some/folder/config.json")
