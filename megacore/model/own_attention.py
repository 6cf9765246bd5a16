"""For an attention of one's own, in every layout: rotary positions, the keys and values of other
tokens, and which a token sees.
"""

import torch
from torch import Tensor, nn

from megacore.context_parallel.whole import distances, whole
from megacore.kernels.rope import rope
from megacore.model.context import Context


def rotated(x: Tensor, context: Context) -> Tensor:
    """Queries or keys ``[batch, heads, tokens, head]``, turned by their tokens'
    positions if `model.position` is rope.
    """
    if context.rope is None:
        return x
    if context.sequences is None or context.sequences.documents is None:
        return rope(x, *context.rope, implementation=context.kernels)
    rows = x.transpose(0, 1).flatten(1, 2)[None]  # positions differ between sequences
    return (
        rope(rows, *context.rope, implementation=context.kernels)[0]
        .unflatten(1, (x.shape[0], x.shape[2]))
        .transpose(0, 1)
    )


def keys_and_values(
    layer: nn.Module, k: Tensor, v: Tensor, context: Context
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's keys and values ``[batch, heads, tokens, head]`` → those of all tokens, and how far each of
    this rank's tokens stands behind each of them, ``[batch or 1, 1, tokens, all tokens]``. Below 0 it must
    not see it: the token is ahead, or in another document.

    Context ranks give theirs (collective). When text is generated, `layer` keeps them for the tokens to come.
    """
    if context.cache is None and context.sequences is not None:
        k, v = (whole(x, context.sequences) for x in (k, v))
        return k, v, distances(context.sequences, k.device)
    if context.cache is not None:
        k, v = context.cache.extend(layer, k, v)
    every = torch.arange(k.shape[2], device=k.device)
    return k, v, (every[context.start : context.start + context.seq_len, None] - every)[None, None]
