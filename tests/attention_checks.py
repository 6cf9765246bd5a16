"""Attention within documents against its plain formula: what tests run on a CPU with a stand-in for
the GPU's kernel, and on a GPU.
"""

from itertools import pairwise
from unittest import mock

import torch
from torch import Tensor

from megacore.context_parallel import attention
from megacore.context_parallel import varlen as packed
from megacore.context_parallel.attention import Sequences
from megacore.context_parallel.ring_blocks import Merged, add_gradients, zeros_like
from megacore.context_parallel.sharding import Documents, parts, runs_of
from megacore.context_parallel.varlen import Pack
from megacore.distributed.communicator import SOLO

HEADS, KV_HEADS, SCALE = 4, 2, 0.3


def masked(q: Tensor, k: Tensor, v: Tensor, documents: Documents | None) -> Tensor:
    """Attention by its formula, with a mask of every pair of tokens."""
    seq = q.shape[2]
    seen = torch.ones(len(q), 1, seq, seq, dtype=torch.bool, device=q.device).tril()
    for row, bounds in enumerate(documents or ()):
        inside = torch.zeros(seq, seq, dtype=torch.bool, device=q.device)
        for start, stop in pairwise(bounds):
            inside[start:stop, start:stop] = True
        seen[row] &= inside
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    return (q @ k.transpose(-2, -1) * SCALE).masked_fill(~seen, float("-inf")).softmax(-1) @ v


def inputs(batch: int, seq: int, head: int) -> list[Tensor]:
    """q, k, v of whole sequences, and the gradient of the output, alike on every rank."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, heads, seq, head) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


# --- an exact stand-in for the kernel of many lengths -------------------------------------------------------


def seen_by(queries: int, keys: int, causal: bool) -> Tensor:
    """The last query sees the last key: a causal mask is aligned at the bottom right."""
    seen = torch.ones(queries, keys, dtype=torch.bool)
    return seen.tril(keys - queries) if causal else seen


def one(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """o and l ``[heads, queries]`` of one sequence ``[tokens, heads, head]``."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores = scores.masked_fill(~seen_by(len(q), len(k), causal), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def sequences_of(pack: Pack) -> list[tuple[slice, slice]]:
    """Where each part's queries and keys lie among those of the call, as the kernel
    reads it from the ends.
    """
    ends = [[int(end) for end in own] for own in (pack.query_ends, pack.key_ends)]
    assert [max(b - a for a, b in pairwise(own)) for own in ends] == [pack.most_queries, pack.most_keys]
    assert pack.query_ends.dtype == pack.key_ends.dtype == torch.int32
    return list(zip(*([slice(a, b) for a, b in pairwise(own)] for own in ends), strict=True))


def kernel(q: Tensor, k: Tensor, v: Tensor, pack: Pack, scale: float) -> tuple[Tensor, Tensor]:
    found = [one(q[at], k[seen], v[seen], pack.causal, scale) for at, seen in sequences_of(pack)]
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found], 1)


def kernel_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pack: Pack, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """From `out` and `lse`, which may be merged with other parts': by the formula
    for a piece of the whole softmax.
    """
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    for at, seen in sequences_of(pack):
        keys, values = (x[seen].repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[at], keys) * scale
        p = (
            (scores - lse[:, at, None])
            .exp()
            .masked_fill(~seen_by(scores.shape[1], scores.shape[2], pack.causal), 0.0)
        )
        delta = (grad[at] * out[at]).sum(-1).T[..., None]
        ds = p * (torch.einsum("qhd,khd->hqk", grad[at], values) - delta) * scale
        grads[0][at] = torch.einsum("hqk,khd->qhd", ds, keys)
        of_keys = torch.einsum("hqk,qhd->khd", ds, q[at]), torch.einsum("hqk,qhd->khd", p, grad[at])
        for total, own in zip(grads[1:], of_keys, strict=True):
            total[seen] = own.unflatten(1, (-1, group)).sum(2)
    return grads[0], grads[1], grads[2]


def standing_in() -> mock._patch:
    """All tensors are taken for a GPU's while it is entered, and the kernel is the one above."""
    return mock.patch.multiple(
        packed, takes_lengths=lambda q: True, kernel=kernel, kernel_backward=kernel_backward
    )


# --- checks -------------------------------------------------------------------------------------------------


def on_one_rank(
    documents: Documents, head: int, device: str, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """The output and the gradients of q, k and v, each beside the formula's in fp64."""
    *whole, grad = (x.to(device, dtype) for x in inputs(len(documents), documents[0][-1], head))
    here, right = [x.clone().requires_grad_() for x in whole], [x.double().requires_grad_() for x in whole]
    out = attention.attend(
        here[0], here[1], here[2], Sequences(documents[0][-1], SOLO, "gather", documents), SCALE
    )
    out.backward(grad)
    expected = masked(right[0], right[1], right[2], documents)
    expected.backward(grad.double())
    return [(out.detach(), expected.detach()), *((a.grad, b.grad) for a, b in zip(here, right, strict=True))]  # type: ignore[misc]


def on_context_ranks(
    documents: Documents, ranks: int, head: int, device: str, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """The same with each of the ranks' queries on all keys, one rank after the other: parts
    within and between pieces, no group.
    """
    seq = documents[0][-1]
    *whole, grad = (x.to(device, dtype) for x in inputs(len(documents), seq, head))
    q, k, v = whole
    right = [x.double().requires_grad_() for x in whole]
    expected = masked(right[0], right[1], right[2], documents)
    expected.backward(grad.double())
    sums, found = (zeros_like(k, wide=True), zeros_like(v, wide=True)), []
    everything = Sequences(seq, SOLO, "gather", documents).everything
    for rank in range(ranks):
        runs = runs_of(seq, ranks, rank, documents)
        own = torch.cat([torch.arange(run.start, run.stop) for run in runs]).to(device)
        queries = q[:, :, own]
        calls = packed.packed(parts(runs, everything, documents), queries, seq)
        merged = Merged(queries)
        merged.add(queries, k, v, calls, SCALE)
        out, grad_q = merged.out.to(dtype), zeros_like(queries, wide=True)
        add_gradients((grad_q, *sums), grad[:, :, own], queries, k, v, out, merged.lse, calls, SCALE)
        found += [(out, expected.detach()[:, :, own]), (grad_q, right[0].grad[:, :, own])]  # type: ignore[index]
    return [*found, *((own, x.grad) for own, x in zip(sums, right[1:], strict=True))]  # type: ignore[misc]


def worst(found: list[tuple[Tensor, Tensor]]) -> float:
    """The largest difference, relative to the largest number of its tensor."""
    return max(float((own.double() - right).detach().abs().max() / right.abs().max()) for own, right in found)
