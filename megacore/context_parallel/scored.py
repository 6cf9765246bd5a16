"""Attention whose scores are capped, or see a window of tokens: in parts, each by the plain
formula on a few queries at a time.

cap      scores s become cap · tanh(s / cap) before the mask (Gemma 2)
window   a token sees itself and the window - 1 tokens before it
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.context_parallel.sharding import AttentionPart, Documents, Run, Runs, documents_of

# queries of a part at least, where there are so many: it meets at most window - 1 keys more than it has
# queries
STEP = 512


@dataclass(frozen=True)
class Scoring:
    """What happens to scores besides their scale."""

    window: int | None = None
    cap: float | None = None

    def capped(self, scores: Tensor) -> Tensor:
        """The scores, between -cap and cap."""
        return scores if self.cap is None else soft_cap(scores, self.cap)

    def sees(self, behind: Tensor) -> Tensor:
        """Whether a token sees another one, so many tokens before it."""
        return behind >= 0 if self.window is None else (behind >= 0) & (behind < self.window)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """``cap · tanh(x / cap)``, which is near x where x is small, and never above cap."""
    return cap * torch.tanh(x / cap)


@dataclass(frozen=True)
class ScoredPart(AttentionPart):
    """A part of which each query sees a key at least; its first query stands
    `shift` tokens behind its first key.
    """

    shift: int
    scoring: Scoring

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The part's output, and the log-sum-exp of its scores."""
        scores, _ = self.scores(q, k, scale)
        return scores.softmax(-1).to(q.dtype) @ for_heads(v, q), scores.logsumexp(-1)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of the part's q, k and v, from the merged output and log-sum-exp."""
        scores, slope = self.scores(q, k, scale)
        keys, values, wide = for_heads(k, q), for_heads(v, q), lse.dtype
        p = (scores - lse[..., None]).exp()
        delta = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
        ds = (p * ((grad @ values.transpose(-2, -1)).to(wide) - delta) * slope).to(q.dtype) * scale
        of_queries = ds.transpose(-2, -1) @ q, p.to(q.dtype).transpose(-2, -1) @ grad
        grad_k, grad_v = (g.unflatten(1, (k.shape[1], -1)).sum(2) for g in of_queries)
        return ds @ keys, grad_k, grad_v

    def scores(self, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor | float]:
        """The scores, capped and masked, in fp32 at least; and how fast the cap lets them grow."""
        scores = (q @ for_heads(k, q).transpose(-2, -1)).to(
            torch.promote_types(q.dtype, torch.float32)
        ) * scale
        capped = self.scoring.capped(scores)
        slope = 1.0 if self.scoring.cap is None else 1.0 - (capped / self.scoring.cap).square()
        every = torch.arange(self.shift, self.shift + q.shape[2], device=q.device)[:, None]
        seen = self.scoring.sees(every - torch.arange(k.shape[2], device=q.device))
        return capped.masked_fill(~seen, float("-inf")), slope


def for_heads(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values, each as often as query heads share it."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def scored_parts(
    queries: Runs, keys: Runs, documents: Documents | None, scoring: Scoring
) -> list[ScoredPart]:
    """As `sharding.parts`. Pairs outside of a window are left out, but for those beside its edge."""
    if documents is None:
        return [part for query in queries for key in keys for part in _between(None, query, key, scoring)]
    found: list[ScoredPart] = []
    for row, bounds in enumerate(documents):
        for start, stop in documents_of(queries, bounds):
            own, seen = (
                [part for run in runs if (part := run.within(start, stop))] for runs in (queries, keys)
            )
            found += [part for query in own for key in seen for part in _between(row, query, key, scoring)]
    return found


def _between(row: int | None, queries: Run, keys: Run, scoring: Scoring) -> Iterator[ScoredPart]:
    """Parts between consecutive queries and consecutive keys."""
    window = scoring.window or keys.stop + queries.stop
    step = max(STEP, scoring.window or 0)
    for first in range(queries.start, queries.stop, step):
        key = keys.within(first - window + 1, min(first + step, queries.stop))
        query = (
            None
            if key is None
            else queries.within(max(first, key.start), min(first + step, key.stop - 1 + window))
        )
        if key is not None and query is not None:
            yield ScoredPart(row, query.here, key.here, False, query.start - key.start, scoring)
