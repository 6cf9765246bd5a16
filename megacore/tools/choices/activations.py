"""Bytes of activations that a rank keeps of every forward until its backward.

They are counted tensor by tensor, and tests hold them against the real code's tensors, to the byte. Notation: T tokens of a microbatch
on a context rank, h hidden size, f feed-forward size, a features of all query heads, k of all key heads, e bytes of an element.
"""

from collections.abc import Sequence

from megacore.config.implied import attention_of
from megacore.config.precision import ELEMENT_BYTES
from megacore.config.schema import Config, resolved
from megacore.tools.choices.resolve_auto import context_method_of, fuses

FLASH_HEAD = 256  # features of the widest head that flash attention takes


def block_activations(config: Config, recompute: str) -> int:
    """Bytes that a rank keeps of one block and microbatch until its backward, with a mode of `train.recompute`.

    A token costs in tensors that all tensor ranks hold (or, with sequence parallelism, divide): 4·e·h for the inputs of both norms, of
    query-key-value and of up; one fp32 number for each norm's scale, and for a layernorm's mean. In tensors that they always divide:
    e·(a + 2k) for query, key and value; e·a for attention's output; an fp32 logarithm a head; e·f for what enters the activation, twice
    that for swiglu; e·f for what leaves it.

    Without fused kernels there are also 2·h for the masks of two dropouts, e·(a + k) for queries and keys before they are rotated, and
    e·f for swiglu's silu. Normed queries and keys are always kept before and behind the norm, with an fp32 number a head; where one
    kernel norms and rotates, values too are kept twice, and no number. Attention
    by the formula keeps s scores a head, and no logarithms; and query, key and value in its products' order alone, e·3a: each key and
    value once for every query head that shares it.

    Where context ranks are more than key/value heads, ulysses keeps each of these more than once.

    After Korthikanti et al. 2022: their 34·s·b·h/t is for a gelu model with learned positions, f = 4h, bf16 and dropout, whose norms'
    statistics and attention's logarithms are left out. `selective` leaves out the scores and what follows up; `full` keeps only the
    block's input, e·h.
    """
    model, train, (a, k) = config.model, config.train, config.attention_sizes
    h, f, e, tokens, fused = model.hidden_size, resolved(model.ffn_size), ELEMENT_BYTES[train.precision], config.rank_tokens, fuses(config)
    if recompute == "full":
        return unsplit_part(config, e * h * tokens)
    swiglu, wide = model.activation == "swiglu", max(4, e)
    at_once = fused and model.position == "rope" and config.engine.kind != "deepspeed"  # normed and rotated by one kernel
    unsplit = 4 * e * h + 2 * wide * (1 if model.norm == "rmsnorm" else 2) + (2 * h if model.dropout and not fused else 0)
    if (sdpa := attention_of(config) == "sdpa") or recompute != "none":
        split = e * (2 * a + 2 * k) + (4 * model.num_heads if sdpa else 0)
        if model.qk_norm and at_once:
            split += e * (a + 2 * k)
        elif model.qk_norm:
            split += e * (a + k) + (e * a if fused and model.num_heads > config.kv_heads else 0)  # a kernel copies heads that lie apart
        elif model.position == "rope" and not fused:
            split += e * (a + k)
        if sdpa and train.device != "cpu" and train.precision != "fp64" and not flash(config):
            split += 2 * e * (a - k)  # it takes each key and value once for every query head
    else:
        split = e * (4 * a + model.num_heads * train.seq_len) + (e * (a + 2 * k) if model.qk_norm else 0)
    split += wide * (model.num_heads + config.kv_heads) if model.qk_norm and not at_once else 0
    if (c := config.parallel.context) > 1 and context_method_of(config) == "ulysses":
        split += e * 2 * k * (max(1, c * config.parallel.tensor // config.kv_heads) - 1)
    split += e * f * (2 if swiglu else 1)
    if recompute == "none":
        split += e * f * (2 if swiglu and not fused else 1)
    return unsplit_part(config, unsplit * tokens) + split * tokens // config.parallel.tensor + (_random_state(config) if sdpa else 0)


def _random_state(config: Config) -> int:
    """Bytes of the state of dropout that PyTorch's attention keeps on a GPU, used or not."""
    if config.train.device == "cpu" or config.train.precision == "fp64":
        return 0
    return 24 if flash(config) else 16


def flash(config: Config) -> bool:
    """Whether PyTorch's attention takes its flash kernel on a GPU; else the one for any dtype."""
    return config.train.precision in ("bf16", "fp16") and config.head_size <= FLASH_HEAD


def stage_kept(config: Config, stages: Sequence[range]) -> list[float]:
    """Bytes that each stage (its layers) keeps of a microbatch until its backward, without the logits."""
    model, tokens, e = config.model, config.rank_tokens, ELEMENT_BYTES[config.train.precision]
    block, wide = block_activations(config, config.train.recompute), max(4, e)
    kept = [float(len(own) * block) for own in stages]
    if config.parallel.tensor > 1:
        kept[0] += 9 * tokens  # rows of the table as int64, and which of them are another rank's
    if model.dropout and not fuses(config):
        kept[0] += unsplit_part(config, tokens * model.hidden_size)
    # Input and statistics of the final norm, and the head's input if its product is not in chunks.
    statistics = wide * (1 if model.norm == "rmsnorm" else 2)
    kept[-1] += unsplit_part(config, ((1 if model.chunked_loss else 2) * e * model.hidden_size + statistics) * tokens)
    return kept


def logits_kept(config: Config) -> int:
    """Bytes that the last stage keeps of a microbatch's logits, over which forward writes their gradient.

    With a chunked loss: the gradients of hidden states and head, which forward computes.
    """
    model, tokens, e = config.model, config.rank_tokens, ELEMENT_BYTES[config.train.precision]
    rows, wide = vocabulary_rows(config), max(4, e)
    if model.chunked_loss:
        return e * tokens * model.hidden_size + wide * rows * model.hidden_size
    return e * rows * tokens


def stage_sizes(config: Config, stages: Sequence[range]) -> list[float]:
    """Bytes that each stage (its layers) keeps of a microbatch until its backward, with the logits."""
    return [*(kept := stage_kept(config, stages))[:-1], kept[-1] + logits_kept(config)]


def vocabulary_rows(config: Config) -> int:
    """Rows of the vocabulary on the fullest tensor rank."""
    return -(-config.model.vocab_size // config.parallel.tensor)


def stage_waiting(config: Config, stages: Sequence[range]) -> list[float]:
    """Bytes that a stage (its layers) keeps of a microbatch between the two parts of a split backward: of each product the input, and
    the output's gradient.

    With recomputation it may be more than before the backward. Of the gradients only those of qkv and up are divided among tensor ranks.
    """
    model, (a, k), e = config.model, config.attention_sizes, ELEMENT_BYTES[config.train.precision]
    h, f, tokens = model.hidden_size, resolved(model.ffn_size), config.rank_tokens
    divided = 2 * a + 2 * k + f * (3 if model.activation == "swiglu" else 2)
    block = e * (unsplit_part(config, 2 * h * tokens) + 2 * h * tokens + divided * tokens // config.parallel.tensor)
    waiting = [float(len(layers) * block) for layers in stages]
    waiting[0] += e * h * tokens
    if not model.chunked_loss:  # else head and hidden states have their gradients before backward
        waiting[-1] += e * tokens * (h + vocabulary_rows(config))
    return waiting


def unsplit_part(config: Config, size: int) -> int:
    """The part of an activation outside tensor-parallel regions that a rank holds: all of it, or its own tokens."""
    return -(-size // config.parallel.tensor) if config.parallel.sequence else size
