"""Layer norm (Ba et al. 2016, https://arxiv.org/abs/1607.06450) and RMS norm (Zhang and Sennrich 2019,
https://arxiv.org/abs/1910.07467), fused with the addition of a residual before them.

For each row s = x (+ residual), with F features:

    forward    μ = mean(s), 0 in RMS norm;  r = 1 / sqrt(mean((s - μ)²) + eps);  ŝ = (s - μ) r;  y = w ŝ + b
    backward   g = w dy;  ds = r (g - mean(g) - ŝ mean(g ŝ)) + (gradient of s itself), without mean(g) in RMS
               norm
               dx = dresidual = ds;  dw = sum over rows of dy ŝ;  db = sum over rows of dy

Forward reads and writes each row once; a program owns one row, or several short ones. Rows longer than a
block are read twice, the second time from the cache, their mean and variance merged block by block (Chan et
al. 1979).

Backward also sums over rows. Programs as many as the device runs at once walk over the rows and keep their
part of dw and db in registers; a second kernel adds the parts up in a fixed order: no atomics, the same bits
every time. The registers do not hold the parts of a row longer than a block: then one kernel gathers the two
means of every row, and programs that own a block of columns each do the rest.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megacore.kernels.dispatch import Implementation, check_shape, resident_programs, use_triton
from megacore.kernels.partial_sums import add_parts

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch brings no Triton
    from megacore.kernels.absent import tl, triton

MAX_BLOCK = 16384  # features of a row that forward holds in registers at once
MAX_BACKWARD_BLOCK = 8192  # the same of backward, which holds two rows and parts of two gradients
THREADS = 128  # of a program that takes several short rows
BACKWARD_WARPS = 16  # on each multiprocessor at once, of all programs of backward together
BACKWARD_REGISTERS = 65536 // (32 * BACKWARD_WARPS)  # of a thread, of those that an NVIDIA multiprocessor has


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    implementation: Implementation = "auto",
) -> Any:
    """`(x - mean) / sqrt(variance + eps) * weight + bias` over the last
    dimension, statistics in fp32 at least.

    x: [..., features]; rows that no single stride describes, or whose features are not contiguous, are copied
    first.
    weight, bias: [features], of one dtype, which may be wider than x's.
    residual: as x; then the result is (norm(x + residual), x + residual), else norm(x). Both have x's shape
    and dtype.
    Raises ValueError for a shape, dtype or device that the implementation cannot take.
    """
    return _norm("layer_norm", x, weight, bias, eps, residual, implementation)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    implementation: Implementation = "auto",
) -> Any:
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension; everything else as in `layer_norm`."""
    return _norm("rms_norm", x, weight, None, eps, residual, implementation)


def layer_norm_eager(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
) -> Any:
    """The reference in plain PyTorch, whose kernels keep statistics in fp32 or wider."""
    total = x if residual is None else x + residual
    wide = torch.promote_types(x.dtype, weight.dtype)
    y = F.layer_norm(
        total.to(wide), weight.shape, weight.to(wide), None if bias is None else bias.to(wide), eps
    ).to(x.dtype)
    return y if residual is None else (y, total)


def rms_norm_eager(x: Tensor, weight: Tensor, eps: float = 1e-5, *, residual: Tensor | None = None) -> Any:
    """The reference of `rms_norm` in plain PyTorch."""
    total = x if residual is None else x + residual
    wide = torch.promote_types(x.dtype, weight.dtype)
    y = F.rms_norm(total.to(wide), weight.shape, weight.to(wide), eps).to(x.dtype)
    return y if residual is None else (y, total)


