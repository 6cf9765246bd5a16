"""A port of Granite in megacore's own layers (`model.source`), with transformers' class to compare it with.

Granite is Llama with four multipliers, which no parameter shows. The port takes them from the model's
settings; the untouched module has them from settings of its own.
"""

from megacore.config import Config
from megacore.config.model import ModelConfig
from megacore.config.schema import resolved
from megacore.model.block import Block as Block
from megacore.tools.interchange.mapped import llama_tensors
from megacore.tools.verify.untouched import Untouched

# The port's settings that must be the multipliers.
MULTIPLIERS = (
    "model.embedding_scale=3.0",
    "model.residual_scale=0.5",
    "model.logit_scale=0.5",
    "model.attention_scale=0.3",
)
LLAMA = (
    "model.norm=rmsnorm",
    "model.activation=swiglu",
    "model.position=rope",
    "model.bias=false",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_heads=8",
    "model.head_size=4",  # shrinking keeps it, and with it attention's scale
    "model.num_kv_heads=4",
)


class Settings(ModelConfig):
    """What Granite's config.json says."""

    embedding_multiplier: float = 3.0
    residual_multiplier: float = 0.5
    logits_scaling: float = 2.0
    attention_multiplier: float = 0.3


def untouched(config: Config) -> Untouched:
    """The class of transformers, in the sizes of `config`."""
    from transformers import GraniteConfig, GraniteForCausalLM

    model = config.model
    assert isinstance(model, Settings)
    hf_config = GraniteConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=resolved(model.ffn_size),
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=model.norm_eps,
        tie_word_embeddings=model.tie_embeddings,
        embedding_multiplier=model.embedding_multiplier,
        residual_multiplier=model.residual_multiplier,
        logits_scaling=model.logits_scaling,
        attention_multiplier=model.attention_multiplier,
        attn_implementation="eager",
    )
    module = GraniteForCausalLM(hf_config)
    return Untouched(module, lambda tokens: module(tokens, use_cache=False).logits, llama_tensors(config))
