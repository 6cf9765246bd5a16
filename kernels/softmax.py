"""Scaled causal softmax over attention scores, fused: one read and one write instead of scale, mask, softmax and casts.

Row i of a [query, key] score matrix sees keys j <= i + key - query: the whole lower triangle when query = key, and all
that came before when the queries are the last ones of a longer sequence.

    forward    y[j]  = exp(s x[j] - m) / sum_j exp(s x[j] - m)   over the visible j, 0 beyond;  m = max_j s x[j]
    backward   dx[j] = s y[j] (dy[j] - sum_k dy[k] y[k])

One program owns one row. It reads only what the row sees, keeps statistics in fp32, and writes the zeros beyond the
diagonal. A row that fits in one block stays in registers between its single read and its write; a longer one is read
twice, its maximum and sum gathered online (Milakov & Gimelshein, 2018, https://arxiv.org/abs/1805.02867).
"""

import warnings
from functools import cache
from typing import Any, Literal

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch brings no Triton
    triton = None

MAX_BLOCK = 8192  # elements of a row held in registers at once
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # fp64 is for proofs, where fp32 statistics are too coarse


def causal_softmax(scores: torch.Tensor, scale: float, implementation: Literal["auto", "triton", "eager"] = "auto") -> torch.Tensor:
    """Softmax of `scale * scores` over the keys that each query may see; exact zeros elsewhere.

    scores: [batch, heads, query, key] with query <= key, of any floating dtype; the result has its shape and dtype.
    implementation: `auto` is Triton on CUDA tensors of at most 32 bits, eager elsewhere.
    Raises ValueError for a shape, dtype or device that the implementation cannot take.
    """
    if scores.dim() != 4 or scores.shape[2] > scores.shape[3]:
        raise ValueError(f"causal_softmax: scores are {list(scores.shape)} (right: [batch, heads, query, key] with query <= key)")
    if implementation not in ("auto", "triton", "eager"):
        raise ValueError(f"causal_softmax: no implementation {implementation!r} (right: auto, triton or eager)")
    if implementation == "triton":
        if triton is None:
            raise ValueError("causal_softmax: Triton is not installed (right: pip install triton, or implementation='eager')")
        if scores.dtype not in TRITON_DTYPES:
            raise ValueError(f"causal_softmax: Triton kernel for {scores.dtype} (right: fp32, bf16 or fp16, or implementation='eager')")
        return _CausalSoftmax.apply(scores, scale)
    if implementation == "auto" and scores.is_cuda and scores.dtype in TRITON_DTYPES:
        if triton is not None:
            return _CausalSoftmax.apply(scores, scale)
        _notice_missing_triton()
    return causal_softmax_eager(scores, scale)


def causal_softmax_eager(scores: torch.Tensor, scale: float) -> torch.Tensor:
    """The reference: the same function in plain PyTorch, statistics in fp32 or wider; scores [batch, heads, query, key]."""
    query_size, key_size = scores.shape[-2:]
    visible = torch.ones(query_size, key_size, dtype=torch.bool, device=scores.device).tril(key_size - query_size)
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    return wide.masked_fill(~visible, float("-inf")).softmax(-1).to(scores.dtype)


@cache
def _notice_missing_triton() -> None:
    warnings.warn("Triton is not installed: causal_softmax runs unfused on this GPU (pip install triton)", stacklevel=3)


