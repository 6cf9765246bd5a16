"""Counts the floating-point operations of a model from its config.

Notation: h hidden size, f feed-forward size, s sequence length, V vocabulary, L layers, a = query heads ×
head size (usually h), k = key/value heads × head size.
A product of [m, k] by [k, n] is 2·m·n·k operations. All counts are per token unless they say otherwise.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import import_module

from megacore.config.implied import attention_of
from megacore.config.schema import Config, resolved

# Elementwise operations of embedding and loss. They matter only for splitting layers over stages.
EMBEDDING_OPS_PER_FEATURE = 2  # gather, add the position
LOSS_OPS_PER_LOGIT = 3  # subtract the maximum, exponentiate, sum


def attention_flops(config: Config, causal: bool) -> float:
    """Forward operations of scores and weighted values: 2·s·a each; half of both if only
    the causal triangle is counted.

    Grouping key/value heads changes neither, because every query head still meets s keys. What windows mask
    is not counted; it is the mean of all blocks.
    """
    return (
        4 * config.train.seq_len * attended_features(config) * (0.5 if causal else 1.0) * window_share(config)
    )


def attended_features(config: Config) -> float:
    """Features of all heads: the mean of keys' and values', which latent attention has of two sizes."""
    model = config.model
    own = config.attention_sizes[0]
    return (
        own
        if model.kv_rank is None
        else model.num_heads * (config.head_size + model.plain_size + model.value_size) / 2
    )


def projection_weights(config: Config) -> float:
    """Weights of attention's products with them in a block."""
    model, (a, k) = config.model, config.attention_sizes
    h, heads = model.hidden_size, model.num_heads
    if model.kv_rank is None:
        return h * (2 * a + 2 * k + {None: 0, "headwise": heads, "elementwise": a}[model.attention_gate])
    queries = heads * (config.head_size + model.plain_size)
    of_queries = h * queries if model.q_rank is None else model.q_rank * (h + queries)
    latent = h * (model.kv_rank + config.head_size) + model.kv_rank * heads * (
        model.plain_size + model.value_size
    )
    return of_queries + latent + heads * model.value_size * h


def window_share(config: Config) -> float:
    """Of the pairs of tokens that causal attention has, the part that windows leave, in the mean of
    all blocks; 1 without windows.
    """
    model, length = config.model, config.train.seq_len
    if model.window is None:
        return 1.0
    left = sum(seen_pairs(length, model.window_of(block)) for block in range(model.num_layers))
    return left / (model.num_layers * seen_pairs(length, None))


def seen_pairs(length: int, window: int | None) -> int:
    """Pairs of a token and one that it sees, in a text of so many tokens."""
    w = min(length, window or length)
    return w * (w + 1) // 2 + (length - w) * w


def block_flops(config: Config, causal: bool) -> float:
    """Forward operations of one transformer block.

    2·h·(a + 2k) for query, key and value, 2·a·h for the output projection, 2·h for each gate of attention (or
    what latents take, see `projection_weights`), 2·h·f for each of the two or, with a gate (swiglu), three
    feed-forward products, and `attention_flops`. Norms, activations and residuals are not products, and not
    counted. Of experts those that a token goes through count, and the router; then it is the mean of all
    blocks.
    """
    h = config.model.hidden_size
    f, routed = active_features(config)
    ffn_products = 3 if config.model.gated else 2
    return (
        2 * projection_weights(config)
        + 2 * h * routed
        + ffn_products * 2 * h * f
        + attention_flops(config, causal)
    )


def active_features(config: Config) -> tuple[float, float]:
    """Features of feed-forward layers that a token goes through, and experts that it is
    scored for: the mean of all blocks.
    """
    model = config.model
    dense, blocks = resolved(model.ffn_size), range(model.num_layers)
    if model.num_experts is None:
        return dense, 0
    share = sum(map(model.has_experts, blocks)) / len(blocks)
    active = (model.experts_per_token + model.shared_experts) * resolved(model.expert_ffn_size)
    return dense + share * (active - dense), share * model.num_experts


def head_flops(config: Config) -> float:
    """Forward operations of the LM head: 2·h·V, tied or not. (The embedding is a lookup and has none.)"""
    return 2 * config.model.hidden_size * config.model.vocab_size


def flops_per_token(config: Config, causal: bool, pairs: float = 1.0) -> float:
    """Model FLOPs of training on one token: 3 × (L blocks + LM head).

    Three, because the backward of a product is two products of the same size: one for the input's gradient,
    one for the weight's. Attention counts the whole s × s square, or with `causal` the half that a causal
    model needs. Recomputation and the optimizer are not counted (this is the numerator of MFU, not of HFU).
    With full recomputation
    and `causal=False` the blocks run 4 times instead of 3, and a batch of B sequences costs the published
    96·B·s·L·h²·(1 + s/6h + V/16Lh) (Narayanan et al. 2021).

    With `data.document_mask` attention needs only a part of the square: `pairs`, in which both tokens are of
    one document.
    """
    block = block_flops(config, causal) - (1 - pairs) * attention_flops(config, causal)
    return 3 * (config.model.num_layers * block + head_flops(config))


