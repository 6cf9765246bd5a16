"""Attention over the context ranks, which hold different tokens of the same
sequences: three ways, with one result.

    gather     keys and values of all ranks are gathered; again in backward, rather than kept, and their
               gradients scattered
    ring       keys and values go round the ranks, a rank's at a time, while the last ones are attended to
               (Liu et al. 2023)
    ulysses    sequences are exchanged for heads and back, so that each rank attends whole sequences (Jacobs
               et al. 2023)

A rank's k and v have n elements each. It sends, in forward and backward together, with c ranks:
gather 2·2n·(c-1) + 2n·(c-1), ring 2·2n·(c-1) + 2n·c, ulysses 2·(2·|q| + 2n)·(c-1)/c, and an fp32 number for
each query and head.
"""

from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from megacore.context_parallel.ring_blocks import DocumentAttention, Merged, add_gradients, zeros_like
from megacore.context_parallel.scored import Scoring, scored_parts
from megacore.context_parallel.sharding import AttentionPart, Documents, Run, Runs, parts, runs_by_rank
from megacore.context_parallel.sinks import Sinks, add_sinks, from_product, sink_gradients
from megacore.context_parallel.varlen import Pack, packed
from megacore.distributed.collectives import all_gather, reduce_scatter
from megacore.distributed.communicator import Group, Work


# Not frozen, as `Context` is not: PyTorch 2.11 would compile blocks again for other documents.
@dataclass
class Sequences:
    """The sequences that a forward pass computes on: their length, which of their tokens are
    here, and the documents in them.
    """

    seq_len: int
    group: Group  # the context ranks
    method: str  # gather, ring or ulysses
    documents: Documents | None = None
    found: dict[tuple[Runs, Runs, Scoring | None], list[AttentionPart | Pack]] = field(
        default_factory=dict, compare=False, repr=False
    )  # of all layers the same

    @cached_property
    def by_rank(self) -> tuple[Runs, ...]:
        """The tokens that each context rank holds."""
        return runs_by_rank(self.seq_len, self.group.size, self.documents)

    @property
    def own(self) -> Runs:
        """The tokens that this rank holds."""
        return self.by_rank[self.group.rank]

    @property
    def everything(self) -> Runs:
        """All tokens of the sequences."""
        return (Run(0, self.seq_len, 0),)

    def calls(
        self, queries: Runs, keys: Runs, q: Tensor, scoring: Scoring | None = None
    ) -> list[AttentionPart | Pack]:
        """The parts of attention between some queries and some keys, as they are
        computed on tensors like `q`.
        """
        at = queries, keys, scoring
        if at not in self.found and scoring is not None:
            self.found[at] = [*scored_parts(queries, keys, self.documents, scoring)]
        elif at not in self.found:
            self.found[at] = packed(
                parts(queries, keys, self.documents), q, sum(run.stop - run.start for run in keys)
            )
        return self.found[at]

    def with_keys(self, keys: Runs, q: Tensor, scoring: Scoring | None = None) -> list[AttentionPart | Pack]:
        """`calls` of this rank's queries."""
        return self.calls(self.own, keys, q, scoring)

    def whole(self, q: Tensor, scoring: Scoring | None = None) -> list[AttentionPart | Pack]:
        """`calls` of whole sequences."""
        return self.calls(self.everything, self.everything, q, scoring)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    scale: float,
    scoring: Scoring | None = None,
    sinks: Sinks = None,
) -> Tensor:
    """Causal attention of this rank's queries to all keys of their sequences, or
    with documents of their document.

    `scoring`: a window or a cap of the scores, if there is one. `sinks`: those of the heads, likewise.
    q ``[batch, heads, tokens, head]``, k and v with the key/value heads, tokens those of ``sequences.own``.
    Collective over the group.
    """
    if sequences.group.size == 1:
        return DocumentAttention.apply(q, k, v, sequences.whole(q, scoring), scale, True, sinks)
    return METHODS[sequences.method].apply(q, k, v, sequences, scale, scoring, sinks)


def in_order(gathered: Tensor, sequences: Sequences) -> Tensor:
    """Tokens of all ranks ``[ranks, batch, tokens of a rank, …]`` → in the order of the
    sequence ``[batch, tokens, …]``.
    """
    pieces = [
        (run.start, own[:, run.here])
        for own, runs in zip(gathered, sequences.by_rank, strict=True)
        for run in runs
    ]
    return torch.cat([piece for _, piece in sorted(pieces, key=itemgetter(0))], 1)


def by_rank(x: Tensor, sequences: Sequences) -> Tensor:
    """The inverse of `in_order`."""
    pieces = [x[:, run.start : run.stop] for runs in sequences.by_rank for run in runs]
    return torch.cat(pieces, 1).unflatten(1, (sequences.group.size, -1)).movedim(1, 0)


