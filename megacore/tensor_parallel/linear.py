"""Column- and row-parallel linear layers (Shoeybi et al. 2019), with sequence
parallelism (Korthikanti et al. 2022).

A rank's column-parallel layer has some of the outputs, and its row-parallel layer some of the inputs. A pair
of them needs one sum over the tensor ranks forward and one backward. With `sequence`, activations between
such pairs are split along the tokens, and each sum becomes a reduce-scatter and an all-gather, which move as
many bytes.
Activations are always ``[tokens, features]``.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megacore.distributed.collectives import (
    Done,
    Work,
    all_gather,
    all_gather_start,
    all_reduce_start,
    leave_tensor_parallel,
    reduce_scatter_start,
)
from megacore.distributed.communicator import SOLO, Group, group_called
from megacore.distributed.cpu import is_widened
from megacore.distributed.shard import LogicalMatrix, Shard, new_parameter, replicated, split
from megacore.kernels.linear_cross_entropy import ALIGNMENT
from megacore.tensor_parallel.gradient import MainGradient, main_gradient_of


def row_stride(x: Tensor, outputs: int) -> int:
    """How far apart the rows of a product with `x` begin, in elements: in 16 bits on GPUs at
    multiples of 128 bytes, else without gaps.
    """
    return (
        -(-outputs // ALIGNMENT) * ALIGNMENT if x.device.type == "cuda" and x.element_size() == 2 else outputs
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 0) -> Tensor:
    """``x · weightᵀ + bias`` in x's dtype, accumulated at least in fp32; without a bias, its rows
    may be `stride` elements apart.

    On a Zen 3 core, which emulates bf16: 8 GFLOP/s forward, 1 and 23 backward; through fp32 85, with
    conversions.
    """
    if stride > len(weight):
        # no view, for autograd's sake
        y = torch.empty_strided((len(x), len(weight)), (stride, 1), dtype=x.dtype, device=x.device)
        return torch.mm(x, weight.t(), out=y)
    if is_widened(x):
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    return F.linear(x, weight, bias)


def weight_gradient(grad: Tensor, x: Tensor, main: MainGradient | None, group: Group = SOLO) -> Tensor | None:
    """``gradᵀ · x``, `grad` ``[tokens, outputs]``, `x` ``[tokens, inputs]``; None where the main
    gradient gets it, now or later.

    `group`: over which x is to be gathered later.
    """
    if main is None:
        return linear(grad.t(), x.t())
    if main.waits:
        main.defer(main.add_product, grad, x, group=group)
    else:
        main.add_product(grad, x)
    return None


def _gradients(
    grad: Tensor,
    x: Tensor | None,
    weight: Tensor,
    group: Group,
    sequence: bool,
    main: MainGradient | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Of a column-parallel layer's x and weight; the product that gives the second runs while
    ranks exchange parts of the first.

    If the second is for later, x is gathered only then. A weight that is frozen has none, and needs no x.
    """
    gathering: Work = Done()
    to_gather = group if sequence else SOLO
    if x is not None and (main is None or not main.waits):
        (x, gathering), to_gather = all_gather_start(x, to_gather), SOLO
    grad_x = linear(grad, weight.t())
    if sequence:
        grad_part, summing = reduce_scatter_start(grad_x, group)
    else:
        grad_part, summing = grad_x, all_reduce_start(grad_x, group)
    gathering.wait()
    grad_weight = None if x is None else weight_gradient(grad, x, main, to_gather)
    summing.wait()
    return grad_part, grad_weight


@torch.library.custom_op("megacore::column_gradients", mutates_args=())
def _traced_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, group: str, sequence: bool
) -> tuple[Tensor, Tensor]:
    """One operation of a compiled graph (`distributed.collectives`), so that product and
    exchange stay side by side there too.
    """
    grad_x, grad_weight = _gradients(grad, x, weight, group_called(group), sequence)
    assert grad_weight is not None
    return grad_x, grad_weight


