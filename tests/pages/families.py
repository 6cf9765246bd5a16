"""Generate the tables of docs/models.md: which published models can be imported, and their settings."""

import json
import math
from typing import Any

from megacore.config.model import ModelConfig
from megacore.errors import ConfigError
from megacore.files import ROOT
from megacore.tools.interchange.families import FAMILIES, MODEL_TYPES, Family, family_for_config
from tests import peers
from tests.build import run_of

# How each architecture is known. A family without an entry makes the table fail.
LABELS = {
    "GPT2LMHeadModel": "GPT-2",
    "LlamaForCausalLM": "Llama, SmolLM2",
    "MistralForCausalLM": "Mistral",
    "Qwen2ForCausalLM": "Qwen2, Qwen2.5",
    "Qwen3ForCausalLM": "Qwen3",
    "GraniteForCausalLM": "Granite",
    "Phi3ForCausalLM": "Phi-3, Phi-4",
    "SmolLM3ForCausalLM": "SmolLM3",
    "Gemma2ForCausalLM": "Gemma 2",
    "Gemma3ForCausalLM": "Gemma 3, text only",
    "Olmo2ForCausalLM": "OLMo 2",
    "GPTNeoXForCausalLM": "GPT-NeoX, Pythia",
    "Starcoder2ForCausalLM": "StarCoder2",
    "PhiForCausalLM": "Phi-1, Phi-2",
    "Qwen3MoeForCausalLM": "Qwen3-MoE",
    "MixtralForCausalLM": "Mixtral",
    "OlmoeForCausalLM": "OLMoE",
    "GptOssForCausalLM": "gpt-oss",
    "DeepseekV3ForCausalLM": "DeepSeek-V3, DeepSeek-R1",
}
# Sizes by the names of all classes. What depends on them is left out of the table of settings.
SIZES = {
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 1024,
    "vocab_size": 50304,
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_positions": 1024,
}
SIZE_KEYS = {"vocab_size", "ffn_size", "max_positions", "num_kv_heads", "head_size", "expert_ffn_size"}
PASSED_OVER = SIZE_KEYS | {"norm_eps", "init_std", "rope_theta", "rope_scaling"}
SCALES = ("attention_scale", "embedding_scale", "residual_scale", "logit_scale")
# Settings for which the default of the class says nothing about published models: shown without a value.
WITHOUT_VALUE = {"GraniteForCausalLM": SCALES, "GptOssForCausalLM": ("rope_scaling",)}


def supported_models() -> str:
    """Return the table of families, with the number of variants that tests compare, and the configs.

    `test_equals_transformers` and `test_theirs_in_and_out_again` run every model of `peers.PEERS`.
    Raises `ConfigError` if a family has none.
    """
    configs = shipped_configs()
    lines = [
        "| model | class in transformers | variants tested | configs |",
        "|---|---|---|---|",
    ]
    for architecture in FAMILIES:
        variants = sum(MODEL_TYPES[kind] == architecture for kind, _ in peers.PEERS.values())
        if not variants:
            raise ConfigError(
                "docs/models.md", f"{architecture} has no test", "a model of it in tests/peers.py"
            )
        shipped = ", ".join(configs.get(architecture, []))
        cells = (LABELS[architecture], f"`{architecture}`", str(variants), shipped)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def shipped_configs() -> dict[str, list[str]]:
    """Return the names of the configs whose model can be exported, by architecture."""
    names: dict[str, list[str]] = {}
    for path in sorted((ROOT / "configs").glob("*.json")):
        sections = json.loads(path.read_text(encoding="utf-8"))
        train = {"seq_len": sections["train"]["seq_len"], "device": "cpu"}
        config = run_of({"model": sections["model"], "train": train})
        try:
            names.setdefault(family_for_config(config).architecture, []).append(f"`{path.stem}`")
        except ConfigError:
            continue
    return names


def family_settings() -> str:
    """Return the table of the settings that give each family, relative to GPT-2's or Llama's."""
    bases = {name: settings_of(FAMILIES[name]) for name in ("GPT2LMHeadModel", "LlamaForCausalLM")}
    lines = ["| model | settings |", "|---|---|"]
    for architecture, family in FAMILIES.items():
        settings = settings_of(family)
        base = min(bases, key=lambda name: len(changes(settings, bases[name])))
        if architecture in bases:
            base = "GPT2LMHeadModel"
        texts = [setting_text(key, value) for key, value in changes(settings, bases[base]).items()]
        texts += [f"`{key}`" for key in WITHOUT_VALUE.get(architecture, ())]
        if architecture == "GPT2LMHeadModel":
            cell = "the defaults"
        elif base == "GPT2LMHeadModel":
            cell = " ".join(texts)
        else:
            cell = "like Llama, " + " ".join(texts) if texts else "like Llama"
        lines.append(f"| {LABELS[architecture]} | {cell} |")
    return "\n".join(lines) + "\n"


def settings_of(family: Family) -> dict[str, Any]:
    """Return the settings of a model whose config.json holds sizes alone: the defaults of its class."""
    model = ModelConfig.model_validate(family.read(dict(SIZES)))
    settings = model.model_dump(exclude=PASSED_OVER)
    for key in ("qkv_bias", "output_bias"):
        settings[key] = model.bias if settings[key] is None else settings[key]
    features = model.head_size or model.hidden_size // model.num_heads
    if model.kv_rank is not None:
        features += model.plain_size
    if math.isclose(settings["attention_scale"] or features**-0.5, features**-0.5):
        settings["attention_scale"] = None
    for key in settings.keys() & set(WITHOUT_VALUE.get(family.architecture, ())):
        settings[key] = ModelConfig.model_fields[key].default
    return settings


def changes(settings: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are not those of `base`."""
    changed = {key: value for key, value in settings.items() if value != base[key]}
    if "bias" in changed:  # the others follow it
        for key in ("qkv_bias", "output_bias"):
            if settings[key] == settings["bias"]:
                changed.pop(key, None)
            else:
                changed[key] = settings[key]
    return changed


def setting_text(key: str, value: Any) -> str:
    """Return a setting as an override, without its section."""
    if key == "embedding_scale" and math.isclose(value, SIZES["hidden_size"] ** 0.5):
        return "`embedding_scale=`√`hidden_size`"
    text = value if isinstance(value, str) else json.dumps(value)
    return f"`{key}={text.removesuffix('.0')}`"
