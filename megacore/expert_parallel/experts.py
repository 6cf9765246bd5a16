"""The experts' feed-forward layers: for each expert two products around an activation, over the rows of its tokens.

Weights are ``[experts, …]``: split over `ep` along experts and over `etp` along features, so a rank has some features of some experts.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megacore.config import Config
from megacore.config.schema import resolved
from megacore.distributed.cpu import is_widened
from megacore.distributed.shard import LogicalMatrix, Shard, new_parameter, split
from megacore.distributed.topology import Topology
from megacore.tensor_parallel.gradient import MainGradient, main_gradient_of
from megacore.tensor_parallel.linear import linear


class Experts(nn.Module):
    """This rank's experts. Its results are parts of sums over `etp`. They are modules' only weights: an engine sums them by themselves."""

    def __init__(
        self, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device, output_std: float, activation: Callable[..., Tensor]
    ) -> None:
        super().__init__()
        model, ep, etp = config.model, mesh.group("ep"), mesh.group("etp")
        count, hidden, ffn = resolved(model.num_experts), model.hidden_size, resolved(model.expert_ffn_size)
        self.activation, self.recompute = activation, config.train.recompute == "selective"
        if model.gated:
            whole, each = slice(None), enumerate(("gate", "up"))
            matrices = tuple(LogicalMatrix(name, (whole, slice(at, at + 1)), (0, 1), (2,), (3,)) for at, name in each)
            up = Shard((count, 2, ffn, hidden), (split(ep, 0), split(etp, 2)), True, model.init_std, matrices=matrices)
        else:
            up = Shard((count, ffn, hidden), (split(ep, 0), split(etp, 1)), True, model.init_std, matrices=(MATRICES,))
        down = Shard((count, hidden, ffn), (split(ep, 0), split(etp, 2)), True, output_std or None, matrices=(MATRICES,))
        self.up, self.down = (new_parameter(shard, dtype, device) for shard in (up, down))
        self.sizes = up.local_shape[0], hidden, down.local_shape[2]

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Rows ``[rows, hidden]``, sorted by expert, of which each expert's end at `ends` → the same."""
        count, hidden, ffn = self.sizes
        h = grouped_linear(rows, self.up, (count, -1, hidden), ends)
        if self.recompute:
            return grouped_linear(h, self.down, (count, hidden, ffn), ends, self.activation)
        return grouped_linear(self.activation(h), self.down, (count, hidden, ffn), ends)


MATRICES = LogicalMatrix("", batch=(0,), rows=(1,), columns=(2,))


def grouped_linear(
    x: Tensor, weight: Tensor, shape: tuple[int, ...], ends: Tensor, activation: Callable[..., Tensor] | None = None
) -> Tensor:
    """``activation(x) · weightᵀ``, each expert's rows by its own weight; `shape`: ``[experts, out, in]``, which the weight is seen as."""
    return _GroupedLinear.apply(x, weight.view(shape), ends, main_gradient_of(weight), activation)


class _GroupedLinear(torch.autograd.Function):
    """A product of rows with the weights of their experts. R rows, E experts, I inputs, O outputs of a rank.

    forward      y [R, O] = activation(x) [R, I] · w[e]ᵀ [I, O]      of each row its expert's; saves x
    grad of x      [R, I] = gradient through activation of dy [R, O] · w[e] [O, I]
    grad of w   [E, O, I] = dyᵀ [O, R of e] · activation(x) [R of e, I]     of no rows: zero; with `main`, added to that, now or later
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, main: MainGradient | None, activation: Callable[..., Tensor] | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.main, ctx.activation = main, activation
        return grouped_product(x if activation is None else activation(x), weight, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:  # type: ignore[override]
        x, weight, ends = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_(ctx.activation is not None)
            inner = x if ctx.activation is None else ctx.activation(x)
        grad_x = grouped_product(grad, weight.mT, ends)
        if ctx.activation is not None:
            (grad_x,) = torch.autograd.grad(inner, x, grad_x)
        return grad_x, grouped_gradient(grad, inner.detach(), ends, ctx.main), None, None, None


def grouped_gradient(grad: Tensor, x: Tensor, ends: Tensor, main: MainGradient | None) -> Tensor | None:
    """The gradient of the weights; None where the main gradient gets it, now or later."""
    if main is None:
        return grouped_outer(grad, x, ends, grad.dtype)

    def add(grad: Tensor, x: Tensor, ends: Tensor) -> None:
        main.add(grouped_outer(grad, x, ends, main.total.dtype).view_as(main.total))

    if main.waits:
        main.defer(add, grad, x, ends)
    else:
        add(grad, x, ends)
    return None


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """``x · weight[e]ᵀ`` of each row, ``[rows, in]`` and ``[experts, out, in]`` → ``[rows, out]``."""
    y = x.new_empty(len(x), weight.shape[1])
    for own, matrix in zip(spans(ends, len(x)), weight, strict=True):
        y[own] = linear(x[own], matrix)
    return y


def grouped_outer(grad: Tensor, x: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """``gradᵀ · x`` of each expert's rows, ``[rows, out]`` and ``[rows, in]`` → ``[experts, out, in]``; without rows it is zero."""
    total = torch.zeros(len(ends), grad.shape[1], x.shape[1], dtype=dtype, device=x.device)
    if is_widened(x):
        grad, x = grad.to(dtype), x.to(dtype)
    for part, own in zip(total, spans(ends, len(x)), strict=True):
        part.copy_(grad[own].t() @ x[own])
    return total


def spans(ends: Tensor, rows: int) -> Iterator[slice]:
    """The rows of each expert. It waits for the device; on `meta`, where nobody knows, all experts have as many."""
    stops = [rows * (i + 1) // len(ends) for i in range(len(ends))] if ends.is_meta else ends.tolist()
    return map(slice, (0, *stops), stops)
