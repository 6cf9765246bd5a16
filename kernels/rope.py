"""Rotary position embedding, fused: one read and one write (Su et al. 2021,
https://arxiv.org/abs/2104.09864).

Feature i of a head is paired with feature i + head/2, and the pair at position t is turned by the angle a = t
f_i:

    forward    y1 = x1 cos a - x2 sin a,  y2 = x2 cos a + x1 sin a
    backward   the rotation by -a: dx1 = dy1 cos a + dy2 sin a,  dx2 = dy2 cos a - dy1 sin a

Nothing is saved but the tables. `rope` turns one tensor; `rope_qkv` takes a projection's queries, keys and
values apart, turns the first two and leaves all three packed, so that the projection itself can be freed, and
puts their gradients together again. With `norms` it norms queries and keys first (Dehghani et al. 2023),
which needs the projection again in backward:

    forward    n = w x r,  r = 1 / sqrt(mean(x²) + eps)                      of a head's features, then turned
    backward   g = w dn;  dx = r (g - x r mean(g x r));  dw = sum of dn x r over tokens and heads

A program owns one token and as many of its heads as fill a tile; both halves of a head are in it. It leaves
its part of dw to PyTorch's sum: no atomics.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megacore.kernels.dispatch import Implementation, check_shape, use_triton
from megacore.kernels.layernorm import rms_norm_eager

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch brings no Triton
    from megacore.kernels.absent import tl, triton

Norms = tuple[torch.Tensor, torch.Tensor, float]

TILE = 2048  # elements of half a tile: 16 pairs a thread


def rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    in_place: bool = False,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """Turns the feature pairs of ``[batch, heads, seq, head]`` by their position's angles, in fp32 at least.

    x: any floating dtype, which the result has too, and any strides, whose order the result keeps (heads that
    are no rows in
        memory are copied first).
    cos, sin: ``[seq, head]``, their second half like their first, which alone is read; fp32 (fp64 for eager
    in fp64).
    in_place: overwrite x and return it. Backward needs no x; what else may need it, autograd checks, and
    refuses parts of a split.
    Raises ValueError for a shape, dtype or device that the implementation cannot take.
    """
    check_shape(
        "rope", "x", x, "[batch, heads, seq, head] with an even head", x.dim() == 4 and x.shape[3] % 2 == 0
    )
    _check_tables("rope", cos, sin, x.shape[2], x.shape[3])
    if in_place and x.requires_grad and x.is_leaf and torch.is_grad_enabled():
        raise ValueError(
            "rope: x is a leaf that requires grad, which autograd does not let change (right: in_place=False)"
        )
    if (
        use_triton("rope", implementation, x=x, cos=cos, sin=sin)
        and x.numel()
        and not (in_place and x.stride(3) != 1)
    ):
        return _Rope.apply(x, cos, sin, in_place)
    y = rope_eager(x, cos, sin)
    return x.copy_(y) if in_place else y


def rope_eager(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The reference in plain PyTorch; x ``[batch, heads, seq, head]``, tables ``[seq, head]``."""
    half = x.shape[-1] // 2
    cos, sin = cos[:, :half], sin[:, :half]
    # the result keeps that order, else attention's output would need a copy
    by_token = x.stride(1) < x.stride(2)
    if by_token:
        x, cos, sin = x.transpose(1, 2), cos[:, None], sin[:, None]
    first, second = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, -1)
    y = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
    return y.transpose(1, 2) if by_token else y


