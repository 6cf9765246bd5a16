"""Splits the output of the layer that makes queries, keys and values, and joins its gradient in one pass.

    forward    q, k, v = views of qkv
    backward   dqkv = the heads of dq, dk and dv in the order of qkv,  db = sum of dqkv over the tokens

Autograd would join the three gradients, and the layer would then read the result once more to sum the
gradient of its bias. Here that sum is made while the gradients are joined.

A program owns a block of columns and walks down many rows, as in the backward pass of gelu.py. It keeps its
part of db in fp32: one row of partial sums a program, added up in a second launch, so that the result does
not depend on timing.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore.kernels.dispatch import Implementation, check_shape, resident_programs, use_triton
from megacore.kernels.partial_sums import add_parts

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch brings no Triton
    from megacore.kernels.absent import tl, triton

TILE = 1024  # elements of a tile: 8 a thread, one 16-byte load of bf16
THREADS = 128
BACKWARD_PROGRAMS = 8  # on each multiprocessor at once


def split_heads(
    qkv: Tensor, bias: Tensor, *, implementation: Implementation = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[batch, heads, seq, head]``, without a copy unless queries share a key.

    qkv: ``[batch, seq, kv heads, group + 2, head]``, contiguous: of each key/value head its `group` queries,
        its key, its value.
    bias: ``[kv heads, group + 2, head]``, which the layer that made qkv has added as a constant. It gets its
        gradient here, summed in fp32.
    Raises ValueError for a shape, dtype or device that the implementation cannot take.
    """
    right = "[batch, seq, kv heads, group + 2, head]"
    check_shape("split_heads", "qkv", qkv, right, qkv.dim() == 5 and qkv.shape[3] > 2)
    check_shape("split_heads", "bias", bias, f"{list(qkv.shape[2:])}, as in qkv", bias.shape == qkv.shape[2:])
    if use_triton("split_heads", implementation, qkv=qkv, bias=bias) and qkv.numel():
        return _SplitHeads.apply(qkv, bias)
    return split_heads_eager(qkv, bias)


def split_heads_eager(qkv: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The reference in plain PyTorch. It adds zero, so that autograd gives the bias its gradient."""
    return _split(qkv + (bias - bias.detach()))


def _split(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.split([qkv.shape[3] - 2, 1, 1], dim=3)
    return q.flatten(2, 3).transpose(1, 2), k.flatten(2, 3).transpose(1, 2), v.flatten(2, 3).transpose(1, 2)


@triton.jit
def _join_kernel(
    q,
    k,
    v,
    qkv,
    bias_parts,
    rows,
    seq,
    features,
    q_batch,
    q_head,
    q_seq,
    k_batch,
    k_head,
    k_seq,
    v_batch,
    v_head,
    v_seq,
    column_blocks,
    rows_per_program,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM_BIAS: tl.constexpr,
):
    """Read the gradients of q, k, v; write the gradient of qkv [rows, features] and a row of bias_parts."""
    chunk = tl.program_id(0) // column_blocks
    column = tl.program_id(0) % column_blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
    slot, feature = column // HEAD, column % HEAD
    kv_head, member = (slot // (GROUP + 2)).to(tl.int64), slot % (GROUP + 2)
    in_columns = column < features
    is_q = in_columns & (member < GROUP)
    is_k = in_columns & (member == GROUP)
    is_v = in_columns & (member > GROUP)
    q += (kv_head * GROUP + member) * q_head + feature
    k += kv_head * k_head + feature
    v += kv_head * v_head + feature
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, rows_per_program, ROWS):
        row = chunk.to(tl.int64) * rows_per_program + start + tl.arange(0, ROWS)[:, None]
        in_rows = row < rows
        batch, position = row // seq, row % seq
        # Of three loads two are masked off: they cost no traffic.
        grad = tl.load(q + batch * q_batch + position * q_seq, mask=in_rows & is_q, other=0.0)
        grad += tl.load(k + batch * k_batch + position * k_seq, mask=in_rows & is_k, other=0.0)
        grad += tl.load(v + batch * v_batch + position * v_seq, mask=in_rows & is_v, other=0.0)
        tl.store(qkv + row * features + column, grad, mask=in_rows & in_columns)
        if SUM_BIAS:
            total += grad.to(tl.float32)
    if SUM_BIAS:
        column = tl.program_id(0) % column_blocks * BLOCK + tl.arange(0, BLOCK)
        tl.store(bias_parts + chunk * features + column, tl.sum(total, 0), mask=column < features)


def launch_options(features: int) -> dict[str, int]:
    """Compile-time sizes of the kernel: tiles of `TILE` elements, several rows of a short one."""
    block = min(triton.next_power_of_2(features), TILE)
    return {"ROWS": TILE // block, "BLOCK": block, "num_warps": THREADS // (64 if torch.version.hip else 32)}


class _SplitHeads(torch.autograd.Function):
    """B sequences of S tokens, K key/value heads with G queries each, head size D; saves nothing.

    forward      q [B, K G, S, D], k, v [B, K, S, D]  = views of qkv [B, S, K, G + 2, D]
    grad of qkv  [B, S, K, G + 2, D]                  = dq, dk and dv, interleaved
    grad of b    [K, G + 2, D]                        = sum over P programs of parts [P, K (G + 2) D], fp32
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.shape, ctx.bias_dtype = qkv.shape, bias.dtype
        return _split(qkv)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        grads = tuple(grad if grad.stride(3) == 1 else grad.contiguous() for grad in grads)
        batch, seq, kv_heads, members, head_size = ctx.shape
        rows, features = batch * seq, kv_heads * members * head_size
        options = launch_options(features)
        blocks = triton.cdiv(features, options["BLOCK"])
        programs = resident_programs(grads[0].device, BACKWARD_PROGRAMS, blocks)
        rows_per_program = options["ROWS"] * triton.cdiv(rows, programs * options["ROWS"])
        chunks = triton.cdiv(rows, rows_per_program)
        grad_qkv = grads[0].new_empty(ctx.shape)
        sum_bias = ctx.needs_input_grad[1]
        parts = grads[0].new_empty(chunks, features, dtype=torch.float32) if sum_bias else None
        strides = [stride for grad in grads for stride in grad.stride()[:3]]
        with torch.cuda.device_of(grad_qkv):
            _join_kernel[(chunks * blocks,)](
                *grads,
                grad_qkv,
                parts,
                rows,
                seq,
                features,
                *strides,
                blocks,
                rows_per_program,
                GROUP=members - 2,
                HEAD=head_size,
                SUM_BIAS=sum_bias,
                **options,
            )
        if parts is None:
            return grad_qkv, None
        return grad_qkv, add_parts(parts[None], ctx.bias_dtype).view(ctx.shape[2:])
