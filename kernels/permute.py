"""Rows for experts: each token's features once for every expert that it goes to, and the
weighted sum of what comes back.

    spread      rows[s] = x[t]                     s = slots[t, k] for each of a token's K experts
    combine     y[t]    = sum over k of w[t, k] rows[slots[t, k]]

`slots` says where each copy of a token stands among rows sorted by expert. Each is the other's gradient, and
both read by token: a program owns a token, so nothing is added by atomics, and sums have one order. combine's
backward writes the gradients of rows and weights in one pass over the rows.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore.kernels.dispatch import Implementation, check_shape, use_triton

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch brings no Triton
    from megacore.kernels.absent import tl, triton

MAX_BLOCK = 2048  # features at a time


def slots_of(order: Tensor, copies: int) -> Tensor:
    """Where each copy of each token stands, ``[tokens, copies]``, by the order that sorts copies by
    expert, ``[tokens · copies]``.
    """
    slots = torch.empty_like(order)
    slots[order] = torch.arange(len(order), device=order.device)
    return slots.view(-1, copies)


def spread(x: Tensor, slots: Tensor, *, implementation: Implementation = "auto") -> Tensor:
    """Each token's features at all of its slots: ``[tokens, features]`` → ``[tokens · copies, features]``.

    slots: ``[tokens, copies]`` integers, every row once. Raises ValueError for what the implementation cannot
    take.
    """
    _check("spread", slots, "x", x, len(slots))
    return _Spread.apply(x, slots, use_triton("spread", implementation, x=x, slots=slots) and x.numel() > 0)


def combine(
    rows: Tensor, slots: Tensor, weights: Tensor, *, implementation: Implementation = "auto"
) -> Tensor:
    """Each token's weighted sum of its rows, computed in fp32 at least: ``[tokens · copies,
    features]`` → ``[tokens, features]``.

    slots: as in `spread`. weights: ``[tokens, copies]`` in any floating dtype, which their gradient has too.
    Raises ValueError for a shape, dtype or device that the implementation cannot take.
    """
    _check("combine", slots, "rows", rows, slots.numel())
    check_shape("combine", "weights", weights, f"{list(slots.shape)}, as slots", weights.shape == slots.shape)
    return _Combine.apply(
        rows,
        slots,
        weights,
        use_triton("combine", implementation, rows=rows, slots=slots) and rows.numel() > 0,
    )


def _check(operation: str, slots: Tensor, name: str, tensor: Tensor, rows: int) -> None:
    check_shape(operation, "slots", slots, "[tokens, copies]", slots.dim() == 2)
    check_shape(operation, name, tensor, f"[{rows}, features]", tensor.dim() == 2 and len(tensor) == rows)


@triton.jit
def _spread_kernel(x, slots, rows, features, x_stride, blocks, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + token * x_stride + column, mask=column < features)
    for k in tl.static_range(COPIES):
        slot = tl.load(slots + token * COPIES + k).to(tl.int64)
        tl.store(rows + slot * features + column, values, mask=column < features)


@triton.jit
def _combine_kernel(
    rows,
    slots,
    weights,
    y,
    features,
    blocks,
    COPIES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(COPIES):
        slot = tl.load(slots + token * COPIES + k).to(tl.int64)
        row = tl.load(rows + slot * features + column, mask=column < features, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights + token * COPIES + k).to(tl.float32)
        total += row
    tl.store(y + token * features + column, total, mask=column < features)


@triton.jit
def _combine_backward_kernel(
    rows,
    slots,
    weights,
    grad_y,
    grad_rows,
    grad_weights,
    features,
    grad_stride,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    for k in tl.static_range(COPIES):
        slot = tl.load(slots + token * COPIES + k).to(tl.int64)
        weight = tl.load(weights + token * COPIES + k).to(tl.float32)
        dot = tl.zeros((BLOCK,), dtype=tl.float32)
        for first in range(0, features, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < features
            dy = tl.load(grad_y + token * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
            dot += dy * tl.load(rows + slot * features + column, mask=inside, other=0.0).to(tl.float32)
            tl.store(grad_rows + slot * features + column, weight * dy, mask=inside)
        tl.store(grad_weights + token * COPIES + k, tl.sum(dot))


def launch_options(features: int) -> dict[str, int]:
    """Compile-time sizes of the kernels: 16 bytes of bf16 a thread, also where 64 threads are a warp."""
    block = min(triton.next_power_of_2(features), MAX_BLOCK)
    return {"BLOCK": block, "num_warps": max(block // 512, 1)}


def tokens_of(slots: Tensor) -> Tensor:
    """The token whose copy each row is, ``[tokens · copies]``.

    Whole rows are then gathered, which a CPU does several times faster than it scatters them, or indexes them
    by a matrix.
    """
    tokens = torch.empty_like(slots).view(-1)
    tokens[slots.flatten()] = torch.arange(len(slots), device=slots.device).repeat_interleave(slots.shape[1])
    return tokens


def spread_rows(x: Tensor, slots: Tensor, fused: bool) -> Tensor:
    """`spread` without a gradient."""
    (tokens, copies), features = slots.shape, x.shape[1]
    if not fused:
        return x.index_select(0, tokens_of(slots))
    x, rows = x if x.stride(1) == 1 else x.contiguous(), x.new_empty(slots.numel(), features)
    options = launch_options(features)
    blocks = triton.cdiv(features, options["BLOCK"])
    with torch.cuda.device_of(x):
        _spread_kernel[(tokens * blocks,)](
            x, slots.contiguous(), rows, features, x.stride(0), blocks, COPIES=copies, **options
        )
    return rows


def combine_rows(rows: Tensor, slots: Tensor, weights: Tensor | None, fused: bool) -> Tensor:
    """`combine` without a gradient; without weights the plain sum."""
    (tokens, copies), features = slots.shape, rows.shape[1]
    if not fused:
        wide = torch.promote_types(rows.dtype, torch.float32)
        total = torch.zeros(tokens, features, dtype=wide, device=rows.device)
        for k in range(copies):
            of_tokens = rows.index_select(0, slots[:, k]).to(wide)
            total += of_tokens if weights is None else of_tokens.mul_(weights[:, k, None].to(wide))
        return total.to(rows.dtype)
    y, rows, options = rows.new_empty(tokens, features), rows.contiguous(), launch_options(features)
    blocks, given = triton.cdiv(features, options["BLOCK"]), rows if weights is None else weights.contiguous()
    sizes = {"COPIES": copies, "WEIGHTED": weights is not None}
    with torch.cuda.device_of(rows):
        _combine_kernel[(tokens * blocks,)](
            rows, slots.contiguous(), given, y, features, blocks, **sizes, **options
        )
    return y


class _Spread(torch.autograd.Function):
    """T tokens, K copies, F features.

    forward      rows [T K, F]   rows[slots[t, k]] = x[t]
    grad of x    [T, F]          = sum over k of drows[slots[t, k]]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, fused: bool) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.fused = fused
        return spread_rows(x, slots, fused)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return combine_rows(grad, slots, None, ctx.fused), None, None