class GatherAttention(torch.autograd.Function):
    """`attend` with all keys and values gathered. Saved: this rank's q, k, v, o and l."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: Sequences,
        scale: float,
        scoring: Scoring | None = None,
        sinks: Sinks = None,
    ) -> Tensor:
        merged, found = Merged(q), sequences.with_keys(sequences.everything, q, scoring)
        keys, values = gathered(k, v, sequences)
        merged.add(q, keys, values, found, scale)
        add_sinks(merged.out, merged.lse, sinks)
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merged.lse, sinks)
        ctx.sequences, ctx.found, ctx.scale, ctx.scoring = sequences, found, scale, scoring
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        group = ctx.sequences.group
        keys, values = gathered(k, v, ctx.sequences)
        # Each is in two parts at most, an early one and a late one; with documents, whose pieces may be
        # finer, or a window in more.
        wide = ctx.sequences.documents is not None or ctx.scoring is not None
        grads = zeros_like(q, wide=wide), zeros_like(keys, wide=wide), zeros_like(values, wide=wide)
        add_gradients(grads, grad, q, keys, values, out, lse, ctx.found, ctx.scale)
        del keys, values  # the memory of whole sequences
        sums = [by_rank(total.transpose(1, 2).to(k.dtype), ctx.sequences) for total in grads[1:]]
        grad_k, grad_v = reduce_scatter(torch.stack(sums, 1), group)[0].transpose(2, 3)
        return grads[0].to(q.dtype), grad_k, grad_v, None, None, None, sink_gradients(grad, out, lse, sinks)


def gathered(k: Tensor, v: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Keys and values of all ranks, in the order of the sequence."""
    both = all_gather(token_by_token(k, v)[None], sequences.group)  # [ranks, 2, batch, tokens, heads, head]
    return in_order(both[:, 0], sequences).transpose(1, 2), in_order(both[:, 1], sequences).transpose(1, 2)


def token_by_token(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values ``[batch, heads, tokens, head]`` as one tensor ``[2, batch, tokens, heads, head]``:
    kernels take its tokens as they lie, also those of several sequences in one call.
    """
    return torch.stack((k.transpose(1, 2), v.transpose(1, 2)))


class RingAttention(torch.autograd.Function):
    """`attend` with keys and values passed round. Saved: this rank's q, k, v, o and l.

    In backward the gradients of keys and values follow them round, a step behind, and come home last.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: Sequences,
        scale: float,
        scoring: Scoring | None = None,
        sinks: Sinks = None,
    ) -> Tensor:
        merged, group = Merged(q), sequences.group
        both = token_by_token(k, v)
        for step in range(group.size):
            coming = pass_on(both, group) if step + 1 < group.size else None
            keys, values = both.transpose(2, 3)
            merged.add(q, keys, values, calls_at(sequences, step, q, scoring), scale)
            both = both if coming is None else coming.take()
        add_sinks(merged.out, merged.lse, sinks)
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merged.lse, sinks)
        ctx.sequences, ctx.scale, ctx.scoring = sequences, scale, scoring
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        sequences, group = ctx.sequences, ctx.sequences.group
        both, grad_q = token_by_token(k, v), zeros_like(q, wide=True)
        # of the gradients of the keys and values at hand, on their way from the rank before
        sums: Coming | None = None
        for step in range(group.size):
            coming = pass_on(both, group) if step + 1 < group.size else None
            # With a window or a cap several parts share a key.
            own, (keys, values) = (
                torch.zeros_like(both, dtype=lse.dtype if ctx.scoring else both.dtype),
                both.transpose(2, 3),
            )
            grads = grad_q, own[0].transpose(1, 2), own[1].transpose(1, 2)
            add_gradients(
                grads, grad, q, keys, values, out, lse, calls_at(sequences, step, q, ctx.scoring), ctx.scale
            )
            sums = pass_on((own if sums is None else own.add_(sums.take())).to(both.dtype), group)
            both = both if coming is None else coming.take()
        assert sums is not None
        grad_k, grad_v = sums.take().transpose(2, 3)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None, sink_gradients(grad, out, lse, sinks)


def calls_at(
    sequences: Sequences, step: int, q: Tensor, scoring: Scoring | None
) -> list[AttentionPart | Pack]:
    """The parts of attention to the keys that a rank holds after `step` passes: those
    of the rank so many before it.
    """
    group = sequences.group
    return sequences.with_keys(sequences.by_rank[(group.rank - step) % group.size], q, scoring)


@dataclass(frozen=True)
class Coming:
    """A tensor under way from the rank before, while this rank's own goes to the next."""

    work: Work
    sent: Tensor  # kept until it has gone
    received: Tensor

    def take(self) -> Tensor:
        """Waits for both, and returns what came."""
        self.work.wait()
        return self.received


def pass_on(x: Tensor, group: Group) -> Coming:
    """Begins to send `x` to the next rank, and to receive the like from the one before."""
    assert group.communicator is not None
    received = torch.empty_like(x)
    after, before = (group.ranks[(group.rank + step) % group.size] for step in (1, -1))
    return Coming(group.communicator.start_shift(x, received, after, before), x, received)


