"""Random numbers that depend on what they are for, never on which rank draws them.

There is no generator state to save or restore: every stream is named by a key. Weights are drawn by parameter
name, dropout masks by (seed, step, microbatch, site), so every layout, every resume and every recomputation
draws the same numbers.
"""

import hashlib

import torch
from torch import Tensor

BLOCKS = 64  # pieces of a logical tensor with a stream each, so that a rank draws little more than its own part


def key_of(*parts: object) -> int:
    """A 63-bit key for a tuple of names and numbers."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def normal_slice(key: tuple[object, ...], shape: tuple[int, ...], std: float, dim: int, start: int, stop: int) -> Tensor:
    """``[start:stop]`` along `dim` of the logical tensor `key`: fp32, normal with deviation `std`, the same on every device.

    The tensor is drawn in at most `BLOCKS` pieces along `dim`, each from a stream of its own. The pieces depend on
    the logical shape alone, so any cut along `dim` gives the same values.
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
