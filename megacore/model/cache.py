"""Keeps keys and values of earlier tokens, so that a pass over one new token does not repeat the whole text."""

import numpy as np
import torch
from torch import Tensor, nn

from megacore.context_parallel.attention import Sequences
from megacore.context_parallel.sharding import positions_of, runs_of
from megacore.distributed.collectives import broadcast
from megacore.distributed.communicator import Group


class KeyValueCache:
    """The keys and values that a stage's attention layers keep while a text is written.

    A layer's first call allocates memory for `capacity` positions: ``[batch, key/value heads of this rank, capacity, head]`` for its
    keys, already rotated by their positions, and as much for its values.
    """

    def __init__(self, batch_size: int, capacity: int) -> None:
        self.batch_size, self.capacity = batch_size, capacity
        self.length = 0  # positions held; the next token's position
        self._layers: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        # Of the tokens that are being read, if context ranks divide them: whose they are, and the positions of this rank's.
        self.sequences: Sequences | None = None
        self.positions: Tensor | None = None

    @property
    def held(self) -> int:
        """Positions that this rank holds."""
        return self.length

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds a layer's new keys and values, ``[batch, heads, new, head]``; returns all, ``[batch, heads, length + new, head]``."""
        start, stop = self.held, self.held + k.shape[2]
        assert stop <= self.capacity, f"{stop} positions in a cache of {self.capacity}"
        if layer not in self._layers:
            shape = (*k.shape[:2], self.capacity, k.shape[3])
            self._layers[layer] = k.new_empty(shape), v.new_empty(shape)
        for kept, new in zip(self._layers[layer], (k, v), strict=True):
            kept[:, :, start:stop] = new
        keys, values = self._layers[layer]
        return keys[:, :, :stop], values[:, :, :stop]

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
    """One context rank's part of a text's keys and values: of a prompt those that it computes, and its share of the tokens written.

    A prompt is padded behind its end to a length that divides. No token sees what is there, and no rank keeps it.
    """

    def __init__(self, batch_size: int, capacity: int, group: Group, method: str) -> None:
        """`capacity` positions of all ranks together; `method` as in `Sequences`."""
        super().__init__(batch_size, 2 * -(-capacity // (2 * group.size)))
        self.group, self.method = group, method
        self.counts = [0] * group.size  # positions held by each rank

    @property
    def held(self) -> int:
        """Positions that this rank holds."""
        return self.counts[self.group.rank]

    def begin(self, tokens: Tensor) -> Tensor:
        """Takes the next tokens of the text ``[1, new]``: a prompt, or one. Returns those that this rank computes: its own, or the one."""
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

    def own(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Of new keys or values ``[batch, heads, new, head]`` those that this rank keeps."""
        return tuple(x[:, :, : self._shares()[self.group.rank]] for x in tensors)

    def _shares(self) -> list[int]:
        """How many of the tokens that are being read each rank keeps. They are its first ones: what is beyond the end comes last."""
        if self.sequences is None:
            return [int(rank == self.counts.index(min(self.counts))) for rank in range(self.group.size)]
        runs = (runs_of(self.sequences.seq_len, self.group.size, rank) for rank in range(self.group.size))
        return [int((positions_of(own) < self.new).sum()) for own in runs]

    def latest(self, x: Tensor) -> Tensor:
        """The row of the text's last token, on every rank, of the rows of those that were read; collective."""
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
        self.counts = [held + share for held, share in zip(self.counts, self._shares(), strict=True)]
        self.length += 1 if self.sequences is None else self.new

    def clear(self) -> None:
        """Forgets the text, and keeps the memory for another."""
        super().clear()
        self.counts = [0] * self.group.size


def latest_mask(new: int, total: int, device: torch.device) -> Tensor | None:
    """The causal mask of the last `new` of `total` positions, ``[new, total]``, True where a query sees a key.

    The last query sees the last key. If ``new < total``, sdpa's own ``is_causal`` would align the first of both instead.
    Returns None for a single query, which sees every key.
    """
    if new == 1:
        return None
    return torch.ones(new, total, dtype=torch.bool, device=device).tril(total - new)
