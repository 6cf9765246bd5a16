"""SwiGLU of a gated feed-forward layer's first product: two reads and one write (Shazeer 2020,
https://arxiv.org/abs/2002.05202).

    forward    y  = silu(g) u            silu(g) = g s,  s = sigmoid(g),  x = [g, u]
    backward   dg = dy u s (1 + g (1 - s)),  du = dy g s

Backward computes s again from x, which alone is saved, and writes dg and du where they belong in one gradient
of x, so that nothing is put together afterwards. A program owns a tile of rows and of columns, those of g and
of u that meet.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megacore.kernels.dispatch import Implementation, check_shape, use_triton

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch brings no Triton
    from megacore.kernels.absent import tl, triton

MAX_BLOCK = 1024  # columns of a tile
TILE = 2048  # elements of a tile: 16 a thread of each operand, two 16-byte loads of bf16


def swiglu(x: torch.Tensor, *, implementation: Implementation = "auto") -> torch.Tensor:
    """``silu(gate) * up`` of ``[..., 2 · features]``, the gate's features first;
    computed in fp32 and rounded once.

    x: any floating dtype, which the result ``[..., features]`` has too; a row stride is taken as it is, any
    other layout copied.
    Raises ValueError for a shape, dtype or device that the implementation cannot take.
    """
    check_shape("swiglu", "x", x, "[..., 2 · features]", x.dim() > 0 and x.shape[-1] % 2 == 0)
    if use_triton("swiglu", implementation, x=x) and x.numel():
        return _SwiGLU.apply(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], x.shape[-1] // 2)
    return swiglu_eager(x)


def swiglu_eager(x: torch.Tensor) -> torch.Tensor:
    """The reference in plain PyTorch, which in 16 bits rounds silu(gate) too; x ``[..., 2 · features]``."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@triton.jit
def _forward_kernel(x, y, rows, features, x_stride, column_blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    # Neighbours in a row are neighbouring programs: memory is walked through in order.
    row = (tl.program_id(0) // column_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % column_blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < features)
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + features + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * features + column, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


@triton.jit
def _backward_kernel(
    x,
    grad_y,
    grad_x,
    rows,
    features,
    x_stride,
    grad_stride,
    column_blocks,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // column_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % column_blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < features)
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + features + column, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(grad_y + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-gate))
    grad_x += row * (2 * features) + column
    tl.store(grad_x, dy * up * s * (1.0 + gate * (1.0 - s)), mask=inside)
    tl.store(grad_x + features, dy * gate * s, mask=inside)


def launch_options(features: int) -> dict[str, int]:
    """Compile-time sizes of both kernels: tiles of `TILE` elements, several rows of a short one."""
    block = min(triton.next_power_of_2(features), MAX_BLOCK)
    return {"ROWS": max(TILE // block, 1), "BLOCK": block, "num_warps": 4}


class _SwiGLU(torch.autograd.Function):
    """T tokens, F features.

    forward      y [T, F]   = silu(g) u      g [T, F], u [T, F] = x [T, 2 F]       saves x
    grad of x      [T, 2 F] = [dg, du]
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        rows, features = x.shape[0], x.shape[1] // 2
        options = launch_options(features)
        y = torch.empty((rows, features), dtype=x.dtype, device=x.device)
        blocks = triton.cdiv(features, options["BLOCK"])
        with torch.cuda.device_of(x):
            _forward_kernel[(triton.cdiv(rows, options["ROWS"]) * blocks,)](
                x, y, rows, features, x.stride(0), blocks, **options
            )
        ctx.save_for_backward(x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        grad_y = grads[0] if grads[0].stride(1) == 1 else grads[0].contiguous()
        (rows, features), options = grad_y.shape, launch_options(grad_y.shape[1])
        grad_x = torch.empty((rows, 2 * features), dtype=x.dtype, device=x.device)
        blocks = triton.cdiv(features, options["BLOCK"])
        grid = (triton.cdiv(rows, options["ROWS"]) * blocks,)
        with torch.cuda.device_of(x):
            _backward_kernel[grid](
                x, grad_y, grad_x, rows, features, x.stride(0), grad_y.stride(0), blocks, **options
            )
        return grad_x
