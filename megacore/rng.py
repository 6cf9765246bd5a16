"""Draws random numbers that depend on their purpose, never on the rank that draws them.

There is no generator state to save or restore: a key names every stream. The key of a weight is its parameter's name, and that of
a dropout mask is (seed, step, microbatch, site). So every layout, resume and recomputation draws the same numbers.
"""

import hashlib

import torch
from torch import Tensor

BLOCKS = 64  # pieces of a logical tensor, each with its own stream, so that a rank draws little more than its part


def key_of(*parts: object) -> int:
    """A 63-bit key for a tuple of names and numbers."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def normal_slice(key: tuple[object, ...], shape: tuple[int, ...], std: float, dim: int, start: int, stop: int) -> Tensor:
    """Draws ``[start:stop]`` along `dim` of the logical tensor `key`: fp32, normal with deviation `std`, the same on every device.

    The tensor is drawn in at most `BLOCKS` pieces along `dim`, each from its own stream. The pieces depend only on the logical shape,
    so any cut along `dim` gives the same values.
    """
    if start == stop:
        return torch.empty([0 if d == dim else n for d, n in enumerate(shape)])
    size = shape[dim]
    step = -(-size // BLOCKS)
    pieces = []
    for first in range(start - start % step, stop, step):
        last = min(first + step, size)
        generator = torch.Generator().manual_seed(key_of(*key, first))
        piece = torch.empty([last - first if d == dim else n for d, n in enumerate(shape)]).normal_(0.0, std, generator=generator)
        pieces.append(piece.narrow(dim, max(start - first, 0), min(stop, last) - max(start, first)))
    return torch.cat(pieces, dim)
