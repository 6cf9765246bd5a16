"""Attention in parts, which are merged by their log-sum-exp (Rabe and Staats 2021;
Dao et al. 2022, FlashAttention).

    forward     o_i, l_i = attention of part i, log Σ exp(scores);   l = log Σ exp(l_i);   o = Σ exp(l_i - l)
                · o_i
    backward    each part by itself, from the merged o and l: p = exp(scores - l) is then the part's piece of
                the whole softmax

Shapes: q ``[batch, heads, queries, head]``, k and v ``[batch, kv heads, keys, head]``, o like q, l ``[batch,
heads, queries]``.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from megacore.context_parallel.scored import ScoredPart
from megacore.context_parallel.sharding import AttentionPart
from megacore.context_parallel.sinks import Sinks, add_sinks, sink_gradients
from megacore.context_parallel.varlen import Pack, add_attention, add_pack_gradients, suits_flash

aten = torch.ops.aten


class Merged:
    """The output and log-sum-exp of the parts so far, in fp32 at least.

    In memory the output's tokens come before its heads: the layer behind attention then keeps the same
    memory, and no copy. If each query is in one part, which is then `alone`, parts are copied, and not
    merged; the output is in the dtype of `q`.
    """

    def __init__(self, q: Tensor, *, alone: bool = False) -> None:
        (batch, heads, queries, head), wide = q.shape, torch.promote_types(q.dtype, torch.float32)
        shape = batch, queries, heads, head
        self.out = (q.new_empty(shape) if alone else q.new_zeros(shape, dtype=wide)).transpose(1, 2)
        # as a kernel for many lengths has it
        self.lse = q.new_full((heads, batch, queries), float("-inf"), dtype=wide).transpose(0, 1)
        self.alone = alone

    def add(
        self, q: Tensor, k: Tensor, v: Tensor, found: Iterable[AttentionPart | Pack], scale: float
    ) -> None:
        """Adds the attention of some parts."""
        for part in found:
            if isinstance(part, Pack):
                add_attention(self.out, self.lse, q, k, v, part, scale, alone=self.alone)
                continue
            rows = slice(None) if part.row is None else slice(part.row, part.row + 1)
            own = q[rows, :, part.queries], k[rows, :, part.keys], v[rows, :, part.keys]
            o, part_lse = (
                part.forward(*own, scale)
                if isinstance(part, ScoredPart)
                else forward(*own, part.causal, scale)
            )
            out, lse = self.out[rows, :, part.queries], self.lse[rows, :, part.queries]
            if self.alone:
                out.copy_(o)
                lse.copy_(part_lse)
                continue
            both = torch.logaddexp(lse, part_lse)  # finite: every query of a part has a key
            out.mul_((lse - both).exp_()[..., None]).addcmul_(
                o.to(out.dtype), (part_lse - both).exp_()[..., None]
            )
            lse.copy_(both)


def add_gradients(
    grads: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    found: Iterable[AttentionPart | Pack],
    scale: float,
) -> None:
    """Adds the gradients of some parts to those of q, k and v, given the gradient of the merged `out`.

    Where few parts share a query or a key, the sums may be in the tensors' own dtype; where many do, in fp32
    at least.
    """
    for part in found:
        if isinstance(part, Pack):
            add_pack_gradients(grads, grad, q, k, v, out, lse, part, scale)
            continue
        rows = slice(None) if part.row is None else slice(part.row, part.row + 1)
        at_q, at_k = (rows, slice(None), part.queries), (rows, slice(None), part.keys)
        own = grad[at_q], q[at_q], k[at_k], v[at_k], out[at_q], lse[at_q]
        found_grads = (
            part.backward(*own, scale) if isinstance(part, ScoredPart) else backward(*own, part.causal, scale)
        )
        for total, found_grad, at in zip(grads, found_grads, (at_q, at_k, at_k), strict=True):
            total[at].add_(found_grad)


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of one part, and the log-sum-exp of its scores: by PyTorch's kernel where there
    is one, else by plain products.
    """
    if has_kernel(q) and q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    if has_kernel(q) and prefers_cudnn(q, k, v, causal, scale):
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
        return out, lse.squeeze(-1)
    if has_kernel(q):
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse
    scores = plain_scores(q, k, causal, scale)
    return scores.softmax(-1).to(q.dtype) @ for_queries(v, q), scores.logsumexp(-1)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of one part's q, k and v, from the merged output and log-sum-exp."""
    if has_kernel(q) and q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    if has_kernel(q):
        none = q.new_empty(0, dtype=torch.int64)  # of dropout, which attention has none of
        # kernels read l as one block of memory, also where it is a part's
        lse, sizes = lse.contiguous(), (q.shape[2], k.shape[2])
        if prefers_cudnn(q, k, v, causal, scale):
            lse = lse.unsqueeze(-1)
            return aten._scaled_dot_product_cudnn_attention_backward(
                grad, q, k, v, out, lse, none, none, None, None, None, *sizes, 0.0, causal, scale=scale
            )
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, *sizes, 0.0, causal, none, none, scale=scale
        )
    keys, values, wide = for_queries(k, q), for_queries(v, q), lse.dtype
    p = (plain_scores(q, k, causal, scale) - lse[..., None]).exp()
    delta = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    ds = (p * ((grad @ values.transpose(-2, -1)).to(wide) - delta)).to(q.dtype) * scale
    # of the keys and values that each query head sees
    of_queries = (ds.transpose(-2, -1) @ q, p.to(q.dtype).transpose(-2, -1) @ grad)
    grad_k, grad_v = (g.unflatten(1, (k.shape[1], -1)).sum(2) for g in of_queries)
    return ds @ keys, grad_k, grad_v