_traced_gradients.register_fake(
    lambda grad, x, weight, group, sequence: (x.new_empty(x.shape), weight.new_empty(weight.shape))
)


class _ColumnLinear(torch.autograd.Function):
    """A product of which each tensor rank computes its own outputs from the same x.

    T tokens, t ranks, I inputs, O outputs of a rank.

    forward      y [T, O]  = x [T, I] · wᵀ [I, O] + b [O]     with sequence, x is gathered from [T/t, I]
    grad of x      [T, I]  = sum over ranks of dy [T, O] · w [O, I]   with sequence, reduce-scattered to [T/t,
        I]
    grad of w      [O, I]  = dyᵀ [O, T] · x [T, I]      while the sum above is under way; with `main`, added
        to that
    grad of b      [O]     = sum of dy over tokens
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: Group,
        sequence: bool,
        main: MainGradient | None,
        stride: int,
    ) -> Tensor:
        # A graph is compiled as if no weight were frozen, and no bias constant.
        compiling = torch.compiler.is_compiling()
        # With sequence only this rank's tokens, gathered again in backward.
        ctx.save_for_backward(x if compiling or ctx.needs_input_grad[1] else None, weight)
        ctx.sum_bias = bias is not None and (compiling or ctx.needs_input_grad[2])
        ctx.group, ctx.sequence, ctx.main = group, sequence, main
        return linear(all_gather(x, group) if sequence else x, weight, bias, stride)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None, None]:
        x, weight = ctx.saved_tensors
        grad_weight: Tensor | None
        if torch.compiler.is_compiling() and ctx.group.size > 1:
            grad_x, grad_weight = _traced_gradients(grad, x, weight, ctx.group.key, ctx.sequence)
        else:
            grad_x, grad_weight = _gradients(grad, x, weight, ctx.group, ctx.sequence, ctx.main)
        return grad_x, grad_weight, grad.sum(0) if ctx.sum_bias else None, None, None, None, None


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence: bool, stride: int = 0
) -> Tensor:
    """`x` ``[tokens, in]`` (with `sequence`, this rank's tokens) → ``[all tokens, out of this
    rank]``, by a parameter ``[*out, in]``.

    Without a bias, the rows of the result may be `stride` elements apart; nothing reads what is between them.
    """
    main, weight = main_gradient_of(weight), weight.flatten(0, -2)
    plain = main is None and group.size == 1 and stride <= len(weight)
    if plain and not is_widened(x):  # if it is widened, autograd would keep fp32 copies
        return F.linear(x, weight, bias)
    return _ColumnLinear.apply(x, weight, bias, group, sequence, main, stride)


class _ActivationLinear(torch.autograd.Function):
    """``linear(activation(*h), w)`` that keeps only h, and computes the activation again in
    backward. h may have its own bias.

    forward      y [T, O] = activation(*h) [T, I] · wᵀ + b [O]
    grad of h             = gradient through activation of dy [T, O] · w [O, I]
    grad of w    [O, I]   = dyᵀ [O, T] · activation(*h) [T, I]     with `main`, added to that
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        bias: Tensor | None,
        activation: Callable[..., Tensor],
        main: MainGradient | None,
        *h: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(weight, *h)
        ctx.has_bias, ctx.activation, ctx.main = bias is not None, activation, main
        return linear(activation(*h), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *h = ctx.saved_tensors
        with torch.enable_grad():
            h = [t.detach().requires_grad_() for t in h]
            x = ctx.activation(*h)
        grad_h = torch.autograd.grad(x, h, linear(grad, weight.t()))
        grad_weight = weight_gradient(grad, x.detach(), ctx.main) if ctx.needs_input_grad[0] else None
        return grad_weight, grad.sum(0) if ctx.has_bias else None, None, None, *grad_h


class ColumnLinear(nn.Module):
    """``y = x · Wᵀ + b`` with the outputs split over the tensor ranks; returns this rank's outputs.

    `out_shape` arranges the outputs in one or more dims, of which `dim` is split: a piece of ``(2, ffn)``,
    split along 1, has the gate and the up projection of the same features. The logical weight is
    ``[*out_shape, in_size]``.
    """

    def __init__(
        self,
        in_size: int,
        out_shape: tuple[int, ...],
        *,
        dim: int = 0,
        bias: bool,
        init_std: float,
        group: Group,
        sequence: bool,
        dtype: torch.dtype,
        device: torch.device,
        matrices: tuple[LogicalMatrix, ...] = (),
    ) -> None:
        super().__init__()
        self.group, self.sequence = group, sequence
        weight = Shard(
            (*out_shape, in_size),
            (split(group, dim),),
            decay=True,
            init_std=init_std or None,
            matrices=matrices,
        )
        self.weight = new_parameter(weight, dtype, device)
        self.bias = new_parameter(Shard(out_shape, (split(group, dim),)), dtype, device) if bias else None

    def forward(self, x: Tensor, *, without_bias: bool = False, constant_bias: bool = False) -> Tensor:
        """``[tokens, in]`` (with sequence parallelism this rank's tokens) → ``[all
        tokens, flattened local outputs]``.

        The bias is left to the caller with `without_bias`, and its gradient alone with `constant_bias`.
        """
        bias = None if self.bias is None or without_bias else self.bias.flatten()
        if bias is not None and constant_bias:
            bias = bias.detach()
        return column_linear(x, self.weight, bias, self.group, self.sequence)


def flatten_rows(model: nn.Module) -> None:
    """Turns logical dims (heads; gate and up) of a model's weights into rows, as in the
    layers' products: FSDP2 divides rows.
    """
    for module in model.modules():
        if isinstance(module, ColumnLinear):
            module.weight.data = module.weight.data.flatten(0, -2)
            if module.bias is not None:
                module.bias.data = module.bias.data.flatten()


class RowLinear(nn.Module):
    """``y = activation(x) · Wᵀ + b`` with the inputs split over the tensor ranks, which sum their results.

    With `recompute`, backward computes `activation` again instead of keeping its output. The bias is added
    once: after the sum, or within the product where there is nothing to sum. With sequence parallelism each
    rank adds it to its own tokens, so its gradient is partial.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        bias: bool,
        init_std: float,
        group: Group,
        sequence: bool,
        dtype: torch.dtype,
        device: torch.device,
        activation: Callable[..., Tensor] | None = None,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.group, self.sequence = group, sequence
        self.activation, self.recompute = activation, recompute
        self.weight = new_parameter(
            Shard((out_size, in_size), (split(group, 1),), decay=True, init_std=init_std or None),
            dtype,
            device,
        )
        self.bias = (
            new_parameter(Shard((out_size,), (replicated(group, partial=sequence),)), dtype, device)
            if bias
            else None
        )

    def forward(self, *x: Tensor) -> Tensor:
        """``[tokens, this rank's inputs]`` → ``[tokens, out]`` (with sequence
        parallelism this rank's tokens).

        A bias of the inputs may follow them, if the activation takes it.
        """
        if self.activation is not None and self.recompute and torch.compiler.is_compiling():
            part = checkpoint(self._product, *x, use_reentrant=False, preserve_rng_state=False)
        elif self.activation is not None and self.recompute:
            part = _ActivationLinear.apply(
                self.weight, self._bias_of_product, self.activation, main_gradient_of(self.weight), *x
            )
        else:
            part = self._product(*x)
        y = leave_tensor_parallel(part, self.group, self.sequence)
        return y if self.bias is None or self.group.size == 1 else y + self.bias

    @property
    def _bias_of_product(self) -> Tensor | None:
        return self.bias if self.group.size == 1 else None

    def _product(self, *x: Tensor) -> Tensor:
        return column_linear(
            x[0] if self.activation is None else self.activation(*x),
            self.weight,
            self._bias_of_product,
            SOLO,
            False,
        )
