"""Models of transformers as independent references: tiny ones with random weights, in
fp32 as they are or all in fp64.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

BIAS = ".e_score_correction_bias"  # a buffer of routers
VOCAB_SIZE = 53  # does not divide by 2

GPT2 = {
    "n_layer": 3,
    "n_embd": 32,
    "n_head": 4,
    "n_positions": 16,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
LLAMA = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
    "rope_theta": 100.0,
}
STRETCHED = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 4,
    "beta_fast": 2.0,
    "beta_slow": 0.125,
}
# Six pairs turn of phi3's heads, and four of llama's.
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.4],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
}
LONG = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
GRANITE = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
}

GEMMA2 = {
    "head_dim": 12,
    "query_pre_attn_scalar": 20,
    "sliding_window": 4,
    "attn_logit_softcapping": 0.5,
    "final_logit_softcapping": 1.5,
    "pad_token_id": None,
}
NEOX = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "rope_theta")} | {
    "rotary_emb_base": 100.0,
    "rotary_pct": 0.5,
    "pad_token_id": None,
}

GEMMA3 = GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None}
GEMMA3 |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
GEMMA3 |= {"rope_local_base_freq": 40.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}

# All first blocks dense, the weights of chosen experts normalised; heads whose sizes are their own.
QWEN3_MOE = {
    "head_dim": 12,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
}

DEEPSEEK = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | {
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "routed_scaling_factor": 1.5,
    "rope_scaling": YARN | {"mscale": 0.5, "mscale_all_dim": 0.8},
}

GPT_OSS = {
    "head_dim": 12,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "rope_scaling": YARN | {"truncate": False},
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

SERIAL = {"use_parallel_residual": False, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}

# model_type and settings. Every setting that changes what is computed is somewhere off its default.
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2),
    "gpt2 untied, exact gelu": (
        "gpt2",
        GPT2 | {"tie_word_embeddings": False, "activation_function": "gelu", "scale_attn_weights": False},
    ),
    "llama": ("llama", LLAMA),
    "llama tied, stretched, biases": (
        "llama",
        LLAMA
        | {"tie_word_embeddings": True, "rope_scaling": STRETCHED, "attention_bias": True, "mlp_bias": True},
    ),
    "llama, biases of attention alone": ("llama", LLAMA | {"attention_bias": True}),
    "llama, biases of the MLP alone": ("llama", LLAMA | {"mlp_bias": True}),
    "mistral, wide heads": ("mistral", LLAMA | {"head_dim": 12, "sliding_window": 3}),
    "qwen2": (
        "qwen2",
        LLAMA | {"tie_word_embeddings": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "qwen3": ("qwen3", LLAMA | {"head_dim": 16, "num_attention_heads": 6}),
    "qwen2, windows": (
        "qwen2",
        LLAMA | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0},
    ),
    "qwen3, windows, biases": (
        "qwen3",
        LLAMA
        | {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3, yarn": ("qwen3", LLAMA | {"head_dim": 16, "rope_scaling": YARN}),
    "phi3": ("phi3", LLAMA | {"hidden_size": 64, "partial_rotary_factor": 0.75, "pad_token_id": None}),
    "phi3, longrope": (
        "phi3",
        LLAMA
        | LONG
        | {
            "hidden_size": 64,
            "partial_rotary_factor": 0.75,
            "pad_token_id": None,
            "rope_scaling": LONGROPE,
        },
    ),
    "llama, longrope": (
        "llama",
        LLAMA
        | LONG
        | {
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.5, 2.0, 2.5],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
                "original_max_position_embeddings": 16,
                "attention_factor": 1.25,
            }
        },
    ),
    "smollm3": ("smollm3", LLAMA | {"no_rope_layer_interval": 2, "pad_token_id": None}),
    "gpt_neox": ("gpt_neox", NEOX),
    "gpt_neox, serial": ("gpt_neox", NEOX | SERIAL),
    "phi": (
        "phi",
        {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
        | {"partial_rotary_factor": 0.75},
    ),
    "starcoder2": ("starcoder2", LLAMA | {"pad_token_id": None, "sliding_window": 5}),
    "gemma2": ("gemma2", LLAMA | GEMMA2),
    "gemma3": ("gemma3_text", LLAMA | GEMMA3),
    "olmo2": ("olmo2", LLAMA | {"pad_token_id": None}),
    "qwen3_moe": ("qwen3_moe", LLAMA | QWEN3_MOE | {"mlp_only_layers": [0]}),
    "qwen3_moe, windows, biases": (
        "qwen3_moe",
        LLAMA | QWEN3_MOE | {"attention_bias": True, "use_sliding_window": True, "sliding_window": 3},
    ),
    "mixtral": ("mixtral", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}),
    "olmo2, biases": ("olmo2", LLAMA | {"pad_token_id": None, "attention_bias": True}),
    "olmoe": ("olmoe", LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": None}),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "deepseek_v3, no latent of queries, features half apart": (
        "deepseek_v3",
        DEEPSEEK
        | {
            "q_lora_rank": None,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "gpt_oss": ("gpt_oss", LLAMA | GPT_OSS),
    "granite": ("granite", LLAMA | GRANITE | {"tie_word_embeddings": True}),
}


@contextmanager
def widened() -> Iterator[None]:
    """Within it, transformers' fp64 models are fp64 throughout: norms, softmax and
    rotary angles would go through fp32.
    """
    default = torch.get_default_dtype()
    with (
        patch.multiple(torch, float32=torch.float64, float=torch.float64),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def build(name: str) -> Any:
    """The model `name` in the default dtype, with random weights: biases and norms off zero and one."""
    # Here and not at the top: workers read this file too.
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install -e '.[test]'"
    )
    kind, settings = PEERS[name]
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=VOCAB_SIZE, bos_token_id=None, eos_token_id=None, **settings
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's product of groups knows no fp64
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            centre = 1.0 if parameter.ndim == 1 and parameter.mean() > 0.5 else 0.0
            parameter.copy_(
                centre + 0.15 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            )
        for name, buffer in model.named_buffers():
            if name.endswith(BIAS):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator, dtype=torch.float64))
    return model.train()


def tokens() -> tuple[Tensor, Tensor]:
    """Inputs and targets ``[4, 12]``, the same in every process."""
    rows = torch.randint(VOCAB_SIZE, (4, 13), generator=torch.Generator().manual_seed(1))
    return rows[:, :-1], rows[:, 1:]


@dataclass(frozen=True)
class Reference:
    """What a peer's model is, and what it computes of `tokens`."""

    settings: dict[str, Any]  # the config.json that transformers would save
    weights: dict[str, Tensor]  # what it would store: a tied LM head is left out
    logits: Tensor  # [4, 12, vocab]
    loss: float  # mean over the targets
    gradients: dict[str, Tensor]

    @classmethod
    def of(cls, model: Any) -> "Reference":
        """Runs the model forward and backward."""
        settings = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}
        inputs, targets = tokens()
        logits = model(inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        weights, gradients = dict[str, Tensor](), dict[str, Tensor]()
        for name, parameter in model.named_parameters():
            weights |= as_stored(settings["model_type"], name, parameter.detach())
            gradients |= (
                as_stored(settings["model_type"], name, parameter.grad) if parameter.grad is not None else {}
            )
        weights |= {name: buffer for name, buffer in model.named_buffers() if name.endswith(BIAS)}
        return cls(settings, weights, logits.detach(), loss.item(), gradients)


def as_stored(kind: str, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor of a model in memory as the tensors of its files."""
    if kind == "gpt_oss":
        return {name: tensor}
    if kind == "gpt_neox":
        return {name.replace("lm_head.", "embed_out."): tensor}
    if kind == "mixtral":
        name = name.replace(".mlp.", ".block_sparse_moe.")
    block, is_experts, own = name.partition(".experts.")
    if not is_experts:
        return {name: tensor}
    parts = (
        zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True)
        if own == "gate_up_proj"
        else [(own, tensor)]
    )
    short = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"} if kind == "mixtral" else {}
    return {
        f"{block}.experts.{i}.{short.get(part, part)}.weight": rows
        for part, whole in parts
        for i, rows in enumerate(whole)
    }


@cache
def reference(name: str) -> dict[str, Reference]:
    """By `train.precision`. fp32 first: what transformers imports only now must not see `widened`'s types."""
    single = Reference.of(build(name))
    with widened():
        return {"fp32": single, "fp64": Reference.of(build(name))}