class LayerNorm(nn.Module):
    """`layer_norm` with its parameters, as `torch.nn.LayerNorm` over one dimension."""

    def __init__(
        self,
        features: int,
        eps: float = 1e-5,
        bias: bool = True,
        implementation: Implementation = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.implementation = eps, implementation
        self.weight = nn.Parameter(torch.ones(features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(features, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """[..., features] -> the same; with a residual (norm(x + residual), x + residual)."""
        return layer_norm(
            x, self.weight, self.bias, self.eps, residual=residual, implementation=self.implementation
        )


class RMSNorm(nn.Module):
    """`rms_norm` with its weight, as `torch.nn.RMSNorm` over one dimension."""

    def __init__(
        self,
        features: int,
        eps: float = 1e-5,
        implementation: Implementation = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.implementation = eps, implementation
        self.weight = nn.Parameter(torch.ones(features, device=device, dtype=dtype))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """[..., features] -> the same; with a residual (norm(x + residual), x + residual)."""
        return rms_norm(x, self.weight, self.eps, residual=residual, implementation=self.implementation)


def _norm(
    operation: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    implementation: Implementation,
) -> Any:
    check_shape(operation, "x", x, "[..., features], of one feature or more", x.dim() > 0 and x.shape[-1] > 0)
    features = x.shape[-1]
    check_shape(operation, "weight", weight, f"[{features}], as x has features", weight.shape == (features,))
    if not x.is_floating_point():
        raise ValueError(f"{operation}: x is {x.dtype} (right: a floating dtype)")
    if bias is not None:
        check_shape(operation, "bias", bias, f"[{features}], as the weight", bias.shape == weight.shape)
        if bias.dtype != weight.dtype:
            raise ValueError(f"{operation}: bias is {bias.dtype}, weight {weight.dtype} (right: one dtype)")
    if residual is not None:
        check_shape(operation, "residual", residual, f"{list(x.shape)}, as x", residual.shape == x.shape)
        if residual.dtype != x.dtype:
            raise ValueError(f"{operation}: residual is {residual.dtype}, x {x.dtype} (right: one dtype)")
    rms = operation == "rms_norm"
    if use_triton(operation, implementation, x=x, weight=weight, bias=bias, residual=residual):
        y, total = _Norm.apply(x, weight, bias, residual, eps, rms)
        return y if residual is None else (y, total)
    if rms:
        return rms_norm_eager(x, weight, eps, residual=residual)
    return layer_norm_eager(x, weight, bias, eps, residual=residual)


@triton.jit
def _load_sum(x, residual, x_at, residual_at, inside):
    """x + residual, rounded to their dtype as the stored sum is: backward starts from that."""
    s = tl.load(x + x_at, mask=inside, other=0.0)
    if residual is not None:
        s = (s.to(tl.float32) + tl.load(residual + residual_at, mask=inside, other=0.0).to(tl.float32)).to(
            s.dtype
        )
    return s


@triton.jit
def _forward_kernel(
    x,
    residual,
    weight,
    bias,
    y,
    total,
    mean,
    rstd,
    x_stride,
    residual_stride,
    rows,
    features,
    eps,
    RMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):
    # times features, it passes 2^31 at ordinary sizes
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    in_rows = (row < rows)[:, None]
    x += row[:, None] * x_stride
    residual_row = row[:, None] * residual_stride
    out_row = row[:, None] * features
    average = tl.zeros((ROWS,), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)  # of the differences from the average
    if ONE_BLOCK:
        inside = in_rows & (column < features)
        rounded = _load_sum(x, residual, column, residual_row + column, inside)
        # before the reductions, which wait for the row
        w = tl.load(weight + column, mask=column < features, other=0.0)
        if residual is not None:
            tl.store(total + out_row + column, rounded, mask=inside)
        s = rounded.to(tl.float32)
        if not RMS:
            average = tl.sum(s, 1) / features
            s = tl.where(column < features, s - average[:, None], 0.0)
        r = tl.rsqrt(tl.sum(s * s, 1) / features + eps)
        out = s * r[:, None] * w.to(tl.float32)
        if bias is not None:
            out += tl.load(bias + column, mask=column < features, other=0.0).to(tl.float32)
        tl.store(y + out_row + column, out, mask=inside)
    else:
        for start in range(0, features, BLOCK):
            at = start + column
            inside = in_rows & (at < features)
            rounded = _load_sum(x, residual, at, residual_row + at, inside)
            if residual is not None:
                tl.store(total + out_row + at, rounded, mask=inside)
            s = rounded.to(tl.float32)
            if not RMS:
                size = tl.minimum(features - start, BLOCK).to(tl.float32)
                block_average = tl.sum(s, 1) / size
                s = tl.where(inside, s - block_average[:, None], 0.0)
                step = block_average - average
                average += step * (size / (start + size))
                squares += step * step * (start * (size / (start + size)))
            squares += tl.sum(s * s, 1)
        r = tl.rsqrt(squares / features + eps)
        for start in range(0, features, BLOCK):
            at = start + column
            inside = in_rows & (at < features)
            s = _load_sum(x, residual, at, residual_row + at, inside).to(tl.float32)
            w = tl.load(weight + at, mask=at < features, other=0.0).to(tl.float32)
            out = (s - average[:, None]) * r[:, None] * w
            if bias is not None:
                out += tl.load(bias + at, mask=at < features, other=0.0).to(tl.float32)
            tl.store(y + out_row + at, out, mask=inside)
    if not RMS:
        tl.store(mean + row, average, mask=row < rows)
    tl.store(rstd + row, r, mask=row < rows)


@triton.jit
def _means_kernel(
    s,
    weight,
    grad_y,
    mean,
    rstd,
    mean_g,
    mean_gs,
    s_stride,
    grad_stride,
    features,
    RMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """mean(g) and mean(g ŝ) of one long row."""
    row = tl.program_id(0).to(tl.int64)
    s += row * s_stride
    grad_y += row * grad_stride
    r = tl.load(rstd + row)
    average = tl.full((), 0.0, tl.float32)
    if not RMS:
        average = tl.load(mean + row)
    sum_g = tl.zeros((BLOCK,), tl.float32)
    sum_gs = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, features, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < features
        g = tl.load(grad_y + at, mask=inside, other=0.0).to(tl.float32) * tl.load(
            weight + at, mask=inside, other=0.0
        ).to(tl.float32)
        sum_g += g
        sum_gs += g * (tl.load(s + at, mask=inside, other=0.0).to(tl.float32) - average) * r
    if not RMS:
        tl.store(mean_g + row, tl.sum(sum_g, 0) / features)
    tl.store(mean_gs + row, tl.sum(sum_gs, 0) / features)


@triton.jit
def _backward_kernel(
    s,
    weight,
    grad_y,
    grad_total,
    mean,
    rstd,
    mean_g,
    mean_gs,
    grad_s,
    parts,
    s_stride,
    grad_stride,
    total_stride,
    rows,
    features,
    RMS: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_columns = at < features
    column = at[None, :]
    w = tl.load(weight + at, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    part_w = tl.zeros((ROWS, BLOCK), tl.float32)
    part_b = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), programs, num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        in_rows = row < rows
        inside = in_rows[:, None] & in_columns[None, :]
        x = tl.load(s + row[:, None] * s_stride + column, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(grad_y + row[:, None] * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(rstd + row, mask=in_rows, other=0.0)[:, None]
        if not RMS:
            x -= tl.load(mean + row, mask=in_rows, other=0.0)[:, None]
        x *= r
        g = dy * w  # 0 beyond the features, which keeps the means clean
        if ONE_BLOCK:
            inner = tl.sum(g * x, 1)[:, None] / features
        else:
            inner = tl.load(mean_gs + row, mask=in_rows, other=0.0)[:, None]
        ds = g - x * inner
        if not RMS:
            if ONE_BLOCK:
                ds -= tl.sum(g, 1)[:, None] / features
            else:
                ds -= tl.load(mean_g + row, mask=in_rows, other=0.0)[:, None]
        ds *= r
        if grad_total is not None:
            ds += tl.load(grad_total + row[:, None] * total_stride + column, mask=inside, other=0.0).to(
                tl.float32
            )
        tl.store(grad_s + row[:, None] * features + column, ds, mask=inside)
        part_w += dy * x
        if BIAS:
            part_b += dy
    parts += program.to(tl.int64) * features + at
    tl.store(parts, tl.sum(part_w, 0), mask=in_columns)
    if BIAS:
        tl.store(parts + programs.to(tl.int64) * features, tl.sum(part_b, 0), mask=in_columns)


def launch_options(features: int, element_size: int) -> dict[str, Any]:
    """Compile-time sizes of forward: about 64 bytes of a row a thread, several short rows a program."""
    block, elements = min(triton.next_power_of_2(features), MAX_BLOCK), 64 // element_size
    rows = max(elements * THREADS // block, 1) if features <= MAX_BLOCK else 1
    warps = min(max(rows * block // (32 * elements), 1), 16)
    return {"ROWS": rows, "BLOCK": block, "ONE_BLOCK": features <= MAX_BLOCK, "num_warps": warps}


def backward_options(features: int, element_size: int) -> dict[str, Any]:
    """Compile-time sizes of backward: about 16 elements a thread, for there are twice as many arrays of them.

    The next tiles are on their way to shared memory while one is worked on. The programs of a multiprocessor
    work on 8192 elements of three operands: in 16 bits there is room for two tiles ahead, in fp32 for one.
    """
    one_block = features <= MAX_BACKWARD_BLOCK
    block = triton.next_power_of_2(features) if one_block else min(MAX_BACKWARD_BLOCK, 2048)
    rows = max(16 * THREADS // block, 1) if one_block else 1
    # The compiler may take more registers, and then fewer programs fit. AMD's has no such option.
    limit = {} if torch.version.hip else {"maxnreg": BACKWARD_REGISTERS}
    return {
        "ROWS": rows,
        "BLOCK": block,
        "ONE_BLOCK": one_block,
        "STAGES": 3 if element_size <= 2 else 2,
        "num_warps": min(max(rows * block // 512, 1), BACKWARD_WARPS),
        **limit,
    }


def _rows(x: Tensor) -> Tensor:
    """x as [rows, features] with contiguous features: a view wherever one row stride describes it."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


class _Norm(torch.autograd.Function):
    """(x [..., F], weight [F], bias [F] or None, residual as x or None) -> (y as x, x + residual or None).

    Saves s [rows, F] (a view of x, or the returned sum), weight, mean [rows] (not in RMS norm) and rstd
    [rows], in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        eps: float,
        rms: bool,
    ) -> tuple[Tensor, Tensor | None]:
        s, weight = _rows(x), weight.contiguous()
        rows, features = s.shape
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
        mean = None if rms else torch.empty_like(rstd)
        addend = None if residual is None else _rows(residual)
        total = None if residual is None else torch.empty_like(y)
        if rows:  # a launch of no programs is an error
            options = launch_options(features, x.element_size())
            residual_stride = 0 if addend is None else addend.stride(0)
            with torch.cuda.device_of(x):
                _forward_kernel[(triton.cdiv(rows, options["ROWS"]),)](
                    s,
                    addend,
                    weight,
                    None if bias is None else bias.contiguous(),
                    y,
                    total,
                    mean,
                    rstd,
                    s.stride(0),
                    residual_stride,
                    rows,
                    features,
                    eps,
                    RMS=rms,
                    **options,
                )
        ctx.save_for_backward(s if total is None else total.view(rows, features), weight, mean, rstd)
        ctx.has_bias = bias is not None
        ctx.set_materialize_grads(False)  # no zeros are read if the sum gets no gradient
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None, grad_total: Tensor | None) -> tuple[Tensor | None, ...]:
        s, weight, mean, rstd = ctx.saved_tensors
        if grad_y is None:  # only the sum was used
            return grad_total, None, None, grad_total, None, None
        rows, features = s.shape
        dy, dtotal = _rows(grad_y), None if grad_total is None else _rows(grad_total)
        grad_s = torch.empty(grad_y.shape, dtype=s.dtype, device=s.device)
        sums = 2 if ctx.has_bias else 1
        if rows:
            parts = _launch_backward(s, weight, dy, dtotal, mean, rstd, grad_s, sums)
        else:  # a launch of no programs is an error
            parts = torch.empty(sums, 0, features, dtype=torch.float32, device=s.device)
        grads = add_parts(parts, weight.dtype)
        return (
            grad_s,
            grads[0],
            grads[1] if ctx.has_bias else None,
            grad_s if ctx.needs_input_grad[3] else None,
            None,
            None,
        )


def _launch_backward(
    s: Tensor,
    weight: Tensor,
    dy: Tensor,
    dtotal: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    grad_s: Tensor,
    sums: int,
) -> Tensor:
    """Fills grad_s [rows, F]; returns parts [sums, programs, F] of the gradients of weight and, if sums is 2,
    bias.
    """
    rows, features = s.shape
    options = backward_options(features, s.element_size())
    columns = triton.cdiv(features, options["BLOCK"])
    resident = resident_programs(s.device, BACKWARD_WARPS // options["num_warps"], columns)
    programs = min(triton.cdiv(rows, options["ROWS"]), resident)
    parts = torch.empty(sums, programs, features, dtype=torch.float32, device=s.device)
    rms, mean_g, mean_gs = mean is None, None, None
    if not options["ONE_BLOCK"]:
        mean_g, mean_gs = None if rms else torch.empty_like(rstd), torch.empty_like(rstd)
        _means_kernel[(rows,)](
            s,
            weight,
            dy,
            mean,
            rstd,
            mean_g,
            mean_gs,
            s.stride(0),
            dy.stride(0),
            features,
            RMS=rms,
            BLOCK=options["BLOCK"],
            num_warps=4,
        )
    _backward_kernel[(programs, columns)](
        s,
        weight,
        dy,
        dtotal,
        mean,
        rstd,
        mean_g,
        mean_gs,
        grad_s,
        parts,
        s.stride(0),
        dy.stride(0),
        0 if dtotal is None else dtotal.stride(0),
        rows,
        features,
        RMS=rms,
        BIAS=sums == 2,
        **options,
    )
    return parts
