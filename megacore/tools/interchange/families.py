"""Families of Hugging Face models that our config expresses exactly, with their settings
and tensors in both directions.

Nothing here needs transformers: a peer's model is a `config.json`, read as an object, and named tensors.
"""

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from megacore.config import Config
from megacore.config.experts import ExpertSettings
from megacore.config.model import ModelConfig
from megacore.errors import CheckpointError, ConfigError
from megacore.tools.interchange import deepseek, expert_families, gelu_families, gpt_oss, llama_kin, settings
from megacore.tools.interchange.mapped import Mapped, gpt2_tensors, llama_tensors

# No part of the function, or none behind the last step of a schedule.
TRAINING_KEYS = {
    "dropout",
    "attention",
    "init_std",
    "zero_init",
    "kernels",
    "chunked_loss",
    "z_loss",
    "window_schedule",
}
TRAINING_KEYS |= {
    "router_balance",
    "balance_coefficient",
    "router_z_loss",
    "router_bias_rate",
    "capacity_factor",
}
# a family that differs in one of these has other layers, and is further away than any that does not
KINDS = ("kv_rank", "num_experts")


@dataclass(frozen=True)
class Family:
    """An architecture of a peer.

    `read` raises `CheckpointError` naming the key that our models cannot express. `write` is right for a
    config of which `family_for_config` says that it is of this family. What fully matches one of `ignored` is
    a buffer of an old file, no parameter.
    """

    architecture: str  # "LlamaForCausalLM"
    read: Callable[[dict[str, Any]], dict[str, Any]]  # their config.json → our `model` section
    write: Callable[[Config], dict[str, Any]]  # our config → their config.json
    # every parameter of the logical model exactly once, in the order of the layers
    mapped: Callable[[Config], list[Mapped]]
    ignored: tuple[re.Pattern[str], ...] = ()
    # the same as `mapped` for files with experts as transformers 5 holds them
    held: Callable[[Config], list[Mapped]] | None = None
    # keys of config.json on which its tensors depend besides; `mapped` takes them
    options: tuple[str, ...] = ()
    beyond: str = ""  # the key for how many layers behind the last its files have, which are left out

    def mapped_from(self, stored: Iterable[str], hf: dict[str, Any]) -> Callable[[Config], list[Mapped]]:
        """`mapped`, or `held` where the names in the files are its."""
        chosen = (
            self.held
            if self.held and any(name.endswith(".experts.gate_up_proj") for name in stored)
            else self.mapped
        )
        return partial(chosen, **{key: hf[key] for key in self.options if key in hf})


