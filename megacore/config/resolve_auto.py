"""What a setting's `auto` stands for, by device, precision and sizes. A run asks once, before its first step (`settled`).

The rules are measured; docs/performance.md has the figures and the commands.
"""

import os
from typing import Any, Literal

from megacore.config.context_method import DEVICE, METHODS, Divided, Method, fastest, rates
from megacore.config.precision import ELEMENT_BYTES
from megacore.config.schema import MASK, Config
from megacore.config.validation import unexchanged

# Tokens of the longest sequence for which the formula is faster on a CPU than PyTorch's kernel, which holds no scores.
# Not in fp64: the proof's reference is the formula, and would be compared with itself.
LONGEST_EAGER = {"fp32": 512, "fp16": 512, "bf16": 1024}
SHORTEST_CHUNK, CHUNK_ON_CPU, TILE = 1024, 128, 64  # tokens of a chunked loss, as `kernels.linear_cross_entropy` divides them
MOST_SCORES = 16  # tokens a feature of a head: then the softmax takes as much memory as all else that a block keeps


def attention_of(config: Config, device: str | None = None) -> Literal["sdpa", "fused", "eager"]:
    """How attention is computed on this type of device: `model.attention`, or what its `auto` chooses.

    Without a device: on the one that a prediction is for, which is a GPU unless the config names the CPU.
    """
    model, train = config.model, config.train
    if model.attention != "auto":
        return model.attention
    if attends_in_parts(config):
        return "sdpa"
    longest = min(LONGEST_EAGER.get(train.precision, 0), MOST_SCORES * config.head_size)
    return "eager" if (device or train.device) == "cpu" and train.seq_len <= longest else "sdpa"


def attends_in_parts(config: Config) -> bool:
    """Whether attention is computed in parts, by `context_parallel`, which no other kind of attention can do."""
    return config.data.document_mask or config.parallel.context > 1


def masks_targets(config: Config) -> bool:
    """Whether some targets are not learned, so that ranks count in every step how many are: at documents' ends, in padding, by a mask."""
    return config.data.document_mask or config.data.packing == "best_fit" or has_masks(config)


def has_masks(config: Config) -> bool:
    """Whether a training corpus comes with a mask, which says which of its tokens are learned."""
    corpora = config.data.train or []
    prefixes = [corpora] if isinstance(corpora, str) else [prefix for _, prefix in corpora]
    return any(os.path.lexists(prefix + MASK) for prefix in prefixes)


def splits_backward(config: Config) -> bool:
    """Whether backwards can be split; else a schedule that splits them runs, and is simulated, with whole ones."""
    return why_whole(config) is None


def why_whole(config: Config) -> str | None:
    """Who does not split backwards, if that is so, in a few words.

    FSDP and DeepSpeed take gradients from autograd, all of a layer's at once. A compiled block's backward is one graph.
    Without a pipeline nobody waits for the first half, and until the second a rank would hold what both products need.
    """
    if compiles(config):
        return "a compiled block does not split"
    if config.engine.kind == "deepspeed" or (config.engine.kind == "fsdp" and config.token_ranks > 1):
        return f"the {config.engine.kind} engine does not split"
    return "one rank has no reason to split" if config.parallel.pipeline == 1 else None


def one_chunk(config: Config) -> bool:
    """Whether a rank can hold one chunk of the model only: DeepSpeed wraps one module."""
    return config.engine.kind == "deepspeed"


def ends_apart(config: Config) -> bool:
    """Whether no rank may hold both ends of the model: FSDP cannot divide an embedding that two chunks of a rank share."""
    return config.engine.kind == "fsdp" and config.token_ranks > 1 and config.model.tie_embeddings


def context_method_of(config: Config, device: str | None = None) -> Method:
    """How context ranks attend: `parallel.context_method`, or what its `auto` chooses: the fastest by an estimate for a device.

    The device is `cpu` or a GPU's name; without one it is that of `attention_of`.
    """
    method, t, train = config.parallel.context_method, config.parallel.tensor, config.train
    if method != "auto":
        return method
    heads, kv_heads, element = config.model.num_heads // t, config.kv_heads // t, ELEMENT_BYTES[train.precision]
    sizes = train.seq_len, heads, kv_heads, config.head_size
    own = Divided(config.parallel.context, t, config.rank_tokens, *sizes, element)
    found = rates(device or ("cpu" if train.device == "cpu" else DEVICE), train.precision)
    return fastest(own, found, again=train.recompute == "full", exchanges=unexchanged(config) is None)


def settled(config: Config, device: str, name: str, before: dict[str, Any] | None = None) -> dict[str, str]:
    """What a run's `auto` stands for on a device, its type and its name, by dotted key: for attention, and how context ranks attend.

    `before`: the recorded sections of the run that goes on; what it chose is kept where the other settings allow it.
    """
    found = dict[str, str]()
    if config.model.attention == "auto":
        kept = _recorded(before, "model", "attention")
        possible = ("sdpa",) if attends_in_parts(config) else ("sdpa", "eager")
        found["model.attention"] = kept if kept in possible else attention_of(config, device)
    if config.parallel.context_method == "auto" and config.parallel.context > 1:
        kept = _recorded(before, "parallel", "context_method")
        methods = [method for method in METHODS if method != "ulysses" or unexchanged(config) is None]
        found["parallel.context_method"] = kept if kept in methods else context_method_of(config, "cpu" if device == "cpu" else name)
    return found


def _recorded(sections: dict[str, Any] | None, section: str, key: str) -> Any:
    """A value of recorded sections, which may be any JSON; None without one."""
    own = (sections or {}).get(section)
    return own.get(key) if isinstance(own, dict) else None


def loss_chunk(config: Config) -> int:
    """Tokens whose logits a chunked loss makes at a time: a quarter of a microbatch's, though no fewer than make long products."""
    quarter = -(-config.rank_tokens // (4 * TILE)) * TILE
    return max(quarter, CHUNK_ON_CPU if config.train.device == "cpu" else SHORTEST_CHUNK)


def fuses(config: Config) -> bool:
    """Whether the model runs its own fused kernels on the device that a prediction is for: `model.kernels`, or what its `auto` chooses."""
    kernels, train = config.model.kernels, config.train
    return kernels == "triton" or (kernels == "auto" and train.device != "cpu" and train.precision != "fp64" and not compiles(config))


def compiles(config: Config) -> bool:
    """Whether blocks are compiled. A run settles what `train.compile=auto` stands for (`train.compiling`); here it stands for no."""
    return config.train.compile is True


def reshards(config: Config) -> bool:
    """Whether a block's parameters are gathered anew for each forward and backward: `engine.reshard`, or what its `auto` chooses."""
    return config.parallel.pipeline == 1 if config.engine.reshard is None else config.engine.reshard