def has_kernel(q: Tensor) -> bool:
    """Whether PyTorch has a FlashAttention, which gives the log-sum-exp, for tensors like `q`."""
    if q.device.type in ("cuda", "meta"):  # a dry run stands for a GPU
        return suits_flash(q)
    return q.device.type == "cpu"


def prefers_cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> bool:
    """Whether PyTorch itself would take cuDNN's kernel for these tensors, as on Hopper and later: it
    is faster than FlashAttention 2.
    """
    if q.device.type != "cuda":  # a dry run's tensors have no device to ask
        return False
    chosen = torch._fused_sdp_choice(
        q, k, v, None, 0.0, causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return chosen == SDPBackend.CUDNN_ATTENTION.value  # type: ignore[attr-defined]


def for_queries(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values, each as often as query heads share it."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def plain_scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """``scale · q kᵀ``, masked, in fp32 at least."""
    scores = (q @ for_queries(k, q).transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    return (
        scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), float("-inf"))
        if causal
        else scores
    )


class DocumentAttention(torch.autograd.Function):
    """Attention in parts on one rank; `alone`: each query is in one of them.

    Saved: q, k, v, o in their dtype, and l.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        found: list[AttentionPart | Pack],
        scale: float,
        alone: bool,
        sinks: Sinks = None,
    ) -> Tensor:
        merged = Merged(q, alone=alone)
        merged.add(q, k, v, found, scale)
        add_sinks(merged.out, merged.lse, sinks)
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merged.lse, sinks)
        ctx.found, ctx.scale = found, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        wide = any(isinstance(part, ScoredPart) for part in ctx.found)  # of which several share a key
        grads = zeros_like(q), zeros_like(k, wide=wide), zeros_like(v, wide=wide)
        add_gradients(grads, grad, q, k, v, out, lse, ctx.found, ctx.scale)
        return (
            *(total.to(q.dtype) for total in grads),
            None,
            None,
            None,
            sink_gradients(grad, out, lse, sinks),
        )


def zeros_like(x: Tensor, *, wide: bool = False) -> Tensor:
    """Zeros to sum gradients of `x` ``[batch, heads, tokens, head]`` in, token by token in
    memory; `wide`: in fp32 at least.
    """
    dtype = torch.promote_types(x.dtype, torch.float32) if wide else x.dtype
    return torch.zeros_like(x.transpose(1, 2), dtype=dtype, memory_format=torch.contiguous_format).transpose(
        1, 2
    )
