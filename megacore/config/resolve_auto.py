"""What a setting's `auto` stands for, by device, precision and sizes alone: every layout of a model chooses alike.

The rules are measured; docs/performance.md has the figures and the commands.
"""

import os
from typing import Literal

from megacore.config.precision import ELEMENT_BYTES
from megacore.config.schema import MASK, Config
from megacore.config.validation import unexchanged
from megacore.tools.planner.context_time import Divided, Method, chosen

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
    if config.data.document_mask or config.parallel.context > 1:
        return "sdpa"  # in parts
    longest = min(LONGEST_EAGER.get(train.precision, 0), MOST_SCORES * config.head_size)
    return "eager" if (device or train.device) == "cpu" and train.seq_len <= longest else "sdpa"


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


def context_method_of(config: Config) -> Method:
    """How context ranks attend: `parallel.context_method`, or what its `auto` chooses.

    That is the fastest by the planner's estimate, for the device and links that `launch/plan.py --search` takes by default, or for a CPU.
    """
    method, t, train = config.parallel.context_method, config.parallel.tensor, config.train
    if method != "auto":
        return method
    heads, kv_heads, element = config.model.num_heads // t, config.kv_heads // t, ELEMENT_BYTES[train.precision]
    sizes = train.seq_len, heads, kv_heads, config.head_size
    own = Divided(config.parallel.context, t, config.rank_tokens, *sizes, train.precision, element)
    exchanges = unexchanged(config) is None
    return chosen(own, on_cpu=train.device == "cpu", again=train.recompute == "full", exchanges=exchanges)


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