class UlyssesAttention(torch.autograd.Function):
    """`attend` on whole sequences, with a part of the heads on each rank.

    Saved: q, k, v and l of these heads, and o of this rank's tokens.

    Of o, which the layer behind attention keeps anyway, backward needs a number for each token and head: its
    product with its gradient. So that number is exchanged, in fp32 at least. Where ranks are more than
    key/value heads, several get the same one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: Sequences,
        scale: float,
        scoring: Scoring | None = None,
        sinks: Sinks = None,
    ) -> Tensor:
        ctx.short = max(1, sequences.group.size // k.shape[1])
        k, v = (x if ctx.short == 1 else x.repeat_interleave(ctx.short, 1) for x in (k, v))
        q, k, v = (by_heads(x, sequences) for x in (q, k, v))
        merged = Merged(q, alone=True)
        merged.add(q, k, v, sequences.whole(q, scoring), scale)
        add_sinks(merged.out, merged.lse, None if sinks is None else own_heads(sinks, sequences))
        out = by_tokens(merged.out, sequences)
        ctx.save_for_backward(q, k, v, out, merged.lse, sinks)
        ctx.sequences, ctx.scale, ctx.scoring = sequences, scale, scoring
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        product = (grad.to(lse.dtype) * out).sum(-1, keepdim=True)
        # the number's bits, as one element or two
        both = by_heads(torch.cat((grad, product.view(grad.dtype)), -1), ctx.sequences)
        grad, product = (
            x.transpose(1, 2).contiguous().transpose(1, 2) for x in both.tensor_split([grad.shape[-1]], -1)
        )
        product = product.view(lse.dtype)
        out, grad_sinks = with_product(grad, product), None
        if sinks is not None:  # another rank has the other heads'
            grad_sinks = torch.zeros_like(sinks)
            own_heads(grad_sinks, ctx.sequences).copy_(
                from_product(product.squeeze(-1), lse, own_heads(sinks, ctx.sequences))
            )
        wide = ctx.scoring is not None  # then several parts share a key
        grads = zeros_like(q), zeros_like(k, wide=wide), zeros_like(v, wide=wide)
        add_gradients(grads, grad, q, k, v, out, lse, ctx.sequences.whole(q, ctx.scoring), ctx.scale)
        grad_q, *shared = (by_tokens(x.to(q.dtype), ctx.sequences) for x in grads)
        return (
            grad_q,
            *(x if ctx.short == 1 else x.unflatten(1, (-1, ctx.short)).sum(2) for x in shared),
            None,
            None,
            None,
            grad_sinks,
        )


def with_product(grad: Tensor, product: Tensor) -> Tensor:
    """An output whose product with its gradient ``[…, head]`` is `product` ``[…, 1]``.

    Kernels ask for an output, and use that alone.

    It is zero but for two elements, in each half the one where the gradient is largest. The larger of these
    takes the product, and the
    other what rounding left of it: so the product errs by the square of the dtype's rounding, which is less
    than an output's own errs.
    """
    half, most = grad.shape[-1] // 2, torch.finfo(grad.dtype).max
    size, at = grad.abs().unflatten(-1, (2, half)).max(-1)
    at[..., 1] += half
    at = torch.where(size[..., :1] < size[..., 1:], at.flip(-1), at)
    first, second = grad.gather(-1, at).to(product.dtype).split(1, -1)
    high = (product / first.masked_fill(first == 0, 1)).clamp(-most, most).to(grad.dtype)
    low = ((product - first * high) / second.masked_fill(second == 0, 1)).clamp(-most, most).to(grad.dtype)
    return torch.zeros_like(grad).scatter_(-1, at, torch.cat((high, low), -1))


def own_heads(x: Tensor, sequences: Sequences) -> Tensor:
    """Of ``[heads]`` those whose attention this rank computes under ulysses."""
    return x.chunk(sequences.group.size)[sequences.group.rank]


def by_heads(x: Tensor, sequences: Sequences) -> Tensor:
    """``[batch, heads, tokens of this rank, …]`` → ``[batch, heads of this rank, tokens, …]``, in memory
    token by token, as in `Merged`.
    """
    group = sequences.group
    return in_order(
        exchange(x.transpose(1, 2).unflatten(2, (group.size, -1)).movedim(2, 0), group), sequences
    ).transpose(1, 2)


def by_tokens(x: Tensor, sequences: Sequences) -> Tensor:
    """The inverse of `by_heads`; in memory token by token too."""
    # [ranks, batch, tokens, heads of a rank, head]
    parts = exchange(by_rank(x.transpose(1, 2), sequences), sequences.group)
    return parts.permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous().transpose(1, 2)


def exchange(x: Tensor, group: Group) -> Tensor:
    """Sends part i of ``[ranks, …]`` to rank i; returns the parts that came, by rank."""
    assert group.communicator is not None
    x = x.contiguous()
    out = torch.empty_like(x)
    group.communicator.start_all_to_all(x, out).wait()
    return out


METHODS: dict[str, type[torch.autograd.Function]] = {
    "gather": GatherAttention,
    "ring": RingAttention,
    "ulysses": UlyssesAttention,
}
