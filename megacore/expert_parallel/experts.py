"""The experts' feed-forward layers: for each expert two products around an
activation, over the rows of its tokens.

Weights are ``[experts, …]``: split over `ep` along experts and over `etp` along features, so a rank has some
features of some experts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megacore.config import Config
from megacore.config.schema import resolved
from megacore.distributed.shard import LogicalMatrix, Shard, new_parameter, replicated, split
from megacore.distributed.topology import Topology
from megacore.kernels.dispatch import Implementation
from megacore.kernels.grouped_product import grouped_outer, grouped_product
from megacore.tensor_parallel.gradient import MainGradient, main_gradient_of


class Experts(nn.Module):
    """This rank's experts.

    Its results are parts of sums over `etp`. They are modules' only weights: an engine sums them by
    themselves.
    """

    def __init__(
        self,
        config: Config,
        mesh: Topology,
        dtype: torch.dtype,
        device: torch.device,
        output_std: float,
        activation: Callable[..., Tensor],
    ) -> None:
        super().__init__()
        model, ep, etp = config.model, mesh.group("ep"), mesh.group("etp")
        count, hidden, ffn = resolved(model.num_experts), model.hidden_size, resolved(model.expert_ffn_size)
        self.activation, self.recompute, self.kernels = (
            activation,
            config.train.recompute == "selective",
            model.kernels,
        )
        if model.gated:
            whole, each = slice(None), enumerate(("gate", "up"))
            matrices = tuple(
                LogicalMatrix(name, (whole, slice(at, at + 1)), (0, 1), (2,), (3,)) for at, name in each
            )
            up = Shard(
                (count, 2, ffn, hidden),
                (split(ep, 0), split(etp, 2)),
                True,
                model.init_std,
                matrices=matrices,
            )
        else:
            up = Shard(
                (count, ffn, hidden),
                (split(ep, 0), split(etp, 1)),
                True,
                model.init_std,
                matrices=(MATRICES,),
            )
        down = Shard(
            (count, hidden, ffn),
            (split(ep, 0), split(etp, 2)),
            True,
            output_std or None,
            matrices=(MATRICES,),
        )
        self.up, self.down = (new_parameter(shard, dtype, device) for shard in (up, down))
        self.sizes = up.local_shape[0], hidden, down.local_shape[2]
        self.up_bias = self.down_bias = None
        if model.bias:  # of parts of a sum over etp the first has the second one
            self.first = etp.rank == 0
            shards = (
                Shard(up.global_shape[:-1], up.along),
                Shard((count, hidden), (split(ep, 0), replicated(etp, partial=True))),
            )
            self.up_bias, self.down_bias = (new_parameter(shard, dtype, device) for shard in shards)

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Rows ``[rows, hidden]``, sorted by expert, of which each expert's end at `ends` → the same."""
        count, hidden, ffn = self.sizes
        h = grouped_linear(rows, self.up, (count, -1, hidden), ends, self.kernels)
        if self.up_bias is not None:
            h = _ExpertBias.apply(h, self.up_bias.flatten(1), ends, True, self.kernels)
        if self.recompute:
            y = grouped_linear(h, self.down, (count, hidden, ffn), ends, self.kernels, self.activation)
        else:
            y = grouped_linear(self.activation(h), self.down, (count, hidden, ffn), ends, self.kernels)
        return (
            y
            if self.down_bias is None
            else _ExpertBias.apply(y, self.down_bias, ends, self.first, self.kernels)
        )


MATRICES = LogicalMatrix("", batch=(0,), rows=(1,), columns=(2,))


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    shape: tuple[int, ...],
    ends: Tensor,
    kernels: Implementation = "auto",
    activation: Callable[..., Tensor] | None = None,
) -> Tensor:
    """``activation(x) · weightᵀ``, each expert's rows by its own weight; `shape`: ``[experts, out,
    in]``, which the weight is seen as.
    """
    return _GroupedLinear.apply(x, weight.view(shape), ends, main_gradient_of(weight), kernels, activation)


class _GroupedLinear(torch.autograd.Function):
    """A product of rows with the weights of their experts. R rows, E experts, I inputs, O outputs of a rank.

    forward      y [R, O] = activation(x) [R, I] · w[e]ᵀ [I, O]      of each row its expert's; saves x
    grad of x      [R, I] = gradient through activation of dy [R, O] · w[e] [O, I]
    grad of w   [E, O, I] = dyᵀ [O, R of e] · activation(x) [R of e, I]     of no rows: zero; with `main`,
        added to that, now or later
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        ends: Tensor,
        main: MainGradient | None,
        kernels: Implementation,
        activation: Any,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.main, ctx.kernels, ctx.activation = main, kernels, activation
        return grouped_product(
            x if activation is None else activation(x), weight, ends, implementation=kernels
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, ends = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_(ctx.activation is not None)
            inner = x if ctx.activation is None else ctx.activation(x)
        grad_x = grouped_product(grad, weight.mT, ends, implementation=ctx.kernels)
        if ctx.activation is not None:
            (grad_x,) = torch.autograd.grad(inner, x, grad_x)
        grad_weight = (
            grouped_gradient(grad, inner.detach(), ends, ctx.main, ctx.kernels)
            if ctx.needs_input_grad[1]
            else None
        )
        return grad_x, grad_weight, *([None] * 4)


class _ExpertBias(torch.autograd.Function):
    """Adds to each row the bias of its expert, in place, on a rank that `adds` it.

    forward      y [R, O] = x [R, O] + b[e]
    grad of b      [E, O] = sum of dy over the rows of e; zero on a rank that does not add it
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor, ends: Tensor, adds: bool, kernels: Implementation
    ) -> Tensor:
        ctx.save_for_backward(ends)
        ctx.adds, ctx.kernels, ctx.shape = adds, kernels, bias.shape
        ctx.mark_dirty(x)
        if adds:  # also to rows behind the last end, which weigh nothing
            experts = torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True).clamp_(
                max=len(bias) - 1
            )
            x += bias[experts]
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (ends,) = ctx.saved_tensors
        if not ctx.adds:
            return grad, grad.new_zeros(ctx.shape), None, None, None
        ones = grad.new_ones(len(grad), 1)
        return (
            grad,
            grouped_outer(grad, ones, ends, grad.dtype, implementation=ctx.kernels).squeeze(2),
            None,
            None,
            None,
        )


def grouped_gradient(
    grad: Tensor, x: Tensor, ends: Tensor, main: MainGradient | None, kernels: Implementation
) -> Tensor | None:
    """The gradient of the weights; None where the main gradient gets it, now or later."""
    if main is None:
        return grouped_outer(grad, x, ends, grad.dtype, implementation=kernels)

    def add(grad: Tensor, x: Tensor, ends: Tensor) -> None:
        main.add(grouped_outer(grad, x, ends, main.total.dtype, implementation=kernels).view_as(main.total))

    if main.waits:
        main.defer(add, grad, x, ends)
    else:
        add(grad, x, ends)
    return None
