"""Adds up the partial sums that programs leave, in a fixed order: no atomics, the same bits every time.

Backward kernels whose programs walk over many rows keep their part of a sum over the rows in fp32.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch brings no Triton
    from megacore.kernels.absent import tl, triton

ROWS, BLOCK = 128, 32  # of a tile


def add_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Parts ``[sums, programs, features]`` in fp32 → their sums over the programs ``[sums, features]``."""
    sums, programs, features = parts.shape
    total = torch.empty(sums, features, dtype=dtype, device=parts.device)
    with torch.cuda.device_of(parts):
        _add_parts_kernel[(triton.cdiv(features, BLOCK), sums)](
            parts, total, programs, features, ROWS=ROWS, BLOCK=BLOCK, num_warps=4
        )
    return total


@triton.jit
def _add_parts_kernel(parts, total, programs, features, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.program_id(1).to(tl.int64)
    parts += index * programs * features + column[None, :]
    tile = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, programs, ROWS):
        program = start + tl.arange(0, ROWS)[:, None]
        inside = (program < programs) & (column < features)[None, :]
        tile += tl.load(parts + program.to(tl.int64) * features, mask=inside, other=0.0)
    tl.store(total + index * features + column, tl.sum(tile, 0), mask=column < features)
