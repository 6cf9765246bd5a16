"""Two column-parallel products of the same x: it is gathered once, and the sum over the tensor
ranks of its gradients is one too.
"""

from typing import Any

import torch
from torch import Tensor

from megacore.distributed.collectives import (
    Done,
    Work,
    all_gather,
    all_gather_start,
    all_reduce_start,
    reduce_scatter_start,
)
from megacore.distributed.communicator import SOLO, Group
from megacore.distributed.cpu import is_widened
from megacore.distributed.shard import Shard, new_parameter, split
from megacore.tensor_parallel.gradient import MainGradient, main_gradient_of
from megacore.tensor_parallel.linear import ColumnLinear, column_linear, linear, weight_gradient


class _JoinedLinear(torch.autograd.Function):
    """See `linear._ColumnLinear`, of which this is two: ``x · wᵀ + b`` and ``x · gᵀ``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gate: Tensor,
        group: Group,
        sequence: bool,
        mains: "Mains",
    ) -> tuple[Tensor, Tensor]:
        ctx.wanted = ctx.needs_input_grad[1], ctx.needs_input_grad[3]
        ctx.save_for_backward(x if any(ctx.wanted) else None, weight, gate)  # frozen weights need no x
        ctx.group, ctx.sequence, ctx.has_bias, ctx.mains = group, sequence, bias is not None, mains
        x = all_gather(x, group) if sequence else x
        return linear(x, weight, bias), linear(x, gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_gate: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate = ctx.saved_tensors
        gathering: Work = Done()
        to_gather = ctx.group if ctx.sequence else SOLO
        if any(ctx.wanted) and not both_wait(ctx.mains):
            (x, gathering), to_gather = all_gather_start(x, to_gather), SOLO
        grad_x = linear(grad, weight.t()).add_(linear(grad_gate, gate.t()))
        if ctx.sequence:
            grad_x, summing = reduce_scatter_start(grad_x, ctx.group)
        else:
            summing = all_reduce_start(grad_x, ctx.group)
        gathering.wait()
        of_weights = weight_gradients((grad, grad_gate), x, ctx.mains, ctx.wanted, to_gather)
        summing.wait()
        return grad_x, of_weights[0], grad.sum(0) if ctx.has_bias else None, of_weights[1], None, None, None


Mains = tuple[MainGradient | None, MainGradient | None]


def both_wait(mains: Mains) -> bool:
    """Whether the gradients of both weights are for later.

    That of one alone takes what is gathered for the other.
    """
    return all(main is not None and main.waits for main in mains)


def weight_gradients(
    grads: tuple[Tensor, Tensor], x: Tensor, mains: Mains, wanted: tuple[bool, bool], group: Group
) -> tuple[Tensor | None, ...]:
    """See `linear.weight_gradient`.

    If both are for later, x is gathered once then. `wanted`: a frozen weight has none.
    """
    first, second = mains
    if first is None or second is None or not both_wait(mains):
        return tuple(
            weight_gradient(g, x, main) if want else None
            for g, main, want in zip(grads, mains, wanted, strict=True)
        )

    def add_both(grad: Tensor, other: Tensor, x: Tensor) -> None:
        first.add_product(grad, x)
        second.add_product(other, x)

    first.defer(add_both, *grads, x, group=group, others=[second])
    return None, None


def gated(x: Tensor, gates: Tensor) -> Tensor:
    """``[tokens, features]``, multiplied by the sigmoid of its gates ``[tokens, gates]``:
    each of as many features in turn.
    """
    return (x.unflatten(1, (gates.shape[1], -1)) * gates.sigmoid()[..., None]).flatten(1)


class GatedColumnLinear(ColumnLinear):
    """A column-parallel layer with a second weight ``[gates, in]`` on the same x,
    whose rows tensor ranks divide.
    """

    def __init__(self, in_size: int, out_shape: tuple[int, ...], *, gates: int, **options: Any) -> None:
        super().__init__(in_size, out_shape, **options)
        shard = Shard((gates, in_size), (split(self.group, 0),), decay=True, init_std=options["init_std"])
        self.gate = new_parameter(shard, options["dtype"], options["device"])

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``[tokens, in]`` (with sequence parallelism this rank's tokens) → all tokens'
        local outputs, and their gates.
        """
        bias = None if self.bias is None else self.bias.flatten()
        mains = main_gradient_of(self.weight), main_gradient_of(self.gate)
        if torch.compiler.is_compiling() or (
            mains == (None, None) and self.group.size == 1 and not is_widened(x)
        ):
            where = self.group, self.sequence
            return column_linear(x, self.weight, bias, *where), column_linear(x, self.gate, None, *where)
        return _JoinedLinear.apply(
            x, self.weight.flatten(0, -2), bias, self.gate, self.group, self.sequence, mains
        )