def rope_qkv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    norms: Norms | None = None,
    implementation: Implementation = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys turned as by `rope`, and values, from the projection that holds them in groups.

    qkv: ``[batch, seq, kv heads, group + 2, head]``, contiguous: of each group its queries, then its key,
    then its value.
    norms: weights ``[head]`` of the RMS norms of queries and of keys, in one dtype, and their eps.
    Returns q ``[batch, kv heads · group, seq, head]``, k and v ``[batch, kv heads, seq, head]``, in memory
    token by token.
    Raises ValueError for a shape, dtype, layout or device that the implementation cannot take.
    """
    right = "[batch, seq, kv heads, group + 2, head] with an even head"
    check_shape("rope_qkv", "qkv", qkv, right, qkv.dim() == 5 and qkv.shape[3] > 2 and qkv.shape[4] % 2 == 0)
    _check_tables("rope_qkv", cos, sin, qkv.shape[1], qkv.shape[4])
    if not qkv.is_contiguous():
        raise ValueError(f"rope_qkv: qkv has strides {list(qkv.stride())} (right: contiguous)")
    q_weight, k_weight, eps = norms or (None, None, 0.0)
    for name, weight in (("the queries' weight", q_weight), ("the keys' weight", k_weight)):
        if weight is not None:
            check_shape(
                "rope_qkv",
                name,
                weight,
                f"[{qkv.shape[4]}], a head's features",
                weight.shape == qkv.shape[4:],
            )
    if (
        use_triton(
            "rope_qkv", implementation, qkv=qkv, cos=cos, sin=sin, q_weight=q_weight, k_weight=k_weight
        )
        and qkv.numel()
    ):
        return _RopeQKV.apply(qkv, cos, sin, q_weight, k_weight, eps)
    return rope_qkv_eager(qkv, cos, sin, norms)


def rope_qkv_eager(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norms: Norms | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The reference in plain PyTorch; qkv ``[batch, seq, kv heads, group + 2, head]``."""
    q, k, v = (t.flatten(2, 3) for t in qkv.split([qkv.shape[3] - 2, 1, 1], 3))
    if norms is not None:
        q, k = (rms_norm_eager(x, weight, norms[2]) for x, weight in zip((q, k), norms[:2], strict=True))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return rope_eager(q, cos, sin), rope_eager(k, cos, sin), v


def _check_tables(operation: str, cos: torch.Tensor, sin: torch.Tensor, seq: int, head: int) -> None:
    for name, table in (("cos", cos), ("sin", sin)):
        check_shape(
            operation, name, table, f"[{seq}, {head}], positions and features", table.shape == (seq, head)
        )
        if table.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{operation}: {name} is {table.dtype} (right: fp32, or fp64 for eager)")


@triton.jit
def _turn(first, second, c, s, BACKWARD: tl.constexpr):
    if BACKWARD:
        s = -s
    return first * c - second * s, second * c + first * s


@triton.jit
def _angles(cos, sin, position, pair, HALF: tl.constexpr):
    """cos and sin of one position, [1, pairs]."""
    table = position.to(tl.int64) * (2 * HALF) + pair
    return tl.load(cos + table, mask=pair < HALF, other=1.0), tl.load(
        sin + table, mask=pair < HALF, other=0.0
    )


@triton.jit
def _rope_kernel(
    x,
    y,
    cos,
    sin,
    heads,
    seq,
    x_batch,
    x_head,
    x_seq,
    y_batch,
    y_head,
    y_seq,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    batch, position = (tl.program_id(0) // seq).to(tl.int64), (tl.program_id(0) % seq).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]).to(tl.int64)
    pair = tl.arange(0, PAIRS)[None, :]
    inside = (head < heads) & (pair < HALF)
    c, s = _angles(cos, sin, position, pair, HALF)
    x += batch * x_batch + head * x_head + position * x_seq + pair
    first = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + HALF, mask=inside, other=0.0).to(tl.float32)
    first, second = _turn(first, second, c, s, BACKWARD)
    y += batch * y_batch + head * y_head + position * y_seq + pair
    tl.store(y, first, mask=inside)
    tl.store(y + HALF, second, mask=inside)


@triton.jit
def _weights(q_weight, k_weight, is_q, pair, HALF: tl.constexpr):
    """The norm's weights of each head's features in both halves, [heads, pairs]."""
    known = pair < HALF
    of_q = tl.load(q_weight + pair, mask=known, other=0.0).to(tl.float32)
    of_k = tl.load(k_weight + pair, mask=known, other=0.0).to(tl.float32)
    more_q = tl.load(q_weight + HALF + pair, mask=known, other=0.0).to(tl.float32)
    more_k = tl.load(k_weight + HALF + pair, mask=known, other=0.0).to(tl.float32)
    return tl.where(is_q, of_q, of_k), tl.where(is_q, more_q, more_k)


@triton.jit
def _normed(first, second, eps, HALF: tl.constexpr):
    """x r of each head, in both halves, and r."""
    r = 1.0 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1))[:, None] / (2 * HALF) + eps)
    return first * r, second * r, r