class _Combine(torch.autograd.Function):
    """T tokens, K copies, F features.

    forward          y [T, F]    = sum over k of w[t, k] rows[slots[t, k]]     saves rows, weights
    grad of rows     [T K, F]    at slots[t, k]: w[t, k] dy[t]
    grad of weights  [T, K]      = dy[t] · rows[slots[t, k]]
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, slots: Tensor, weights: Tensor, fused: bool) -> Tensor:
        ctx.save_for_backward(rows, slots, weights)
        ctx.fused = fused
        return combine_rows(rows, slots, weights, fused)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor, None]:
        rows, slots, weights = ctx.saved_tensors
        (tokens, copies), features = slots.shape, rows.shape[1]
        if not ctx.fused:
            wide = torch.promote_types(rows.dtype, torch.float32)
            of_rows = grad.to(wide).index_select(0, tokens_of(slots))
            dots = (rows.to(wide) * of_rows).sum(1)
            by_row = torch.empty(slots.numel(), dtype=wide, device=rows.device)
            by_row[slots.flatten()] = weights.flatten().to(wide)
            return of_rows.mul_(by_row[:, None]).to(rows.dtype), None, dots[slots].to(weights.dtype), None
        grad, rows = grad if grad.stride(1) == 1 else grad.contiguous(), rows.contiguous()
        grad_rows, grad_weights = torch.empty_like(rows), weights.new_empty(tokens, copies)
        given = (
            rows,
            slots.contiguous(),
            weights.contiguous(),
            grad,
            grad_rows,
            grad_weights,
            features,
            grad.stride(0),
        )
        with torch.cuda.device_of(rows):
            _combine_backward_kernel[(tokens,)](*given, COPIES=copies, **launch_options(features))
        return grad_rows, None, grad_weights, None
