"""What follows from several settings together: how attention is computed, whether
backwards split, what is masked.
"""

import os
from fractions import Fraction
from math import gcd
from typing import Literal

from megacore.config.schema import MASK, Config, resolved

# Tokens of the longest sequence for which the formula is faster on a CPU than PyTorch's kernel, which holds
# no scores. Not in fp64: the proof's reference is the formula, and would be compared with itself.
LONGEST_EAGER = {"fp32": 512, "fp16": 512, "bf16": 1024}
# tokens a feature of a head: then the softmax takes as much memory as all else that a block keeps
MOST_SCORES = 16


def attention_of(config: Config, device: str | None = None) -> Literal["sdpa", "fused", "eager"]:
    """How attention is computed on this type of device: `model.attention`, or what its `auto` chooses.

    A run asks once, and records it.

    The rule is measured (benchmarks/results/performance_attention.md).
    Without a device: on the one that a prediction is for, which is a GPU unless the config names the CPU.
    """
    model, train = config.model, config.train
    if model.attention != "auto":
        return model.attention
    if attends_in_parts(config):
        return "sdpa"
    longest = min(LONGEST_EAGER.get(train.precision, 0), MOST_SCORES * config.attended_size)
    return "eager" if (device or train.device) == "cpu" and train.seq_len <= longest else "sdpa"


def attends_in_parts(config: Config) -> bool:
    """Whether attention is computed in parts, by `context_parallel`, which no other
    kind of attention can do.
    """
    return config.data.document_mask or config.parallel.context > 1 or scores_otherwise(config)


def scores_otherwise(config: Config) -> bool:
    """Whether attention's scores have a cap, or a window, or their softmax sinks."""
    model = config.model
    return model.window is not None or model.attention_cap is not None or model.attention_sinks


def masks_targets(config: Config) -> bool:
    """Whether some targets are not learned, so that ranks count in every step how many are: at
    documents' ends, in padding, by a mask.
    """
    return config.data.document_mask or config.data.packing == "best_fit" or has_masks(config)


def has_masks(config: Config) -> bool:
    """Whether a training corpus comes with a mask, which says which of its tokens are learned."""
    corpora = config.data.train or []
    prefixes = [corpora] if isinstance(corpora, str) else [prefix for _, prefix in corpora]
    return any(os.path.lexists(prefix + MASK) for prefix in prefixes)


def splits_backward(config: Config) -> bool:
    """Whether backwards can be split; else a schedule that splits them runs, and
    is simulated, with whole ones.
    """
    return why_whole(config) is None


def why_whole(config: Config) -> str | None:
    """Who does not split backwards, if that is so, in a few words.

    FSDP and DeepSpeed take gradients from autograd, all of a layer's at once. A compiled block's backward is
    one graph. Without a pipeline nobody waits for the first half, and until the second a rank would hold what
    both products need.
    """
    if compiles(config):
        return "a compiled block does not split"
    if config.engine.kind == "deepspeed" or (config.engine.kind == "fsdp" and config.token_ranks > 1):
        return f"the {config.engine.kind} engine does not split"
    return "one rank has no reason to split" if config.parallel.pipeline == 1 else None


def ends_apart(config: Config) -> bool:
    """Whether no rank may hold both ends of the model: FSDP cannot divide an embedding
    that two chunks of a rank share.
    """
    return config.engine.kind == "fsdp" and config.token_ranks > 1 and config.model.tie_embeddings


def settled_context_method(config: Config) -> str:
    """How context ranks attend; without any, nothing depends on it.

    Raises `RuntimeError` if nobody has chosen.
    """
    method = config.parallel.context_method
    if method == "auto" and config.parallel.context > 1:
        raise RuntimeError("parallel.context_method stands on auto: megacore.tools.choices settles it")
    return "gather" if method == "auto" else method


def compiles(config: Config) -> bool:
    """Whether blocks are compiled.

    A run settles `train.compile=auto` (`tools.choices.compiling`); here it stands for no.
    """
    return config.train.compile is True


def reshards(config: Config) -> bool:
    """Whether a block's parameters are gathered anew for each forward and backward:
    `engine.reshard`, or what its `auto` chooses.
    """
    return config.parallel.pipeline == 1 if config.engine.reshard is None else config.engine.reshard


def heads_at(config: Config, width: int, head_size: int) -> Fraction:
    """How many heads of this size the model would have at another width; a whole
    number, or there is no such model.
    """
    return Fraction(config.attention_sizes[0] * width, config.model.hidden_size * head_size)


def sizes_at(config: Config, width: int, head_size: int) -> dict[str, int]:
    """The settings of `model` at another width, where everything else is in proportion to it."""
    model, heads = config.model, int(heads_at(config, width, head_size))
    kv_heads = gcd(heads, max(1, config.kv_heads * heads // model.num_heads))
    ffn_size = max(1, round(Fraction(resolved(model.ffn_size) * width, model.hidden_size)))
    return {
        "hidden_size": width,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_size": head_size,
        "ffn_size": ffn_size,
    }


def base_of(config: Config) -> Config:
    """A mup config at `model.base_width`.

    Which dims of a parameter grow with the width is what differs between the two models.
    """
    model = config.model
    sizes = sizes_at(config, resolved(model.base_width), model.base_head_size or config.head_size)
    return config.model_copy(
        update={"model": model.model_copy(update={"parametrization": "standard", **sizes})}
    )


def check_settled(config: Config) -> None:
    """Raises `RuntimeError` if a run would begin with a choice that nobody has made."""
    choices: dict[str, object] = {
        "model.attention": config.model.attention,
        "train.compile": config.train.compile,
    }
    if config.parallel.context > 1:
        choices["parallel.context_method"] = config.parallel.context_method
    if still := [key for key, value in choices.items() if value == "auto"]:
        raise RuntimeError(
            f"{' and '.join(still)} on auto: a run's config must be settled, as "
            "megacore.tools.choices.run.trainer_of does"
        )
