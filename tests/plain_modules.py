"""Plain modules for tests: small folders of transformers, and the example in plain PyTorch."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "configs/forks/plain_gpt.py"
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 259,
    "max_position_embeddings": 128,
}
# What the process from which ranks are forked imports, because transformers takes each of them many seconds.
PRELOAD = [
    "tests.preload",
    *(f"transformers.models.{kind}.modeling_{kind}" for kind in ("llama", "mixtral", "gpt2")),
    "tests.frozen",
]
# What a class has besides, or in the place of these sizes.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
    },
    "gemma2": {
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 5,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
}
GPT2: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 128,
    "vocab_size": 259,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def write_folder(folder: Path, kind: str, **changes: Any) -> Path:
    """Write the config.json of a small model of transformers, by its `model_type`; return its folder."""
    from transformers import AutoConfig

    settings = GPT2 if kind == "gpt2" else SIZES | KINDS[kind]
    AutoConfig.for_model(kind, **settings | changes).save_pretrained(folder / kind)
    return folder / kind


def write_example(folder: Path, *edits: tuple[str, str]) -> Path:
    """Write the example in plain PyTorch, with some of its text replaced; return its path."""
    text = EXAMPLE.read_text(encoding="utf-8")
    for before, after in edits:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    path = folder / "model.py"
    path.write_text(text, encoding="utf-8")
    return path