@triton.jit
def _rope_qkv_kernel(
    qkv,
    q,
    k,
    v,
    cos,
    sin,
    x,
    q_weight,
    k_weight,
    parts,
    eps,
    slots,
    seq,
    q_batch,
    q_head,
    q_seq,
    k_batch,
    k_head,
    k_seq,
    v_batch,
    v_head,
    v_seq,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """A slot is a head of qkv, whose kv head is slot // (GROUP + 2).

    Backward reads q, k, v and writes qkv; with norms it reads what forward had as qkv, x, too, and writes a
    row of `parts`: those of both weights' gradients.
    """
    batch, position = (tl.program_id(0) // seq).to(tl.int64), (tl.program_id(0) % seq).to(tl.int64)
    slot = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    kv_head, member = (slot // (GROUP + 2)).to(tl.int64), slot % (GROUP + 2)
    inside = (slot < slots) & (pair < HALF)
    is_q, is_k, is_v = inside & (member < GROUP), inside & (member == GROUP), inside & (member > GROUP)
    c, s = _angles(cos, sin, position, pair, HALF)
    qkv += (tl.program_id(0).to(tl.int64) * slots + slot) * (2 * HALF) + pair
    q += batch * q_batch + (kv_head * GROUP + member) * q_head + position * q_seq + pair
    k += batch * k_batch + kv_head * k_head + position * k_seq + pair
    v += batch * v_batch + kv_head * v_head + position * v_seq + pair
    if BACKWARD:  # of three loads two are masked off: they cost no traffic
        first = (
            tl.load(q, mask=is_q, other=0.0)
            + tl.load(k, mask=is_k, other=0.0)
            + tl.load(v, mask=is_v, other=0.0)
        )
        second = tl.load(q + HALF, mask=is_q, other=0.0) + tl.load(k + HALF, mask=is_k, other=0.0)
        second += tl.load(v + HALF, mask=is_v, other=0.0)
        turned_first, turned_second = _turn(first.to(tl.float32), second.to(tl.float32), c, s, BACKWARD)
        if q_weight is not None:
            x += (tl.program_id(0).to(tl.int64) * slots + slot) * (2 * HALF) + pair
            x_first = tl.load(x, mask=inside, other=0.0).to(tl.float32)
            x_second = tl.load(x + HALF, mask=inside, other=0.0).to(tl.float32)
            x_first, x_second, r = _normed(x_first, x_second, eps, HALF)
            parts += (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * (
                4 * HALF
            ) + tl.arange(0, PAIRS)
            known = tl.arange(0, PAIRS) < HALF
            own_first, own_second = turned_first * x_first, turned_second * x_second
            tl.store(parts, tl.sum(tl.where(is_q, own_first, 0.0), 0), mask=known)
            tl.store(parts + HALF, tl.sum(tl.where(is_q, own_second, 0.0), 0), mask=known)
            tl.store(parts + 2 * HALF, tl.sum(tl.where(is_k, own_first, 0.0), 0), mask=known)
            tl.store(parts + 3 * HALF, tl.sum(tl.where(is_k, own_second, 0.0), 0), mask=known)
            w_first, w_second = _weights(q_weight, k_weight, is_q, pair, HALF)
            g_first, g_second = w_first * turned_first, w_second * turned_second
            mean = (tl.sum(g_first * x_first, 1) + tl.sum(g_second * x_second, 1))[:, None] / (2 * HALF)
            turned_first, turned_second = r * (g_first - x_first * mean), r * (g_second - x_second * mean)
        tl.store(qkv, tl.where(is_v, first, turned_first), mask=inside)
        tl.store(qkv + HALF, tl.where(is_v, second, turned_second), mask=inside)
    else:
        first, second = tl.load(qkv, mask=inside, other=0.0), tl.load(qkv + HALF, mask=inside, other=0.0)
        n_first, n_second = first.to(tl.float32), second.to(tl.float32)
        if q_weight is not None:
            w_first, w_second = _weights(q_weight, k_weight, is_q, pair, HALF)
            n_first, n_second, r = _normed(n_first, n_second, eps, HALF)
            n_first, n_second = n_first * w_first, n_second * w_second
        turned_first, turned_second = _turn(n_first, n_second, c, s, BACKWARD)
        tl.store(q, turned_first, mask=is_q)
        tl.store(q + HALF, turned_second, mask=is_q)
        tl.store(k, turned_first, mask=is_k)
        tl.store(k + HALF, turned_second, mask=is_k)
        tl.store(v, first, mask=is_v)
        tl.store(v + HALF, second, mask=is_v)


def launch_options(heads: int, head_size: int) -> dict[str, int]:
    """Compile-time sizes of both kernels, for so many heads a token: `TILE` pairs a
    program, or all heads if that is less.
    """
    pairs = triton.next_power_of_2(head_size // 2)
    heads = min(triton.next_power_of_2(heads), max(TILE // pairs, 1))
    return {
        "HALF": head_size // 2,
        "PAIRS": pairs,
        "HEADS": heads,
        "num_warps": min(max(heads * pairs // 512, 1), 4),
    }


def _turned(
    x: torch.Tensor, y: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool
) -> torch.Tensor:
    """y [batch, heads, seq, head], written over with x turned; both of any strides whose last is 1."""
    batch, heads, seq, head_size = x.shape
    options = launch_options(heads, head_size)
    grid = (batch * seq, triton.cdiv(heads, options["HEADS"]))
    with torch.cuda.device_of(x):
        _rope_kernel[grid](
            x, y, cos, sin, heads, seq, *x.stride()[:3], *y.stride()[:3], BACKWARD=backward, **options
        )
    return y


def _launch_qkv(
    qkv: torch.Tensor,
    qkv_parts: Sequence[torch.Tensor],
    tables: Sequence[torch.Tensor],
    norms: tuple[torch.Tensor | None, torch.Tensor | None, float],
    x: torch.Tensor | None = None,
    *,
    backward: bool,
) -> torch.Tensor | None:
    """Fills q, k, v [batch, heads, seq, head] from qkv [batch, seq, kv heads, group + 2,
    head]; or backward qkv from them.

    With norms, backward needs what forward had as qkv, `x`, and returns the gradients of both weights, [2,
    head] in fp32.
    """
    batch, seq, kv_heads, members, head_size = qkv.shape
    slots = kv_heads * members
    options = launch_options(slots, head_size)
    grid = (batch * seq, triton.cdiv(slots, options["HEADS"]))
    strides = [stride for part in qkv_parts for stride in part.stride()[:3]]
    parts = (
        qkv.new_empty(*grid, 2, head_size, dtype=torch.float32) if backward and norms[0] is not None else None
    )
    with torch.cuda.device_of(qkv):
        _rope_qkv_kernel[grid](
            qkv,
            *qkv_parts,
            *tables,
            x,
            *norms[:2],
            parts,
            norms[2],
            slots,
            seq,
            *strides,
            GROUP=members - 2,
            BACKWARD=backward,
            **options,
        )
    return None if parts is None else parts.sum((0, 1))


class _Rope(torch.autograd.Function):
    """x [batch, heads, seq, head] -> y, likewise; saves the tables. grad of x = dy turned back."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, in_place: bool
    ) -> torch.Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        if in_place:
            ctx.mark_dirty(x)
            return _turned(x, x, cos, sin, False)
        x = x if x.stride(3) == 1 else x.contiguous()
        return _turned(x, torch.empty_like(x), cos, sin, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        grad = grads[0] if grads[0].stride(3) == 1 else grads[0].contiguous()
        cos, sin = ctx.saved_tensors
        return _turned(grad, torch.empty_like(grad), cos, sin, True), None, None, None


class _RopeQKV(torch.autograd.Function):
    """B sequences of S tokens, K key/value heads with G queries each, head size D; saves
    the tables, with norms also qkv.

    forward      q [B, S, K G, D], k, v [B, S, K, D], transposed  = parts of qkv [B, S, K, G + 2, D], the
                 first two normed and turned
    grad of qkv  [B, S, K, G + 2, D]  = dq, dk turned back and through the norm, and dv, interleaved
    grad of w    [D]                  = sums over tokens and heads
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, ...]:
        batch, seq, kv_heads, slots, head_size = qkv.shape
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin, q_weight, k_weight, None if q_weight is None else qkv)
        ctx.shape, ctx.eps = qkv.shape, eps
        q, k, v = (
            qkv.new_empty(batch, seq, heads, head_size).transpose(1, 2)
            for heads in (kv_heads * (slots - 2), kv_heads, kv_heads)
        )
        _launch_qkv(qkv, (q, k, v), (cos, sin), (q_weight, k_weight, eps), backward=False)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = [grad if grad.stride(3) == 1 else grad.contiguous() for grad in grads]
        cos, sin, q_weight, k_weight, qkv = ctx.saved_tensors
        grad_qkv = parts[0].new_empty(ctx.shape)
        of_weights = _launch_qkv(
            grad_qkv, parts, (cos, sin), (q_weight, k_weight, ctx.eps), qkv, backward=True
        )
        if of_weights is None:
            return grad_qkv, None, None, None, None, None
        return grad_qkv, None, None, of_weights[0].to(q_weight.dtype), of_weights[1].to(k_weight.dtype), None
