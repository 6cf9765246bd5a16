"""Keys and values of the tokens before: with them a pass over one new token costs one token, not the whole text."""

import torch
from torch import Tensor, nn


class KeyValueCache:
    """What a stage's attention layers keep of a text while it is written.

    Memory for `capacity` positions is taken when a layer first comes by: ``[batch, key/value heads of this rank,
    capacity, head]`` for its keys, turned by their positions already, and as much for its values.
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
        """Counts the positions that every layer has been given."""
        self.length += new

    def clear(self) -> None:
        """Begins another text in the same memory."""
        self.length = 0


def latest_mask(new: int, total: int, device: torch.device) -> Tensor | None:
    """The causal mask of the last `new` of `total` positions, ``[new, total]``, True where a query sees a key.

    The last query sees the last key: where ``new < total``, sdpa's own ``is_causal`` would line up the first of both.
    None for a single query, which sees every key.
    """
    if new == 1:
        return None
    return torch.ones(new, total, dtype=torch.bool, device=device).tril(total - new)
