"""Dropout between a bias and a residual sum, with two reads and one write. A counter gives the mask.

    forward    y = r + a m (x + b) / (1 - p)       m: 0 with probability p, else 1;  a: a constant scale of
               the branch
    backward   dx = a m dy / (1 - p),  db = sum of dx over the tokens,  dr = dy

The mask is never stored. Element i of the whole activation is kept if word i % 4 of the Philox 4x32-10 block
with counter i // 4 (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405) is at least p 2^32, under a
key that names the step, the microbatch and the place. Every rank that holds a part of the activation, every
recomputation, CPU and GPU draw the
same bits: `keep_mask` computes them in PyTorch's integers, the kernels in registers.

A program owns a tile of rows and columns, as in gelu.py. Where rows start at a multiple of 4, each block
serves 4 neighbours.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megacore.kernels.dispatch import Implementation, check_shape, resident_programs, use_triton
from megacore.kernels.partial_sums import add_parts

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch brings no Triton
    from megacore.kernels.absent import tl, triton

MAX_BLOCK = 1024  # columns of a tile
TILE = 2048  # elements of a tile: 16 a thread of each operand, two 16-byte loads of bf16
BACKWARD_PROGRAMS = 8  # that sum a bias's gradient on each multiprocessor at once
CPU_CHUNK = 2**15  # Philox blocks at once, for each thread: their five words stay in the processor's cache
LOW = 0xFFFFFFFF


def bias_dropout_residual(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    probability: float,
    key: int,
    *,
    first: int = 0,
    scale: float = 1.0,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """``residual + scale · dropout(x + bias)``, computed in fp32 at least and rounded once.

    x: ``[..., features]`` of any floating dtype, which the result has too; a row stride is taken as it is,
    any other layout copied.
    bias: ``[features]`` or None; its gradient is summed in fp32. residual: like x, or None.
    probability: of an element to be dropped, at least 0 and below 1; with 0 this is a fused sum.
    key: names the mask, at least 0 and below 2**63.
    first: the position of x's first element in the whole activation, in elements, where x is a run of its
    rows.
    Raises ValueError for a value, shape, dtype or device that the implementation cannot take.
    """
    check_shape("bias_dropout_residual", "x", x, "[..., features]", x.dim() > 0)
    if bias is not None:
        check_shape(
            "bias_dropout_residual",
            "bias",
            bias,
            f"[{x.shape[-1]}], x's features",
            bias.shape == x.shape[-1:],
        )
    if residual is not None:
        check_shape(
            "bias_dropout_residual",
            "residual",
            residual,
            f"{list(x.shape)}, x's shape",
            residual.shape == x.shape,
        )
        if residual.dtype != x.dtype:
            raise ValueError(
                f"bias_dropout_residual: residual is {residual.dtype}, x {x.dtype} (right: one dtype)"
            )
    _check_draw("bias_dropout_residual", probability, key, first)
    if use_triton("bias_dropout_residual", implementation, x=x, bias=bias, residual=residual) and x.numel():
        rows = None if residual is None else residual.reshape(-1, x.shape[-1])
        return _BiasDropoutResidual.apply(
            x.reshape(-1, x.shape[-1]), bias, rows, probability, key, first, scale
        ).view(x.shape)
    return bias_dropout_residual_eager(x, bias, residual, probability, key, first=first, scale=scale)


def bias_dropout_residual_eager(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    probability: float,
    key: int,
    *,
    first: int = 0,
    scale: float = 1.0,
) -> torch.Tensor:
    """The reference in plain PyTorch, with the same mask; x ``[..., features]``."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    if bias is not None:
        y = y + bias
    if probability:
        features = x.shape[-1]
        keep = keep_mask(
            x.numel() // max(features, 1), features, probability, key, first=first, device=x.device
        ).view(x.shape)
        y = torch.where(keep, y, 0.0)
    y = y * (scale / (1.0 - probability))
    return (y if residual is None else y + residual).to(x.dtype)


