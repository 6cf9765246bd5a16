"""Keeps keys and values of earlier tokens, so that a pass over one new token does not
repeat the whole text.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.context_parallel.attention import Sequences
from megacore.context_parallel.ring_blocks import forward
from megacore.context_parallel.scored import ScoredPart, Scoring
from megacore.context_parallel.sharding import positions_of, runs_of
from megacore.context_parallel.sinks import add_sinks
from megacore.distributed.collectives import all_gather, broadcast
from megacore.distributed.communicator import Group
from megacore.distributed.cpu import is_widened
from megacore.errors import ConfigError
from megacore.model.attention import Attention


class KeyValueCache:
    """The keys and values that a stage's attention layers keep while a text is written.

    A layer's first call allocates memory for `capacity` positions: ``[batch, key/value heads of this rank,
    capacity, head]`` for its keys, already rotated by their positions, and as much for its values.
    """

    def __init__(self, batch_size: int, capacity: int) -> None:
        self.batch_size, self.capacity = batch_size, capacity
        self.length = 0  # positions held; the next token's position
        self._layers: dict[nn.Module, tuple[Tensor, ...]] = {}
        # of layers with a window or a state: the positions up to the last that they keep
        self._ends: dict[nn.Module, int] = {}
        # Of the tokens that are being read, if context ranks divide them: whose they are, and the positions
        # of this rank's.
        self.sequences: Sequences | None = None
        self.positions: Tensor | None = None

    @property
    def held(self) -> int:
        """Positions that this rank holds."""
        return self.length

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds a layer's new keys and values, ``[batch, heads, new, head]``; returns all,
        ``[batch, heads, length + new, head]``.
        """
        start, stop = self.held, self.held + k.shape[2]
        assert stop <= self.capacity, f"{stop} positions in a cache of {self.capacity}"
        if layer not in self._layers:
            # each of its own size
            keys, values = (x.new_empty(*x.shape[:2], self.capacity, x.shape[3]) for x in (k, v))
            self._layers[layer] = keys, values
        for kept, new in zip(self._layers[layer], (k, v), strict=True):
            kept[:, :, start:stop] = new
        keys, values = self._layers[layer]
        return keys[:, :, :stop], values[:, :, :stop]

    def state(self, layer: nn.Module) -> tuple[Tensor, ...] | None:
        """See `TextCache`."""
        if not self.length:
            return None
        assert self._ends[layer] == self.length, "no token can be taken back from a state"
        return self._layers[layer]

    def keep(self, layer: nn.Module, new: int, *state: Tensor) -> None:
        """See `TextCache`."""
        self._layers[layer], self._ends[layer] = state, self.length + new

    def attend(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the latest queries to all keys so far, of which `k` and `v` are new.

        It always uses sdpa, whatever `model.attention` is.
        """
        if layer.scoring is not None or layer.sinks is not None:
            return self._attend_scored(layer, layer.scoring or Scoring(), q, k, v)
        keys, values = self.extend(layer, k, v)
        if is_widened(q):
            q, keys, values = q.float(), keys.float(), values.float()
        mask = latest_mask(q.shape[2], keys.shape[2], q.device)
        return F.scaled_dot_product_attention(
            q, keys, values, mask, scale=layer.scale, enable_gqa=layer.queries > 1
        ).to(k.dtype)

    def _attend_scored(self, layer: Attention, scoring: Scoring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`attend` by the plain formula, with the layer's cap and window.

        Of keys and values only the window is kept, and one more: whoever writes may take back the last token,
        by `length`.
        """
        new, total, dtype = k.shape[2], self.length + k.shape[2], k.dtype
        if scoring.window is None:
            keys, values = self.extend(layer, k, v)
        else:
            if self.length:
                back = self._ends[layer] - self.length
                assert 0 <= back <= 1, f"{back} tokens are taken back"
                k, v = (
                    torch.cat((kept[:, :, : kept.shape[2] - back], x), 2)
                    for kept, x in zip(self._layers[layer], (k, v), strict=True)
                )
            beyond = max(0, k.shape[2] - scoring.window)  # the next token sees the last window - 1 of these
            self._layers[layer] = k[:, :, beyond:].clone(), v[:, :, beyond:].clone()
            self._ends[layer] = total
            keys, values = k, v
        every = torch.arange(total - keys.shape[2], total, device=q.device)
        if is_widened(q):
            q, keys, values = q.float(), keys.float(), values.float()
        return layer.formula(q, keys, values, every[-new:, None] - every).to(dtype)

    def begin(self, tokens: Tensor) -> Tensor:
        """Takes the next tokens of the text ``[batch, new]``. Returns those that this rank computes: all."""
        return tokens

    def latest(self, x: Tensor) -> Tensor:
        """The row of the text's last token, of the rows ``[new, …]`` of those that were read."""
        return x[-1:]

    def advance(self, new: int) -> None:
        """Counts `new` positions, which every layer has added."""
        self.length += new

    def clear(self) -> None:
        """Forgets the text, and keeps the memory for another."""
        self.length = 0


class DividedCache(KeyValueCache):
    """One context rank's part of a text's keys and values: of a prompt those that it computes, and
    its share of the tokens written.

    A prompt is padded behind its end to a length that divides. No token sees what is there, and no rank keeps
    it.
    """

    def __init__(self, batch_size: int, capacity: int, group: Group, method: str) -> None:
        """`capacity` positions of all ranks together; `method` as in `Sequences`."""
        super().__init__(batch_size, 2 * -(-capacity // (2 * group.size)))
        self.group, self.method = group, method
        self.counts = [0] * group.size  # positions held by each rank
        self.places: list[int] = []  # the positions that this rank holds

    @property
    def held(self) -> int:
        """Positions that this rank holds."""
        return self.counts[self.group.rank]

    def begin(self, tokens: Tensor) -> Tensor:
        """Takes the next tokens of the text ``[1, new]``: a prompt, or one.

        Returns those that this rank computes: its own, or the one.
        """
        new = tokens.shape[1]
        if self.length:
            assert new == 1, "behind a prompt a text grows by one token at a time"
            self.sequences = self.positions = None
            return tokens
        pieces = 2 * self.group.size
        self.sequences = Sequences(-(-new // pieces) * pieces, self.group, self.method)
        self.new = new
        own = torch.from_numpy(np.minimum(positions_of(self.sequences.own), new - 1)).to(tokens.device)
        self.positions = own[None]
        return tokens[:, own]

    def attend(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `KeyValueCache`. Of a prompt context ranks divide the queries too."""
        own = self._shares()[self.group.rank]  # of the new tokens, that this rank keeps
        keys, values = super().extend(layer, k[:, :, :own], v[:, :, :own])
        if self.sequences is not None:
            return layer.attend_parts(q, k, v, self.sequences)
        if is_widened(q):
            q, keys, values = q.float(), keys.float(), values.float()
        if layer.scoring is not None and layer.scoring.window is not None:
            at = torch.tensor([*self.places, *[self.length] * own], device=k.device)
            seen = (at > self.length - layer.scoring.window).nonzero().squeeze(1)
            keys, values = keys.index_select(2, seen), values.index_select(2, seen)
        return attend_divided(q, keys, values, self.group, layer.scale, layer.scoring, layer.sinks).to(
            k.dtype
        )

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `KeyValueCache`; no rank has all."""
        raise ConfigError(
            "parallel.context",
            "text is written with latent attention, or one of your own, on one context rank",
            "1",
        )

    def state(self, layer: nn.Module) -> tuple[Tensor, ...] | None:
        """See `KeyValueCache`; a prompt's padding would be in it."""
        raise ConfigError(
            "parallel.context", "text is written with a state of all tokens on one context rank", "1"
        )

    def _shares(self) -> list[int]:
        """How many of the tokens that are being read each rank keeps.

        They are its first ones: what is beyond the end comes last.
        """
        if self.sequences is None:
            return [int(rank == self.counts.index(min(self.counts))) for rank in range(self.group.size)]
        runs = (runs_of(self.sequences.seq_len, self.group.size, rank) for rank in range(self.group.size))
        return [int((positions_of(own) < self.new).sum()) for own in runs]

    def latest(self, x: Tensor) -> Tensor:
        """The row of the text's last token, on every rank, of the rows of those that
        were read; collective.
        """
        if self.sequences is None:
            return x
        size = self.sequences.seq_len // (2 * self.group.size)
        piece = (self.new - 1) // size
        holder = min(piece, 2 * self.group.size - 1 - piece)
        at = self._shares()[holder] - 1
        row = x[at : at + 1].clone() if holder == self.group.rank else torch.empty_like(x[:1])
        return broadcast(row, self.group, holder)

    def advance(self, new: int) -> None:
        """Counts what was read."""
        shares = self._shares()
        own = [self.length] if self.sequences is None else positions_of(self.sequences.own).tolist()
        self.places += own[: shares[self.group.rank]]
        self.counts = [held + share for held, share in zip(self.counts, shares, strict=True)]
        self.length += 1 if self.sequences is None else self.new

    def clear(self) -> None:
        """Forgets the text, and keeps the memory for another."""
        super().clear()
        self.counts, self.places = [0] * self.group.size, []


def attend_divided(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    scale: float,
    scoring: Scoring | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of queries that every rank has ``[batch, heads, 1, head]`` to keys that the
    ranks divide, of which some may have none. They see all of them; `scoring` may cap their
    scores, and heads may have `sinks`.

    Without gradients. Each rank attends to its own; the parts are merged by their log-sum-exp.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    part = q.new_zeros(*q.shape[:3], q.shape[3] + 1, dtype=wide)
    part[..., -1] = float("-inf")
    if k.shape[2]:
        if scoring is None or scoring.cap is None:
            part[..., :-1], part[..., -1] = forward(q, k, v, False, scale)
        else:
            capped = ScoredPart(
                None, slice(0, 1), slice(0, k.shape[2]), False, k.shape[2] - 1, Scoring(cap=scoring.cap)
            )
            part[..., :-1], part[..., -1] = capped.forward(q, k, v, scale)
    every = all_gather(part[None], group)
    out, lse = (every[..., -1:].softmax(0) * every[..., :-1]).sum(0), every[..., -1].logsumexp(0)
    add_sinks(out, lse, sinks)
    return out.to(q.dtype)


def latest_mask(new: int, total: int, device: torch.device) -> Tensor | None:
    """The causal mask of the last `new` of `total` positions, ``[new, total]``,
    True where a query sees a key.

    The last query sees the last key. If ``new < total``, sdpa's own ``is_causal`` would align the first of
    both instead.
    Returns None for a single query, which sees every key.
    """
    if new == 1:
        return None
    return torch.ones(new, total, dtype=torch.bool, device=device).tril(total - new)
