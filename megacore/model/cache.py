"""Keeps keys and values of earlier tokens, so that a pass over one new token does not repeat the whole text."""

import torch
from torch import Tensor, nn


class KeyValueCache:
    """The keys and values that a stage's attention layers keep while a text is written.

    A layer's first call allocates memory for `capacity` positions: ``[batch, key/value heads of this rank, capacity, head]`` for its
    keys, already rotated by their positions, and as much for its values.
    """

    def __init__(self, batch_size: int, capacity: int) -> None:
        self.batch_size, self.capacity = batch_size, capacity
        self.length = 0  # positions held; the next token's position
        self._layers: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds a layer's new keys and values, ``[batch, heads, new, head]``; returns all, ``[batch, heads, length + new, head]``."""
        stop = self.length + k.shape[2]
        assert stop <= self.capacity, f"{stop} positions in a cache of {self.capacity}"
        if layer not in self._layers:
            shape = (*k.shape[:2], self.capacity, k.shape[3])
            self._layers[layer] = k.new_empty(shape), v.new_empty(shape)
        for kept, new in zip(self._layers[layer], (k, v), strict=True):
            kept[:, :, self.length : stop] = new
        keys, values = self._layers[layer]
        return keys[:, :, :stop], values[:, :, :stop]

    def advance(self, new: int) -> None:
        """Counts `new` positions, which every layer has added."""
        self.length += new

    def clear(self) -> None:
        """Forgets the text, and keeps the memory for another."""
        self.length = 0


def latest_mask(new: int, total: int, device: torch.device) -> Tensor | None:
    """The causal mask of the last `new` of `total` positions, ``[new, total]``, True where a query sees a key.

    The last query sees the last key. If ``new < total``, sdpa's own ``is_causal`` would align the first of both instead.
    Returns None for a single query, which sees every key.
    """
    if new == 1:
        return None
    return torch.ones(new, total, dtype=torch.bool, device=device).tril(total - new)