if triton is not None:

    @triton.jit
    def _visible_keys(row, query_size, key_size):
        """How many keys, from the first, this row of the flattened [batch * heads * query, key] matrix sees."""
        return (row % query_size + key_size - query_size + 1).to(tl.int32)

    @triton.jit
    def _forward_kernel(
        scores, probabilities, scale, query_size, key_size,
        BLOCK: tl.constexpr, ONE_BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)  # times key_size, it passes 2^31 at ordinary sizes
        visible = _visible_keys(row, query_size, key_size)
        scores += row * key_size
        probabilities += row * key_size
        lane = tl.arange(0, BLOCK)
        if ONE_BLOCK:
            x = tl.load(scores + lane, mask=lane < visible, other=float("-inf")).to(tl.float32) * scale
            numerator = tl.exp(x - tl.max(x, 0))
            y = tl.where(lane < visible, numerator / tl.sum(numerator, 0), 0.0)
            tl.store(probabilities + lane, y, mask=lane < key_size)
        else:
            # Starting from the least finite number, not -inf, a first block of -inf scores gives exp(-inf) = 0 and no NaN.
            maximum = tl.full((), -3.4028234663852886e38, tl.float32)
            total = tl.full((), 0.0, tl.float32)
            for start in range(0, visible, BLOCK):
                key = start + lane
                x = tl.load(scores + key, mask=key < visible, other=float("-inf")).to(tl.float32)
                x = tl.where(key < visible, x * scale, float("-inf"))
                previous = maximum
                maximum = tl.maximum(previous, tl.max(x, 0))
                total = total * tl.exp(previous - maximum) + tl.sum(tl.exp(x - maximum), 0)
            for start in range(0, key_size, BLOCK):
                key = start + lane
                x = tl.load(scores + key, mask=key < visible, other=0.0).to(tl.float32) * scale
                y = tl.where(key < visible, tl.exp(x - maximum) / total, 0.0)
                tl.store(probabilities + key, y, mask=key < key_size)

    @triton.jit
    def _backward_kernel(
        probabilities, grad_output, grad_scores, scale, query_size, key_size,
        BLOCK: tl.constexpr, ONE_BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        visible = _visible_keys(row, query_size, key_size)
        probabilities += row * key_size
        grad_output += row * key_size
        grad_scores += row * key_size
        lane = tl.arange(0, BLOCK)
        if ONE_BLOCK:
            y = tl.load(probabilities + lane, mask=lane < visible, other=0.0).to(tl.float32)
            dy = tl.load(grad_output + lane, mask=lane < visible, other=0.0).to(tl.float32)
            dx = scale * y * (dy - tl.sum(dy * y, 0))
            tl.store(grad_scores + lane, dx, mask=lane < key_size)
        else:
            inner = tl.full((), 0.0, tl.float32)
            for start in range(0, visible, BLOCK):
                key = start + lane
                y = tl.load(probabilities + key, mask=key < visible, other=0.0).to(tl.float32)
                dy = tl.load(grad_output + key, mask=key < visible, other=0.0).to(tl.float32)
                inner += tl.sum(dy * y, 0)
            for start in range(0, key_size, BLOCK):
                key = start + lane
                y = tl.load(probabilities + key, mask=key < visible, other=0.0).to(tl.float32)
                dy = tl.load(grad_output + key, mask=key < visible, other=0.0).to(tl.float32)
                tl.store(grad_scores + key, scale * y * (dy - inner), mask=key < key_size)


def launch_options(key_size: int) -> dict[str, Any]:
    """Compile-time sizes of both kernels for rows of `key_size`: about 16 elements a lane, one row a program."""
    block = min(triton.next_power_of_2(key_size), MAX_BLOCK)
    return {"BLOCK": block, "ONE_BLOCK": key_size <= MAX_BLOCK, "num_warps": min(max(block // 512, 1), 16)}


class _CausalSoftmax(torch.autograd.Function):
    """scores [batch, heads, query, key] -> probabilities, likewise; saves only the probabilities."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, scale: float) -> torch.Tensor:
        scores = scores.contiguous()
        probabilities = torch.empty_like(scores)
        query_size, key_size = scores.shape[-2:]
        if scores.numel():  # a launch of no programs is an error
            rows = scores.numel() // key_size
            _forward_kernel[(rows,)](scores, probabilities, scale, query_size, key_size, **launch_options(key_size))
        ctx.save_for_backward(probabilities)
        ctx.scale = scale
        return probabilities

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (probabilities,) = ctx.saved_tensors
        grad_output = grads[0].contiguous()
        grad_scores = torch.empty_like(probabilities)
        query_size, key_size = probabilities.shape[-2:]
        if probabilities.numel():
            rows = probabilities.numel() // key_size
            _backward_kernel[(rows,)](probabilities, grad_output, grad_scores, ctx.scale, query_size, key_size, **launch_options(key_size))
        return grad_scores, None
