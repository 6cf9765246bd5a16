"""Draws random numbers that depend on their purpose, never on the rank that draws them.

There is no generator state to save or restore: a key names every stream. The key of a weight is its
parameter's name, and that of a dropout mask is (seed, step, microbatch, site). So every layout, resume and
recomputation draws the same numbers.
"""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

RUN = 1 << 20  # numbers drawn at once: 4 MiB
# numbers that torch's generator makes of 16 others; a tensor's last 16 it makes anew if its size is no
# multiple
TOGETHER = 16


def key_of(*parts: object) -> int:
    """A 63-bit key for a tuple of names and numbers."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def normal_runs(key: tuple[object, ...], size: int, std: float, stop: int) -> Iterator[tuple[int, Tensor]]:
    """The stream `key` of `size` normal numbers of deviation `std`, from the first to at
    least number `stop` (excluded).

    Yields runs of about `RUN` numbers, ``(number of the first, fp32 tensor)``: bit for bit what one tensor of
    `size` would be filled with.
    """
    generator, first = torch.Generator().manual_seed(key_of(*key)), 0
    while first < stop:
        count = RUN if size - first >= RUN + TOGETHER else size - first
        yield first, torch.empty(count).normal_(0.0, std, generator=generator)
        first += count
