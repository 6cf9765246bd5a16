"""Cross entropy over logits whose vocabulary is split over the tensor ranks. Full logits never exist on one rank."""

from typing import Any

import torch
from torch import Tensor

from megacore.comm import all_gather
from megacore.mesh import Group

IGNORED = -100  # a target that is not counted: its loss and its gradient are zero


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """T tokens, V vocabulary rows of this rank, t ranks. Statistics in fp32 (fp64 for fp64 logits).

    forward      e [T, V]     = exp(logits − top), top [T, 1] being this rank's largest
                 lse [T, 1]   = log of the sum of exp(logits) over all ranks' rows     one all-gather of [T, 2] in all
                 loss [T]     = lse − logit of the target
    grad logits  [T, V]       = dloss · (e · exp(top − lse) − 1 at the target)         in e's memory

    `torch.softmax` would do the first line and normalise for nothing; on a CPU it also took three times as long.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Group, first_row: int) -> Tensor:
        statistics = torch.float64 if logits.dtype == torch.float64 else torch.float32
        counted = targets != IGNORED
        local = targets - first_row
        here = (local >= 0) & (local < logits.shape[1]) & counted
        local = local.masked_fill(~here, 0)[:, None]

        top = logits.amax(-1, keepdim=True).to(statistics)
        e = (logits - top).exp_()
        own_lse = top + e.sum(-1, keepdim=True).log()
        target_logit = logits.gather(1, local).to(statistics).masked_fill(~here[:, None], 0.0)
        both = all_gather(torch.cat((own_lse, target_logit), 1)[None], group)  # [t, T, 2]
        lse = torch.logsumexp(both[..., 0], 0)

        ctx.save_for_backward(e, local, here, counted, (top[:, 0] - lse).exp())
        ctx.dtype = logits.dtype
        return (lse - both[..., 1].sum(0)).masked_fill(~counted, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        e, local, here, counted, scale = ctx.saved_tensors
        grad = grad * counted
        e.mul_((grad * scale)[:, None])
        e.scatter_add_(1, local, (-grad * here)[:, None])
        return e.to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, group: Group, first_row: int) -> Tensor:
    """The loss of every token, ``[tokens]``, in nats, in fp32 (fp64 for fp64).

    `logits` ``[tokens, rows of this rank]``, `targets` ``[tokens]`` int64 over the whole vocabulary or `IGNORED`;
    `first_row` is this rank's first vocabulary row. Backward may run once only: it works in the saved memory.
    """
    return _VocabParallelCrossEntropy.apply(logits, targets, group, first_row)
