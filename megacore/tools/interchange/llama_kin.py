"""Phi-3 and SmolLM3: Llama but for fused tensors and partial rotary positions, or for blocks without positions."""

from typing import Any

import torch
from torch import Tensor

from megacore.config import Config
from megacore.errors import CheckpointError
from megacore.tools.interchange.mapped import Mapped, llama_tensors
from megacore.tools.interchange.rotated import reordered
from megacore.tools.interchange.settings import (
    CONFIG,
    get,
    head_size_of,
    read_biases,
    read_llama_like,
    require,
    rotary_share,
    whole,
    write_biases,
    write_llama_like,
)


def read_phi3(hf: dict[str, Any]) -> dict[str, Any]:
    """See `Family.read`."""
    require(hf, "sliding_window", None, None)
    share = rotary_share(hf, head_size_of(hf, "hidden_size", "num_attention_heads"))
    return read_llama_like({"rms_norm_eps": 1e-5} | hf, rotary_share=share)


def write_phi3(config: Config) -> dict[str, Any]:
    """See `Family.write`."""
    written = write_llama_like(config, "Phi3ForCausalLM", "phi3", sliding_window=None, pad_token_id=None)
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
    """A model with Phi-3's names: Llama's, but for queries, keys and values in one tensor, and gate and up."""
    tensors = []
    for tensor in llama_tensors(config):
        block = next(iter(tensor.peers)).rpartition(".self_attn.")[0] or next(iter(tensor.peers)).rpartition(".mlp.")[0]
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
        raise CheckpointError(CONFIG, f"no_rope_layers is {rotating}, which no model here has", "0 in every n-th place alone")
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
