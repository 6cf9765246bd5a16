"""gpt-oss: attention with sinks, windows in every second block, and experts with biases.

Its files have gate and up side by side, feature by feature, and the weights of experts as ``[in, out]``.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megacore.config import Config
from megacore.errors import CheckpointError
from megacore.model.activations import LIMIT, SHARPNESS
from megacore.tools.interchange.expert_families import (
    read_local_experts,
    shapes_of,
    with_experts,
    write_local_experts,
)
from megacore.tools.interchange.mapped import Mapped, Shape, renamed
from megacore.tools.interchange.settings import (
    CONFIG,
    layer_types,
    read_llama_like,
    read_windows,
    require,
    write_llama_like,
)

# where the file has none
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def read_gpt_oss(hf: dict[str, Any]) -> dict[str, Any]:
    """See `Family.read`."""
    if hf.get("quantization_config") is not None:
        wrong = "quantization_config: its experts are in 4 bits"
        raise CheckpointError(
            CONFIG, wrong, "dequantise it, by transformers' Mxfp4Config(dequantize=True), and save that"
        )
    for key, right in (("attention_bias", True), ("swiglu_limit", LIMIT), ("swiglu_alpha", SHARPNESS)):
        require(hf, key, right, right)
    if not (hf.get("rope_parameters") or hf.get("rope_scaling")):
        hf = hf | {"rope_scaling": YARN}
    hf = {
        "rope_theta": 150000.0,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
    } | hf
    window, every = read_windows(hf, 2)
    return read_llama_like(
        hf,
        activation="swiglu_clamped",
        window=window,
        global_every=every,
        bias=True,
        qkv_bias=True,
        output_bias=True,
        attention_sinks=True,
        **read_local_experts(hf, 128, 4),
    )


def write_gpt_oss(config: Config) -> dict[str, Any]:
    """See `Family.write`."""
    model = config.model
    own = write_local_experts(model) | {
        "layer_types": layer_types(model.num_layers, model.window, model.global_every),
        "swiglu_limit": LIMIT,
        "swiglu_alpha": SHARPNESS,
        "attention_bias": True,
    }
    written = write_llama_like(config, "GptOssForCausalLM", "gpt_oss", **own)
    return written | {"rope_scaling": written["rope_scaling"] or {"rope_type": "default"}}


def gpt_oss_tensors(config: Config) -> list[Mapped]:
    """A model with gpt-oss's names: Llama's, with sinks and mixtures."""
    tensors = []
    for tensor in with_experts(config, partial(mixture, config)):
        tensors.append(tensor)
        block, _, own = tensor.name.partition(".attention.")
        if own == "output.weight":
            sinks = f"{block.replace('blocks', 'model.layers')}.self_attn.sinks"
            tensors.append(renamed(f"{block}.attention.sinks", (config.model.num_heads,), sinks))
    return tensors


def mixture(config: Config, ours: str, theirs: str) -> list[Mapped]:
    """A mixture's router and experts, with their biases."""
    router, up, down = shapes_of(config)
    theirs = f"{theirs}.mlp"
    return [
        renamed(f"{ours}.router.weight", router, f"{theirs}.router.weight"),
        renamed(f"{ours}.router.logit_bias", router[:1], f"{theirs}.router.bias"),
        side_by_side(f"{ours}.experts.up", up, f"{theirs}.experts.gate_up_proj"),
        side_by_side(f"{ours}.experts.up_bias", up[:3], f"{theirs}.experts.gate_up_proj_bias"),
        turned(f"{ours}.experts.down", down, f"{theirs}.experts.down_proj"),
        renamed(f"{ours}.experts.down_bias", down[:2], f"{theirs}.experts.down_proj_bias"),
    ]


def turned(name: str, shape: Shape, peer: str) -> Mapped:
    """``[experts, out, in]`` that the peer keeps as ``[experts, in, out]``."""

    def turn(x: Tensor) -> Tensor:
        return x.mT.contiguous()

    return Mapped(
        name,
        shape,
        {peer: (shape[0], *shape[:0:-1])},
        lambda theirs: turn(theirs[peer]),
        lambda ours: {peer: turn(ours)},
    )


def side_by_side(name: str, shape: Shape, peer: str) -> Mapped:
    """``[experts, 2, features, …]`` that the peer keeps as ``[experts, …, features · 2]``."""
    experts, two, features, *inputs = shape

    def join(theirs: dict[str, Tensor]) -> Tensor:
        return theirs[peer].unflatten(-1, (features, two)).movedim((-1, -2), (1, 2)).contiguous()

    def split(ours: Tensor) -> dict[str, Tensor]:
        return {peer: torch.movedim(ours, (1, 2), (-1, -2)).flatten(-2).contiguous()}

    return Mapped(name, shape, {peer: (experts, *inputs, features * two)}, join, split)