OLD_ROTARY = (re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),)
OLD_NEOX = (re.compile(r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"),)
OLD_MASKS = (re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"),)

# In the order in which `family_for_config` tries them: the plain ones first.
FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        Family("GPT2LMHeadModel", settings.read_gpt2, settings.write_gpt2, gpt2_tensors, OLD_MASKS),
        Family("LlamaForCausalLM", settings.read_llama, settings.write_llama, llama_tensors, OLD_ROTARY),
        Family(
            "MistralForCausalLM", settings.read_mistral, settings.write_mistral, llama_tensors, OLD_ROTARY
        ),
        Family("Qwen2ForCausalLM", settings.read_qwen2, settings.write_qwen2, llama_tensors, OLD_ROTARY),
        Family("Qwen3ForCausalLM", settings.read_qwen3, settings.write_qwen3, llama_tensors, OLD_ROTARY),
        Family(
            "GraniteForCausalLM", settings.read_granite, settings.write_granite, llama_tensors, OLD_ROTARY
        ),
        Family(
            "Phi3ForCausalLM", llama_kin.read_phi3, llama_kin.write_phi3, llama_kin.phi3_tensors, OLD_ROTARY
        ),
        Family(
            "SmolLM3ForCausalLM", llama_kin.read_smollm3, llama_kin.write_smollm3, llama_tensors, OLD_ROTARY
        ),
        Family(
            "Gemma2ForCausalLM",
            llama_kin.read_gemma2,
            llama_kin.write_gemma2,
            llama_kin.gemma2_tensors,
            OLD_ROTARY,
        ),
        Family(
            "Gemma3ForCausalLM",
            llama_kin.read_gemma3,
            llama_kin.write_gemma3,
            llama_kin.gemma2_tensors,
            OLD_ROTARY,
        ),
        Family(
            "Olmo2ForCausalLM",
            llama_kin.read_olmo2,
            llama_kin.write_olmo2,
            llama_kin.olmo2_tensors,
            OLD_ROTARY,
        ),
        Family(
            "GPTNeoXForCausalLM",
            gelu_families.read_neox,
            gelu_families.write_neox,
            gelu_families.neox_tensors,
            OLD_NEOX,
        ),
        Family(
            "Starcoder2ForCausalLM",
            gelu_families.read_starcoder2,
            gelu_families.write_starcoder2,
            gelu_families.starcoder2_tensors,
        ),
        Family(
            "PhiForCausalLM",
            gelu_families.read_phi,
            gelu_families.write_phi,
            gelu_families.phi_tensors,
            OLD_ROTARY,
        ),
        *(
            Family(f"{name}ForCausalLM", read, write, tensors, OLD_ROTARY, expert_families.held_tensors)
            for name, read, write, tensors in (
                (
                    "Qwen3Moe",
                    expert_families.read_qwen3_moe,
                    expert_families.write_qwen3_moe,
                    expert_families.qwen_tensors,
                ),
                (
                    "Mixtral",
                    expert_families.read_mixtral,
                    expert_families.write_mixtral,
                    expert_families.mixtral_tensors,
                ),
                (
                    "Olmoe",
                    expert_families.read_olmoe,
                    expert_families.write_olmoe,
                    expert_families.qwen_tensors,
                ),
            )
        ),
        Family(
            "GptOssForCausalLM",
            gpt_oss.read_gpt_oss,
            gpt_oss.write_gpt_oss,
            gpt_oss.gpt_oss_tensors,
            OLD_ROTARY,
        ),
        Family(
            "DeepseekV3ForCausalLM",
            deepseek.read_deepseek_v3,
            deepseek.write_deepseek_v3,
            deepseek.deepseek_tensors,
            OLD_ROTARY,
            deepseek.held_deepseek_tensors,
            options=("rope_interleave",),
            beyond="num_nextn_predict_layers",
        ),
    )
}


# The architecture that AutoModelForCausalLM takes for the model_type of a config.json.
MODEL_TYPES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "phi": "PhiForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


def family_for_hf(hf: dict[str, Any], path: str) -> Family:
    """The family that the config.json at `path` names.

    Raises:
        CheckpointError: it names none, or one that is not known here.
    """
    named = hf.get("architectures")
    if named:
        architecture = named[0] if isinstance(named, list) else named
    else:  # AutoModelForCausalLM looks at model_type alone
        model_type = hf.get("model_type")
        architecture = MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None
        if architecture is None:
            raise CheckpointError(
                path,
                f"has no architectures, and its model_type {model_type!r} is not known here",
                "architectures with one of " + ", ".join(FAMILIES),
            )
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise CheckpointError(
            path,
            f"is of the architecture {architecture}, which is not known here",
            "one of " + ", ".join(FAMILIES),
        )
    return FAMILIES[architecture]


def family_for_config(config: Config) -> Family:
    """The family that computes exactly what a model of this config computes.

    Raises:
        ConfigError: none does; names the keys in which the nearest one differs, and its values.
    """
    found: dict[str, dict[str, Any]] = {}
    for family in FAMILIES.values():
        try:
            differing = unexpressed(family, config)
        except CheckpointError:  # sizes that the family refuses
            continue
        if not differing:
            return family
        found[family.architecture] = differing
    nearest = min(found, key=lambda name: (*(kind in found[name] for kind in KINDS), len(found[name])))
    *others, last = found[nearest]
    named = f"{', '.join(others)} and {last}" if others else last
    wrong = f"no known architecture has this model: {nearest}, the nearest, differs in {named}"
    right = ", ".join(f"{key} {json.dumps(value)}" for key, value in found[nearest].items())
    raise ConfigError(f"model.{next(iter(found[nearest]))}", wrong, right)


def unexpressed(family: Family, config: Config) -> dict[str, Any]:
    """The keys of our model section that the family does not bring back from its own
    config.json, with what it makes of them.

    A key that `read` does not set is expressed where it has its default, so that a new one is refused until
    families know it.
    """
    model = config.model
    passed_over = TRAINING_KEYS | ({"rope_theta"} if model.position == "learned" else set())
    passed_over |= (
        ExpertSettings.model_fields.keys() - {"num_experts"} if model.num_experts is None else set()
    )
    passed_over |= {"ffn_size"} if all(map(model.has_experts, range(model.num_layers))) else set()
    ours = settings.as_peers_have_it(config).model_dump(exclude=passed_over)
    theirs = ModelConfig.model_validate(family.read(family.write(config))).model_dump(exclude=passed_over)
    return {key: theirs[key] for key, value in ours.items() if not same(value, theirs[key])}


def same(ours: Any, theirs: Any) -> bool:
    """Whether two values are equal; numbers up to the rounding of two divisions."""
    if isinstance(ours, float) and isinstance(theirs, (int, float)):
        return math.isclose(ours, theirs, rel_tol=1e-12)
    return bool(ours == theirs)
