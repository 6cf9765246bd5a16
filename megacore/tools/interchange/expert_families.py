"""Qwen3-MoE, Mixtral and OLMoE: Llama but for mixtures of experts in place of the feed-forward
layers, in all blocks or some.

Files have each expert's matrices by themselves. transformers 5 holds those of a block's experts in one
tensor, and may write that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from megacore.config import Config
from megacore.config.experts import ExpertSettings
from megacore.config.model import ModelConfig
from megacore.config.schema import resolved
from megacore.errors import CheckpointError
from megacore.tools.interchange.mapped import Mapped, Shape, llama_tensors, renamed, stacked
from megacore.tools.interchange.settings import (
    CONFIG,
    flag,
    get,
    head_size_of,
    or_null,
    read_attention_bias,
    read_llama_like,
    require,
    whole,
    write_llama_like,
)


def read_qwen3_moe(hf: dict[str, Any]) -> dict[str, Any]:
    """See `Family.read`."""
    settings = read_attention_bias(hf)
    if flag(hf, "use_sliding_window", False):  # in all blocks
        settings["window"] = or_null(hf, "sliding_window", 4096, int)
    if any(places_of_experts(hf)):
        settings |= read_places(hf) | read_router(hf, 128, 8)
        settings["expert_ffn_size"] = whole(hf, "moe_intermediate_size", 768)
    return read_llama_like({"num_key_value_heads": 4} | hf, qk_norm=True, **settings)


def write_qwen3_moe(config: Config) -> dict[str, Any]:
    """See `Family.write`."""
    model = config.model
    own = {
        "use_sliding_window": model.window is not None,
        "sliding_window": model.window,
        "attention_bias": model.qkv_bias,
        "moe_intermediate_size": model.expert_ffn_size,
    }
    return write_llama_like(
        config, "Qwen3MoeForCausalLM", "qwen3_moe", **own, **write_places(model), **write_router(model)
    )


def read_places(hf: dict[str, Any]) -> dict[str, Any]:
    """Read which blocks have experts; at least one has to."""
    count, every = whole(hf, "num_hidden_layers"), whole(hf, "decoder_sparse_step", 1)
    dense = get(hf, "mlp_only_layers", None, list) or []
    places = places_of_experts(hf)
    first = places.index(True)
    for first_dense, step in [(len(dense), every), *((first + 1 - n, n) for n in range(1, first + 2))]:
        ours = ExpertSettings(num_experts=1, first_dense=first_dense, experts_every=step)
        if [ours.has_experts(i) for i in range(count)] == places:
            return {"first_dense": first_dense, "experts_every": step}
    wrong = f"mlp_only_layers is {dense} and decoder_sparse_step {every}, which no model here has"
    raise CheckpointError(
        CONFIG, wrong, "the first blocks alone without experts, and of the others every n-th with some"
    )


def places_of_experts(hf: dict[str, Any]) -> list[bool]:
    """Return for each block whether it has experts: every n-th has, unless it is listed as dense."""
    dense = get(hf, "mlp_only_layers", None, list) or []
    step = whole(hf, "decoder_sparse_step", 1)
    return [i not in dense and (i + 1) % step == 0 for i in range(whole(hf, "num_hidden_layers"))]


def write_places(model: ModelConfig) -> dict[str, Any]:
    """Writes the settings that `read_places` reads."""
    # they count from the first block, we from the first that may have experts
    if model.first_dense % model.experts_every:
        return {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i in range(model.num_layers) if not model.has_experts(i)],
        }
    return {"decoder_sparse_step": model.experts_every, "mlp_only_layers": list(range(model.first_dense))}


def read_router(hf: dict[str, Any], experts: int, per_token: int) -> dict[str, Any]:
    """What Qwen3-MoE and OLMoE share, of which these are the defaults.

    Both choose behind a softmax over all experts.
    """
    return {
        "num_experts": number_of_experts(hf, experts),
        "experts_per_token": whole(hf, "num_experts_per_tok", per_token),
        "router_normalised": flag(hf, "norm_topk_prob", False),
    }


def number_of_experts(hf: dict[str, Any], default: int) -> int:
    """Releases of transformers call it one or the other, of each family."""
    return int(whole(hf, "num_experts" if "num_experts" in hf else "num_local_experts", default))


def write_router(model: ModelConfig) -> dict[str, Any]:
    """Writes the settings that `read_router` reads."""
    sizes = {"num_experts": model.num_experts, "num_experts_per_tok": model.experts_per_token}
    return sizes | {"norm_topk_prob": model.router_normalised}


def read_local_experts(hf: dict[str, Any], experts: int, per_token: int) -> dict[str, Any]:
    """What Mixtral and gpt-oss share, of which these are the defaults.

    Their weights are always normalised.
    """
    return {
        "num_experts": number_of_experts(hf, experts),
        "experts_per_token": whole(hf, "num_experts_per_tok", per_token),
        "expert_ffn_size": whole(hf, "intermediate_size"),
    }


def write_local_experts(model: ModelConfig) -> dict[str, Any]:
    """Writes the settings that `read_local_experts` reads, and the window, which both have."""
    return {
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "intermediate_size": model.expert_ffn_size,
        "sliding_window": model.window,
    }


def read_mixtral(hf: dict[str, Any]) -> dict[str, Any]:
    """See `Family.read`. Noise on the router's input (`router_jitter_noise`) is only in training."""
    own = read_local_experts(hf, 8, 2) | {"window": or_null(hf, "sliding_window", None, int)}
    return read_llama_like({"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5} | hf, **own)


def write_mixtral(config: Config) -> dict[str, Any]:
    """See `Family.write`."""
    return write_llama_like(config, "MixtralForCausalLM", "mixtral", **write_local_experts(config.model))


def read_olmoe(hf: dict[str, Any]) -> dict[str, Any]:
    """See `Family.read`."""
    require(hf, "clip_qkv", None, None)
    # its norms are of the hidden size
    require(hf, "head_dim", None, None, head_size_of(hf, "hidden_size", "num_attention_heads"))
    settings = (
        read_attention_bias(hf) | read_router(hf, 64, 8) | {"expert_ffn_size": whole(hf, "intermediate_size")}
    )
    return read_llama_like({"rms_norm_eps": 1e-5} | hf, qk_norm=True, qk_norm_heads="all", **settings)


def write_olmoe(config: Config) -> dict[str, Any]:
    """See `Family.write`."""
    keys = {
        "intermediate_size": config.model.expert_ffn_size,
        "clip_qkv": None,
        "attention_bias": config.model.qkv_bias,
        "pad_token_id": None,
    }
    written = write_llama_like(config, "OlmoeForCausalLM", "olmoe", **keys, **write_router(config.model))
    del written["head_dim"]
    return written


@dataclass(frozen=True)
class Names:
    """What a peer calls the parts of a mixture within a block."""

    mixture: str
    gate: str
    up: str
    down: str


QWEN, MIXTRAL = Names("mlp", "gate_proj", "up_proj", "down_proj"), Names("block_sparse_moe", "w1", "w3", "w2")


def expert_tensors(config: Config, names: Names) -> list[Mapped]:
    """A model with Llama's names, where experts have tensors of their own."""
    return with_experts(config, partial(apart, config, names))


def held_tensors(config: Config) -> list[Mapped]:
    """The same as transformers 5 holds it: a block's experts in one tensor, gates before ups.

    Names are Qwen's in every family.
    """
    return with_experts(config, partial(together, config))


def with_experts(config: Config, mixture: Callable[[str, str], list[Mapped]]) -> list[Mapped]:
    """A model with Llama's names; `mixture(ours, theirs)`: the tensors of a
    mixture, by the names of its block.
    """
    tensors = []
    for tensor in llama_tensors(config):
        block, _, own = tensor.name.partition(".feed_forward.")
        if not own or not config.model.has_experts(int(block.rpartition(".")[2])):
            tensors.append(tensor)
        elif own == "up.weight":
            tensors += mixture(f"{block}.feed_forward", block.replace("blocks", "model.layers"))
    return tensors


def shapes_of(config: Config) -> tuple[Shape, Shape, Shape]:
    """Of the logical weights of a router and of a block's experts, up and down."""
    model = config.model
    count, hidden, ffn = resolved(model.num_experts), model.hidden_size, resolved(model.expert_ffn_size)
    return (count, hidden), (count, 2, ffn, hidden), (count, hidden, ffn)


def apart(config: Config, names: Names, ours: str, theirs: str) -> list[Mapped]:
    """A mixture whose experts have tensors of their own."""
    (router, up, down), theirs = shapes_of(config), f"{theirs}.{names.mixture}"
    experts = [f"{theirs}.experts.{i}" for i in range(router[0])]
    gated = [f"{expert}.{part}.weight" for expert in experts for part in (names.gate, names.up)]
    return [
        renamed(f"{ours}.router.weight", router, f"{theirs}.gate.weight"),
        viewed(stacked(f"{ours}.experts.up", (len(gated), *up[2:]), gated), up),
        stacked(f"{ours}.experts.down", down, [f"{expert}.{names.down}.weight" for expert in experts]),
    ]


def together(config: Config, ours: str, theirs: str) -> list[Mapped]:
    """A mixture whose experts are in one tensor."""
    router, up, down = shapes_of(config)
    return [
        renamed(f"{ours}.router.weight", router, f"{theirs}.mlp.gate.weight"),
        viewed(
            renamed(f"{ours}.experts.up", (up[0], 2 * up[2], up[3]), f"{theirs}.mlp.experts.gate_up_proj"), up
        ),
        renamed(f"{ours}.experts.down", down, f"{theirs}.mlp.experts.down_proj"),
    ]


def viewed(tensor: Mapped, shape: Shape) -> Mapped:
    """The same where ours has another shape of as many elements."""

    def split(ours: Tensor) -> dict[str, Tensor]:
        return tensor.split(ours.reshape(tensor.shape))

    return Mapped(tensor.name, shape, tensor.peers, lambda theirs: tensor.join(theirs).reshape(shape), split)


qwen_tensors, mixtral_tensors = partial(expert_tensors, names=QWEN), partial(expert_tensors, names=MIXTRAL)
