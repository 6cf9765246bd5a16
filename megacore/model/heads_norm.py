"""A norm of queries and keys over all heads together, which tensor ranks divide (OLMo 2)."""

from typing import Any

import torch
from torch import Tensor, nn

from megacore.config.schema import Config
from megacore.distributed.collectives import all_reduced
from megacore.distributed.communicator import Group
from megacore.distributed.shard import Shard, new_parameter, split
from megacore.model.norm import plus_one


class _Summed(torch.autograd.Function):
    """The sum over the ranks, which each of them uses for other features: so its
    gradient is a sum over the ranks too.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_reduced(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduced(grad, ctx.group), None


class AllHeadsNorm(nn.Module):
    """RMS norms of a token's queries and of its keys, each over the features of all heads,
    with a weight for each feature.

    A tensor rank norms its own heads. Sums of squares go over the ranks: two numbers a token, in one message.
    """

    def __init__(self, config: Config, group: Group, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.group, self.eps, self.offset, self.sizes = (
            group,
            config.model.norm_eps,
            config.model.norm_offset,
            config.attention_sizes,
        )
        fill = 0.0 if self.offset else 1.0
        self.query, self.key = (
            new_parameter(Shard((n,), (split(group, 0),), fill=fill), dtype, device) for n in self.sizes
        )

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """``[…, heads of this rank, head]`` → the same shapes."""
        wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k)]
        squares = torch.stack([x.square().sum((-2, -1)) for x in wide])
        if self.group.size > 1:
            squares = _Summed.apply(squares, self.group)
        weights = (plus_one(weight) if self.offset else weight for weight in (self.query, self.key))
        found = (
            x * torch.rsqrt(square / n + self.eps)[..., None, None] * weight.view(x.shape[-2:])
            for x, square, n, weight in zip(wide, squares, self.sizes, weights, strict=True)
        )
        q, k = (x.to(q.dtype) for x in found)
        return q, k