def document_attention_flops(config: Config, lengths: Iterable[int]) -> int:
    """Operations of attention in a step over documents of these lengths, with `data.document_mask`:
    forward and backward, all layers.

    A document of n tokens has n·(n+1)/2 pairs of a query and a key that it sees. A pair costs 4·a operations
    forward, and 8·a backward.
    """
    windows = Counter(config.model.window_of(block) for block in range(config.model.num_layers))
    pairs = sum(count * seen_pairs(n, window) for n in lengths for window, count in windows.items())
    return int(12 * attended_features(config) * pairs)


@dataclass(frozen=True)
class Flops:
    """Operations a token, forward and backward (recomputation is part of the backward), and how many of
    the backward's are for weights.
    """

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.forward + other.forward, self.backward + other.backward, self.weight + other.weight)

    def __mul__(self, count: float) -> "Flops":
        return Flops(self.forward * count, self.backward * count, self.weight * count)


def counted_layers(config: Config) -> tuple[Flops | None, ...] | None:
    """What each layer of a model of the user's own (`model.source`) executes, see `counting`.

    It runs layers, for which that file has imported torch already; without one nothing here does.
    """
    found: tuple[Flops | None, ...] | None = import_module("megacore.tools.choices.counting").counted_layers(
        config
    )
    return found


def model_flops(config: Config, causal: bool, pairs: float = 1.0) -> float | None:
    """`flops_per_token`, or for a model of the user's own three times its products.

    Then None if they cannot be counted, and with `causal` or a part of all `pairs`: nobody says which of its
    products are masked.
    """
    if not config.model.is_custom:
        return flops_per_token(config, causal, pairs)
    layers = None if causal or pairs != 1.0 else counted_layers(config)
    if layers is None:
        return None
    return 3 * (
        sum(layer.forward for layer in layers if layer is not None)
        + (head_flops(config) if layers[-1] is None else 0.0)
    )


def layer_cost(config: Config) -> Flops:
    """The operations that one block really executes, with recomputation.

    SDPA skips the masked half of attention.

    Of a model of the user's own: the mean of its layers. If they cannot be counted, stages are cut as if they
    were the GPT's.
    """
    if config.model.is_custom and (layers := counted_layers(config)) is not None:
        mean = sum((layer for layer in layers[1:-1] if layer is not None), Flops()) * (
            1 / config.model.num_layers
        )
        return replace(
            mean, backward=mean.backward + (mean.forward if config.train.recompute == "full" else 0.0)
        )
    sdpa = attention_of(config) == "sdpa"
    forward = block_flops(config, causal=sdpa)
    weight = forward - attention_flops(config, causal=sdpa)  # attention has no weights
    return Flops(forward, 2 * forward + recomputed_flops(config, causal=sdpa), weight)


def recomputed_flops(config: Config, causal: bool) -> float:
    """Forward operations that the backward of one block executes a second time, by `train.recompute`.

    PyTorch stops when it has recomputed what backward needs, so a product whose result is not kept is not
    repeated: with `full` the last product of the block (the published formulas count it), with `selective`
    attention's second product. SDPA keeps no scores, so `selective` repeats no product for it. What SDPA's
    own backward recomputes is not counted, as is usual.
    """
    model = config.model
    if config.train.recompute == "full":
        return block_flops(config, causal) - 2 * model.hidden_size * active_features(config)[0]
    if config.train.recompute == "selective" and attention_of(config) != "sdpa":
        return attention_flops(config, causal) / 2
    return 0.0


def embedding_cost(config: Config) -> Flops:
    """The cost of the embedding on the first stage: little elementwise work."""
    if (own := _own_end(config, 0)) is not None:
        return own
    work = float(EMBEDDING_OPS_PER_FEATURE * config.model.hidden_size)
    return Flops(work, work, work)


def head_cost(config: Config) -> Flops:
    """The cost of LM head and loss on the last stage. They are never recomputed."""
    if (own := _own_end(config, -1)) is not None:
        return own
    product, loss = head_flops(config), LOSS_OPS_PER_LOGIT * config.model.vocab_size
    return Flops(product + loss, 2 * product + loss, product)


def _own_end(config: Config, at: int) -> Flops | None:
    """What the first or last layer of the user's own executes; None if it is
    megacore's, or cannot be counted.
    """
    layers = counted_layers(config) if config.model.is_custom else None
    return None if layers is None else layers[at]