def keep_mask(
    tokens: int, features: int, probability: float, key: int, *, first: int = 0, device: torch.device | str
) -> torch.Tensor:
    """``[tokens, features]`` booleans, False with `probability`: the mask of
    `bias_dropout_residual`, in PyTorch's integers.
    """
    _check_draw("keep_mask", probability, key, first)
    count, skipped = tokens * features, first % 4
    blocks = -(-(skipped + count) // 4)
    step = CPU_CHUNK * torch.get_num_threads() if torch.device(device).type == "cpu" else max(blocks, 1)
    keep = torch.empty((blocks, 4), dtype=torch.bool, device=device)
    for start in range(0, blocks, step):
        part = keep[start : start + step]
        for i, word in enumerate(_philox(first // 4 + start, len(part), key, part.device)):
            torch.ge(word.bitwise_and_(LOW), _threshold(probability), out=part[:, i])
    return keep.view(-1)[skipped : skipped + count].view(tokens, features)


def _check_draw(operation: str, probability: float, key: int, first: int) -> None:
    if not 0.0 <= probability < 1.0:
        raise ValueError(f"{operation}: probability is {probability} (right: at least 0 and below 1)")
    if not 0 <= key < 2**63:
        raise ValueError(f"{operation}: key is {key} (right: at least 0 and below 2**63)")
    if first < 0:
        raise ValueError(f"{operation}: first is {first} (right: at least 0)")


def _threshold(probability: float) -> int:
    """The smallest 32-bit word that keeps."""
    return min(round(probability * 2**32), LOW)


def _philox(first: int, count: int, key: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """The four words of blocks first … first + count - 1, each the low half of an int64;
    the high halves hold anything.

    A product of 32-bit words wraps around in an int64, whose bits are right all the same; its low half is the
    product's low word, and shifted down its high one, so that only a factor needs the other half cleared.
    """
    a = torch.arange(first, first + count, dtype=torch.int64, device=device)
    b, c, d, high = a >> 32, torch.zeros_like(a), torch.zeros_like(a), torch.empty_like(a)
    key_a, key_c = key & LOW, key >> 32
    for _ in range(10):
        a.bitwise_and_(LOW).mul_(0xD2511F53)
        c.bitwise_and_(LOW).mul_(0xCD9E8D57)
        b.bitwise_xor_(torch.bitwise_right_shift(c, 32, out=high)).bitwise_xor_(key_a)
        d.bitwise_xor_(torch.bitwise_right_shift(a, 32, out=high)).bitwise_xor_(key_c)
        a, b, c, d = b, c, d, a
        key_a, key_c = (key_a + 0x9E3779B9) & LOW, (key_c + 0xBB67AE85) & LOW
    return a, b, c, d


@triton.jit
def _keep(
    first_of_row,
    block,
    column,
    threshold,
    key,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The mask of a tile: the [ROWS, BLOCK] elements from column `block` of rows whose
    first positions are [ROWS, 1].
    """
    if ALIGNED:
        counter = (first_of_row + block) // 4 + tl.arange(0, BLOCK // 4)[None, :]
    else:
        position = first_of_row + column
        counter = position // 4
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    a, b, c, d = tl.philox(key, low, high, zero, zero)
    if ALIGNED:
        word = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS, BLOCK))
    else:
        lane = position % 4
        word = tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))
    return word >= threshold.to(tl.uint32)


@triton.jit(do_not_specialize=["first", "threshold", "key"])
def _forward_kernel(
    x,
    bias,
    residual,
    y,
    rows,
    features,
    x_stride,
    residual_stride,
    column_blocks,
    first: tl.int64,
    threshold: tl.int64,
    key: tl.int64,
    factor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    DROP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
):
    # Neighbours in a row are neighbouring programs: memory is walked through in order.
    block = tl.program_id(0) % column_blocks * BLOCK
    row = (tl.program_id(0) // column_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = block + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < features)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + column, mask=column < features, other=0.0).to(tl.float32)
    if DROP:
        value = tl.where(
            _keep(first + row * features, block, column, threshold, key, ROWS, BLOCK, ALIGNED), value, 0.0
        )
    value *= factor
    if ADD:
        value += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * features + column, value, mask=inside)


@triton.jit(do_not_specialize=["first", "threshold", "key"])
def _backward_kernel(
    grad_y,
    grad_x,
    grad_bias_parts,
    rows,
    features,
    grad_stride,
    column_blocks,
    rows_per_program,
    first: tl.int64,
    threshold: tl.int64,
    key: tl.int64,
    factor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    DROP: tl.constexpr,
    SUM_BIAS: tl.constexpr,
):
    chunk = tl.program_id(0) // column_blocks
    block = tl.program_id(0) % column_blocks * BLOCK
    column = block + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, rows_per_program, ROWS):
        row = chunk.to(tl.int64) * rows_per_program + start + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < features)
        grad = tl.load(grad_y + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32) * factor
        if DROP:
            grad = tl.where(
                _keep(first + row * features, block, column, threshold, key, ROWS, BLOCK, ALIGNED), grad, 0.0
            )
        tl.store(grad_x + row * features + column, grad, mask=inside)
        if SUM_BIAS:
            total += grad
    if SUM_BIAS:
        column = block + tl.arange(0, BLOCK)
        tl.store(grad_bias_parts + chunk * features + column, tl.sum(total, 0), mask=column < features)


def launch_options(features: int) -> dict[str, int]:
    """Compile-time sizes of both kernels: tiles of `TILE` elements, several rows of a short one."""
    block = max(min(triton.next_power_of_2(features), MAX_BLOCK), 4)  # at least one Philox block
    return {"ROWS": max(TILE // block, 1), "BLOCK": block, "num_warps": 4}


class _BiasDropoutResidual(torch.autograd.Function):
    """T tokens, F features; saves nothing but the draw's name.

    forward      y [T, F]  = r [T, F] + a m (x [T, F] + b [F]) / (1 - p)
    grad of x      [T, F]  = a m dy [T, F] / (1 - p)
    grad of b      [F]     = sum over P programs of parts [P, F], fp32
    grad of r      [T, F]  = dy, the same tensor
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        probability: float,
        key: int,
        first: int,
        scale: float,
    ) -> torch.Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        bias = None if bias is None else bias.contiguous()
        residual = residual if residual is None or residual.stride(1) == 1 else residual.contiguous()
        (rows, features), options = x.shape, launch_options(x.shape[1])
        ctx.draw = (first, _threshold(probability), key, scale / (1.0 - probability))
        ctx.options = options | {"ALIGNED": features % 4 == 0 and first % 4 == 0, "DROP": probability > 0.0}
        ctx.bias_dtype = None if bias is None else bias.dtype
        y = torch.empty((rows, features), dtype=x.dtype, device=x.device)
        blocks = triton.cdiv(features, options["BLOCK"])
        residual_stride = 0 if residual is None else residual.stride(0)
        with torch.cuda.device_of(x):
            _forward_kernel[(triton.cdiv(rows, options["ROWS"]) * blocks,)](
                x,
                bias,
                residual,
                y,
                rows,
                features,
                x.stride(0),
                residual_stride,
                blocks,
                *ctx.draw,
                HAS_BIAS=bias is not None,
                ADD=residual is not None,
                **ctx.options,
            )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_y = grads[0] if grads[0].stride(1) == 1 else grads[0].contiguous()
        (rows, features), rows_per_program = grad_y.shape, ctx.options["ROWS"]
        blocks = triton.cdiv(features, ctx.options["BLOCK"])
        # as many programs as run at once, each for as many rows as that takes
        if sum_bias := ctx.needs_input_grad[1]:
            programs = resident_programs(grad_y.device, BACKWARD_PROGRAMS, blocks)
            rows_per_program *= triton.cdiv(rows, programs * rows_per_program)
        chunks = triton.cdiv(rows, rows_per_program)
        grad_x = torch.empty((rows, features), dtype=grad_y.dtype, device=grad_y.device)
        parts = (
            torch.empty((chunks, features), dtype=torch.float32, device=grad_y.device) if sum_bias else None
        )
        with torch.cuda.device_of(grad_y):
            _backward_kernel[(chunks * blocks,)](
                grad_y,
                grad_x,
                parts,
                rows,
                features,
                grad_y.stride(0),
                blocks,
                rows_per_program,
                *ctx.draw,
                SUM_BIAS=sum_bias,
                **ctx.options,
            )
        grad_bias = None if parts is None else add_parts(parts[None], ctx.bias_dtype)[0]
        return grad_x, grad_bias, grads[0] if ctx.needs_input_grad[2] else None, None, None, None, None
