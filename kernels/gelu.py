"""GELU of a linear layer's output, with its bias if that is still to be added: one read and one
write (Hendrycks & Gimpel 2016).

    tanh       y = u g        g = sigmoid(2 sqrt(2/pi) (u + c u^3)),  c = 0.044715,  u = x + b
               dy/du = g + u g (1 - g) 2 sqrt(2/pi) (1 + 3 c u^2)
    none       y = u F(u)     F, f: distribution and density of the standard normal
               dy/du = F(u) + u f(u)
    backward   dx = (dy/du) dy,   db = sum of dx over the tokens

The first form is GPT-2's 0.5 u (1 + tanh(...)), written without its cancellation for negative u. Backward
computes u again.

A program owns a tile of rows and columns. In backward it goes down its columns for many rows, and keeps its
part of db in
fp32: one row of partial sums a program, added up in a second launch, so that the result does not depend on
timing.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megacore.kernels.dispatch import Implementation, check_shape, resident_programs, use_triton
from megacore.kernels.partial_sums import add_parts

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch brings no Triton
    from megacore.kernels.absent import tl, triton

MAX_BLOCK = 1024  # columns of a tile
TILE = 2048  # elements of a tile: 16 a thread, two 16-byte loads of bf16
BACKWARD_PROGRAMS = 6  # that sum a bias's gradient on each multiprocessor at once; 7 fit of the tanh form
Approximation = Literal["tanh", "none"]


def bias_gelu(
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    approximate: Approximation = "tanh",
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """``gelu(x + bias)``, computed in fp32 at least and rounded once.

    x: ``[..., features]`` of any floating dtype, which the result has too; a row stride is taken as it is,
    any other layout copied.
    bias: ``[features]``. Its gradient is summed in fp32.
    approximate: "tanh" as in GPT-2, or "none" for the exact function.
    Raises ValueError for a shape, dtype or device that the implementation cannot take.
    """
    check_shape("bias_gelu", "x", x, "[..., features]", x.dim() > 0)
    if bias is not None:
        check_shape("bias_gelu", "bias", bias, f"[{x.shape[-1]}], x's features", bias.shape == x.shape[-1:])
    if approximate not in ("tanh", "none"):
        raise ValueError(f"bias_gelu: approximate {approximate!r} is unknown (right: tanh or none)")
    if use_triton("bias_gelu", implementation, x=x, bias=bias) and x.numel():
        return _BiasGelu.apply(x.reshape(-1, x.shape[-1]), bias, approximate == "tanh").view(x.shape)
    return bias_gelu_eager(x, bias, approximate)


def bias_gelu_eager(
    x: torch.Tensor, bias: torch.Tensor | None = None, approximate: Approximation = "tanh"
) -> torch.Tensor:
    """The reference in plain PyTorch, whose gelu computes in fp32 at least; x ``[...,
    features]``, bias ``[features]``.
    """
    if bias is None:
        return F.gelu(x, approximate=approximate)
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.gelu(x.to(wide) + bias.to(wide), approximate=approximate).to(x.dtype)


TWICE_ROOT = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
CUBIC = tl.constexpr(0.044715)
ROOT_HALF = tl.constexpr(0.7071067811865476)
DENSITY_AT_0 = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)


@triton.jit
def _gate(u, TANH: tl.constexpr):
    """The factor of u."""
    if TANH:
        return 1.0 / (1.0 + tl.exp((u + u * u * u * CUBIC) * -TWICE_ROOT))
    else:
        return 0.5 * (1.0 + tl.erf(u * ROOT_HALF))


@triton.jit
def _slope(u, TANH: tl.constexpr):
    gate = _gate(u, TANH)
    if TANH:
        return gate + u * gate * (1.0 - gate) * TWICE_ROOT * (1.0 + u * u * (3.0 * CUBIC))
    else:
        return gate + u * DENSITY_AT_0 * tl.exp(u * u * -0.5)


@triton.jit
def _forward_kernel(
    x,
    bias,
    y,
    rows,
    features,
    x_stride,
    column_blocks,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TANH: tl.constexpr,
):
    # Neighbours in a row are neighbouring programs: memory is walked through in order.
    row = (tl.program_id(0) // column_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % column_blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < features)
    u = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        u += tl.load(bias + column, mask=column < features, other=0.0).to(tl.float32)
    tl.store(y + row * features + column, u * _gate(u, TANH), mask=inside)


@triton.jit
def _backward_kernel(
    x,
    bias,
    grad_y,
    grad_x,
    grad_bias_parts,
    rows,
    features,
    x_stride,
    grad_stride,
    column_blocks,
    rows_per_program,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SUM_BIAS: tl.constexpr,
    TANH: tl.constexpr,
):
    chunk = tl.program_id(0) // column_blocks
    column = tl.program_id(0) % column_blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
    if HAS_BIAS:
        b = tl.load(bias + column, mask=column < features, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, rows_per_program, ROWS):
        row = chunk.to(tl.int64) * rows_per_program + start + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < features)
        u = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(grad_y + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            u += b
        dx = dy * _slope(u, TANH)
        tl.store(grad_x + row * features + column, dx, mask=inside)
        if SUM_BIAS:
            total += tl.where(inside, dx, 0.0)
    if SUM_BIAS:
        column = tl.program_id(0) % column_blocks * BLOCK + tl.arange(0, BLOCK)
        tl.store(grad_bias_parts + chunk * features + column, tl.sum(total, 0), mask=column < features)


def launch_options(features: int) -> dict[str, int]:
    """Compile-time sizes of both kernels: tiles of `TILE` elements, several rows of a short one."""
    block = min(triton.next_power_of_2(features), MAX_BLOCK)
    return {"ROWS": max(TILE // block, 1), "BLOCK": block, "num_warps": 4}


class _BiasGelu(torch.autograd.Function):
    """T tokens, F features.

    forward      y [T, F]  = gelu(x [T, F] + b [F])       saves x and b
    grad of x      [T, F]  = gelu'(x + b) dy [T, F]
    grad of b      [F]     = sum over P programs of parts [P, F], fp32
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, tanh: bool) -> torch.Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        bias = None if bias is None else bias.contiguous()
        (rows, features), options = x.shape, launch_options(x.shape[1])
        y = torch.empty((rows, features), dtype=x.dtype, device=x.device)
        blocks = triton.cdiv(features, options["BLOCK"])
        grid = (triton.cdiv(rows, options["ROWS"]) * blocks,)
        with torch.cuda.device_of(x):
            _forward_kernel[grid](
                x,
                bias,
                y,
                rows,
                features,
                x.stride(0),
                blocks,
                HAS_BIAS=bias is not None,
                TANH=tanh,
                **options,
            )
        ctx.save_for_backward(x, bias)
        ctx.tanh = tanh
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, bias = ctx.saved_tensors
        grad_y = grads[0] if grads[0].stride(1) == 1 else grads[0].contiguous()
        (rows, features), options = x.shape, launch_options(x.shape[1])
        blocks = triton.cdiv(features, options["BLOCK"])
        rows_per_program = options["ROWS"]
        # as many programs as run at once, each for as many rows as that takes
        if sum_bias := ctx.needs_input_grad[1]:
            programs = resident_programs(x.device, BACKWARD_PROGRAMS, blocks)
            rows_per_program *= triton.cdiv(rows, programs * rows_per_program)
        chunks = triton.cdiv(rows, rows_per_program)
        grad_x = torch.empty((rows, features), dtype=x.dtype, device=x.device)
        parts = torch.empty((chunks, features), dtype=torch.float32, device=x.device) if sum_bias else None
        with torch.cuda.device_of(x):
            _backward_kernel[(chunks * blocks,)](
                x,
                bias,
                grad_y,
                grad_x,
                parts,
                rows,
                features,
                x.stride(0),
                grad_y.stride(0),
                blocks,
                rows_per_program,
                HAS_BIAS=bias is not None,
                SUM_BIAS=sum_bias,
                TANH=ctx.tanh,
                **options,
            )
        return grad_x, None if parts is None else add_parts(parts[None], bias.dtype)[0], None
