"""Scaled softmax of attention scores under a causal mask: one read and one write instead of a
scale, a mask, a softmax and casts.

Row i of a causal [query, key] score matrix sees keys j <= i + key - query: the whole lower triangle when
query = key, and all that came before when the queries are the last ones of a longer sequence.

    forward    y[j]  = exp(s x[j] - m) / sum_j exp(s x[j] - m)   over the visible j, 0 beyond;  m = max_j s
               x[j]
    backward   dx[j] = s y[j] (dy[j] - sum_k dy[k] y[k])

One program owns one row, or several short ones. It reads only what a causal row sees, keeps statistics in
fp32, and writes the zeros beyond. A row that fits in one block stays in registers between its single read and
its write; a longer one is read twice, its maximum and sum gathered online (Milakov & Gimelshein, 2018,
https://arxiv.org/abs/1805.02867).
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

MAX_BLOCK = 16384  # elements of a row held in registers at once
THREADS = 128  # of a program that takes several short rows


def causal_softmax(scores: Tensor, scale: float, implementation: Implementation = "auto") -> Tensor:
    """Softmax of `scale * scores` over the keys that each query may see; exact zeros elsewhere.

    scores: [batch, heads, query, key] with query <= key, of any floating dtype; the result has its shape and
    dtype. Scores that are not contiguous are copied first.
    Raises ValueError for a shape, dtype or device that the implementation cannot take.
    """
    fits = scores.dim() == 4 and scores.shape[2] <= scores.shape[3]
    check_shape("causal_softmax", "scores", scores, "[batch, heads, query, key] with query <= key", fits)
    if not scores.is_floating_point():
        raise ValueError(f"causal_softmax: scores are {scores.dtype} (right: a floating dtype)")
    if use_triton("causal_softmax", implementation, scores=scores):
        return _Softmax.apply(scores, scale)
    return causal_softmax_eager(scores, scale)


def causal_softmax_eager(scores: Tensor, scale: float) -> Tensor:
    """The reference: the same function in plain PyTorch, statistics in fp32 or wider;
    scores [batch, heads, query, key].
    """
    query_size, key_size = scores.shape[-2:]
    visible = torch.ones(query_size, key_size, dtype=torch.bool, device=scores.device).tril(
        key_size - query_size
    )
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    return wide.masked_fill(~visible, float("-inf")).softmax(-1).to(scores.dtype)


@triton.jit
def _visible_keys(row, query_size, key_size):
    """How many keys, from the first, these rows of the flattened causal [batch *
    heads * query, key] matrix see.
    """
    return row % query_size + key_size - query_size + 1


@triton.jit
def _load_limit(visible, key_size):
    """Where loads end: at a multiple of 16 beyond the visible keys, for a ragged
    end would forbid 16-byte loads.
    """
    return tl.minimum((visible + 15) // 16 * 16, key_size)


@triton.jit
def _load_scaled(scores, key, visible, limit, in_rows, scale):
    """s x of these keys, -inf where it is not seen; and where it is."""
    x = tl.load(scores + key, mask=in_rows & (key < limit), other=0.0).to(tl.float32) * scale
    seen = in_rows & (key < visible)
    return tl.where(seen, x, float("-inf")), seen


@triton.jit
def _forward_kernel(
    scores,
    probabilities,
    scale,
    rows,
    query_size,
    key_size,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    in_rows = row < rows
    lane = tl.arange(0, BLOCK)[None, :]
    offset = row.to(tl.int64) * key_size  # passes 2^31 at ordinary sizes
    scores += offset
    probabilities += offset
    visible = _visible_keys(row, query_size, key_size)
    limit = _load_limit(visible, key_size)
    end = tl.max(visible)
    if ONE_BLOCK:
        x, seen = _load_scaled(scores, lane, visible, limit, in_rows, scale)
        numerator = tl.exp(x - tl.max(x, 1)[:, None])
        y = tl.where(seen, numerator * (1.0 / tl.sum(numerator, 1)[:, None]), 0.0)
        tl.store(probabilities + lane, y, mask=in_rows & (lane < key_size))
    else:
        # Starting from the least finite number, not -inf, a first block of -inf scores gives exp(-inf) = 0
        # and no NaN.
        maximum = tl.full((ROWS,), -3.4028234663852886e38, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        for start in range(0, end, BLOCK):
            x, seen = _load_scaled(scores, start + lane, visible, limit, in_rows, scale)
            previous = maximum
            maximum = tl.maximum(previous, tl.max(x, 1))
            total = total * tl.exp(previous - maximum) + tl.sum(tl.exp(x - maximum[:, None]), 1)
        inverse = (1.0 / total)[:, None]
        for start in range(0, key_size, BLOCK):
            x, seen = _load_scaled(scores, start + lane, visible, limit, in_rows, scale)
            y = tl.where(seen, tl.exp(x - maximum[:, None]) * inverse, 0.0)
            tl.store(probabilities + start + lane, y, mask=in_rows & (start + lane < key_size))


@triton.jit
def _backward_kernel(
    probabilities,
    grad_output,
    grad_scores,
    scale,
    rows,
    query_size,
    key_size,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    in_rows = row < rows
    lane = tl.arange(0, BLOCK)[None, :]
    offset = row.to(tl.int64) * key_size
    probabilities += offset
    grad_output += offset
    grad_scores += offset
    visible = _visible_keys(row, query_size, key_size)
    limit = _load_limit(visible, key_size)
    end = tl.max(visible)
    if ONE_BLOCK:
        inside = in_rows & (lane < limit)
        y = tl.load(probabilities + lane, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(grad_output + lane, mask=inside, other=0.0).to(tl.float32)
        # a gradient of the zeros beyond, were it infinite, must not count
        dy = tl.where(lane < visible, dy, 0.0)
        dx = scale * y * (dy - tl.sum(dy * y, 1)[:, None])
        tl.store(grad_scores + lane, dx, mask=in_rows & (lane < key_size))
    else:
        inner = tl.zeros((ROWS,), tl.float32)
        for start in range(0, end, BLOCK):
            key = start + lane
            y = tl.load(probabilities + key, mask=in_rows & (key < limit), other=0.0).to(tl.float32)
            dy = tl.load(grad_output + key, mask=in_rows & (key < limit), other=0.0).to(tl.float32)
            inner += tl.sum(tl.where(key < visible, dy, 0.0) * y, 1)
        for start in range(0, key_size, BLOCK):
            key = start + lane
            y = tl.load(probabilities + key, mask=in_rows & (key < limit), other=0.0).to(tl.float32)
            dy = tl.load(grad_output + key, mask=in_rows & (key < limit), other=0.0).to(tl.float32)
            dx = scale * y * (tl.where(key < visible, dy, 0.0) - inner[:, None])
            tl.store(grad_scores + key, dx, mask=in_rows & (key < key_size))


def launch_options(key_size: int, elements: int = 32) -> dict[str, Any]:
    """Compile-time sizes for rows of `key_size`: so many elements a thread, several short rows a program."""
    block = min(triton.next_power_of_2(key_size), MAX_BLOCK)
    rows = max(THREADS * elements // block, 1) if key_size <= MAX_BLOCK else 1
    warps = min(max(rows * block // (32 * elements), 1), 16)
    return {"ROWS": rows, "BLOCK": block, "ONE_BLOCK": key_size <= MAX_BLOCK, "num_warps": warps}


class _Softmax(torch.autograd.Function):
    """(scores [batch, heads, query, key], scale) -> probabilities, likewise; saves only these."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, scale: float) -> Tensor:
        scores = scores.contiguous()
        probabilities = torch.empty_like(scores)
        query_size, key_size = scores.shape[-2:]
        if scores.numel():  # a launch of no programs is an error
            rows, options = scores.numel() // key_size, launch_options(key_size)
            with torch.cuda.device_of(scores):
                grid = (triton.cdiv(rows, options["ROWS"]),)
                _forward_kernel[grid](
                    scores, probabilities, float(scale), rows, query_size, key_size, **options
                )
        ctx.save_for_backward(probabilities)
        ctx.scale = float(scale)
        return probabilities

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (probabilities,) = ctx.saved_tensors
        grad_output = grads[0].contiguous()
        grad_scores = torch.empty_like(probabilities)
        query_size, key_size = probabilities.shape[-2:]
        if probabilities.numel():
            rows, options = probabilities.numel() // key_size, launch_options(key_size, elements=16)
            grid = (triton.cdiv(rows, options["ROWS"]),)
            _backward_kernel[grid](
                probabilities, grad_output, grad_scores, ctx.scale, rows, query_size, key_size, **options
            )
        return grad_scores, None
