"""For an attention of one's own: what context ranks hold of other tokens, and which tokens see which.

The ways of `attention.py` compute plain causal attention, a part of the scores at a time. Whatever else a
layer does with keys and values gets them here from all context ranks, at the cost of `gather`, and computes
all of its own tokens' scores.
"""

from typing import Any

import torch
from torch import Tensor

from megacore.context_parallel.attention import Sequences, by_rank, in_order
from megacore.context_parallel.sharding import Documents, positions_of
from megacore.distributed.collectives import all_gather, enter_tensor_parallel, reduce_scatter


def whole(x: Tensor, sequences: Sequences) -> Tensor:
    """``[batch, heads, tokens of this rank, …]`` → of all tokens, in the order of the sequence.

    Differentiable; collective.
    """
    return x if sequences.group.size == 1 else Whole.apply(x, sequences)


def runs_in_order(x: Tensor, sequences: Sequences) -> list[Tensor]:
    """What each rank says of each of its runs (`Sequences.own`), ``[runs, …]`` → of all
    runs, in the order of the sequence.

    So a recurrence finds what stands before each run, and no rank waits for another's. Differentiable;
    collective.
    """
    starts = [run.start for runs in sequences.by_rank for run in runs]
    every = enter_tensor_parallel(x, sequences.group, True)
    return [every[i] for i in sorted(range(len(starts)), key=starts.__getitem__)]


class Whole(torch.autograd.Function):
    """`whole`: in backward, each rank's gradients of a token are summed on the rank that holds it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sequences: Sequences) -> Tensor:
        ctx.sequences = sequences
        return in_order(
            all_gather(x.transpose(1, 2)[None].contiguous(), sequences.group), sequences
        ).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        parts = by_rank(grad.transpose(1, 2), ctx.sequences).contiguous()
        return reduce_scatter(parts, ctx.sequences.group)[0].transpose(1, 2), None


def distances(sequences: Sequences, device: torch.device) -> Tensor:
    """How many tokens each of this rank's stands behind each of the sequence, ``[batch or 1, 1,
    tokens of this rank, tokens]``.

    Below 0 it does not see it: the token is ahead, or in another document.
    """
    every = torch.arange(sequences.seq_len, device=device)
    own = torch.from_numpy(positions_of(sequences.own)).to(device)
    behind = (own[:, None] - every)[None, None]
    if sequences.documents is None:
        return behind
    number = document_numbers(sequences.documents, device)
    together = number[:, own, None] == number[:, None, :]
    return behind.where(together[:, None], -1)


def document_numbers(documents: Documents, device: torch.device) -> Tensor:
    """The number of each token's document in its sequence, int64 ``[batch, seq]``."""
    starts = torch.zeros(len(documents), documents[0][-1], dtype=torch.int64)
    for row, bounds in zip(starts, documents, strict=True):
        row[list(bounds[:-1])] = 1
    return starts.cumsum(1).to(device)
