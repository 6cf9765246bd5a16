"""The vocabulary-parallel embedding: each tensor rank holds the rows of some tokens."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.distributed.collectives import leave_tensor_parallel
from megacore.distributed.communicator import Group
from megacore.distributed.shard import Shard, new_parameter, split
from megacore.kernels.dispatch import Implementation
from megacore.tensor_parallel.gradient import MainGradient, main_gradient_of


class _Lookup(torch.autograd.Function):
    """Rows of a table, whose gradient goes to `main`. T tokens, V rows, F features.

    forward          y [T, F] = weight [V, F] at rows [T]
    grad of weight     [V, F] = sums of dy [T, F] by row, added to `main`
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, rows: Tensor, main: MainGradient, kernels: Implementation
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.main, ctx.kernels = main, kernels
        return F.embedding(rows, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        (rows,) = ctx.saved_tensors
        add_rows = partial(ctx.main.add_rows, implementation=ctx.kernels)
        if ctx.main.waits:
            ctx.main.defer(add_rows, grad, rows)
        else:
            add_rows(grad, rows)
        return None, None, None, None


def look_up(weight: Tensor, rows: Tensor, kernels: Implementation = "auto") -> Tensor:
    """`weight` ``[V, F]`` at `rows` ``[T]`` → ``[T, F]``; `kernels` sum the gradient."""
    main = main_gradient_of(weight)
    return F.embedding(rows, weight) if main is None else _Lookup.apply(weight, rows, main, kernels)


def vocab_parallel_look_up(
    weight: Tensor,
    tokens: Tensor,
    first_row: int,
    group: Group,
    sequence: bool,
    kernels: Implementation = "auto",
) -> Tensor:
    """`tokens` ``[tokens]`` int64 → their vectors ``[tokens, hidden]`` (with `sequence` this rank's tokens).

    `weight`: this rank's rows of the table, from `first_row` on.
    """
    if group.size == 1:
        return look_up(weight, tokens, kernels)
    local = tokens - first_row
    elsewhere = (local < 0) | (local >= weight.shape[0])
    vectors = look_up(weight, local.masked_fill(elsewhere, 0), kernels)
    part = vectors.masked_fill(elsewhere[:, None], 0.0)
    return leave_tensor_parallel(part, group, sequence)


class VocabParallelEmbedding(nn.Module):
    """Token vectors ``[vocab, hidden]``, split along the vocabulary into pieces of ``ceil(vocab / ranks)``.

    The last rank's piece may be shorter. Nothing is padded, because no collective moves vocabulary rows.
    If embeddings are tied, the weight is also the LM head.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        init_std: float,
        group: Group,
        sequence: bool,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Implementation = "auto",
    ) -> None:
        super().__init__()
        self.group, self.sequence, self.kernels = group, sequence, kernels
        shard = Shard(
            (vocab_size, hidden_size), (split(group, 0),), decay=True, init_std=init_std, table=True
        )
        self.first_row = shard.offset[0]
        self.weight = new_parameter(shard, dtype, device)
        self.bias: nn.Parameter | None = None  # of logits, if it is a head that has one

    def forward(self, tokens: Tensor) -> Tensor:
        """`tokens` ``[tokens]`` int64 → ``[tokens, hidden]`` (with sequence parallelism
        this rank's tokens).
        """
        return vocab_parallel_look_up(
            self.weight, tokens, self.first_row, self.group, self.sequence, self.kernels
        )
