"""The sum of squares of many tensors, with a weight for each row, for gradient norms and clipping
without waiting for the device.

    sum over rows r of 64 elements of   weight[r] · sum over the row of x²

Each program adds the squares of a row in fp32 and its rows in fp64, and a second kernel adds the programs'
results. There are no atomics, so the bits are the same every time, and the error does not grow with the
number of elements. An optimizer's flat buffer has rows of 64 (each parameter starts on its own row), so a
weight of 0 leaves out a parameter that another rank counts, and a weight of 1 includes it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megacore.kernels.dispatch import Implementation, check_shape, use_triton
from megacore.kernels.tensor_table import TensorTable, check_columns

try:
    import triton
    import triton.language as tl

    from megacore.kernels.tensor_table import pointer_at
except ImportError:  # a CPU build of torch brings no Triton
    from megacore.kernels.absent import tl, triton

ROW = 64  # elements with one weight
BLOCK = 4096  # elements that a program holds at once
# about so many divide the work: several on every multiprocessor, and few enough for one to add up
PROGRAMS = 2048
WARPS = 4


class SumOfSquares:
    """A function that returns the current sum of squares of `tensors`: an fp64 scalar on their device.

    tensors: contiguous, any shapes, of one dtype and device; they must stay where they are.
    row_weights: of each tensor ``[rows]`` fp64, for every `ROW` of its elements, the last one perhaps short;
    None for 1 everywhere.
    Raises ValueError naming the argument that does not fit.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        row_weights: Sequence[Tensor] | None = None,
        *,
        implementation: Implementation = "auto",
    ) -> None:
        check_columns("SumOfSquares", {"tensors": tensors})
        if row_weights is not None:
            if len(row_weights) != len(tensors):
                raise ValueError(
                    f"SumOfSquares: row_weights has {len(row_weights)} tensors (right: {len(tensors)}, as "
                    "tensors)"
                )
            for i, (tensor, weights) in enumerate(zip(tensors, row_weights, strict=True)):
                rows = -(-tensor.numel() // ROW)
                check_shape(
                    "SumOfSquares",
                    f"row_weights[{i}]",
                    weights,
                    f"[{rows}], one for {ROW} elements",
                    weights.shape == (rows,),
                )
                if (
                    weights.dtype != torch.float64
                    or weights.device != tensor.device
                    or not weights.is_contiguous()
                ):
                    wrong = f"{weights.dtype} on {weights.device}, stride {weights.stride()}"
                    raise ValueError(
                        f"SumOfSquares: row_weights[{i}] is {wrong} (right: fp64 on {tensor.device}, "
                        "contiguous)"
                    )
        self.tensors, self.row_weights = tensors, row_weights
        self.table: TensorTable | None = None
        if use_triton("SumOfSquares", implementation, tensors=tensors[0]):
            each = sum(tensor.numel() for tensor in tensors) // PROGRAMS
            self.chunk = max(triton.next_power_of_2(each), BLOCK)
            self.table = TensorTable([tensors, *([] if row_weights is None else [row_weights])], self.chunk)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        if self.table is None:
            weights: Sequence[Tensor | None] = self.row_weights or [None] * len(self.tensors)
            return torch.stack(
                [sum_of_squares_eager(tensor, w) for tensor, w in zip(self.tensors, weights, strict=True)]
            ).sum()
        device, programs = self.table.addresses.device, self.table.programs
        total = torch.zeros((), dtype=torch.float64, device=device)
        if programs:  # a launch of no programs is an error
            found = torch.empty(programs, dtype=torch.float64, device=device)
            names = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
            _chunk_kernel[(programs,)](
                self.table.blocks,
                self.table.addresses,
                self.table.sizes,
                found,
                WEIGHTED=self.row_weights is not None,
                DTYPE=names[self.tensors[0].dtype],
                ALIGNED=self.table.aligned,
                CHUNK=self.chunk,
                BLOCK=BLOCK,
                ROW=ROW,
                num_warps=WARPS,
            )
            _total_kernel[(1,)](found, total, programs, BLOCK=1024, num_warps=WARPS)
        return total


def sum_of_squares_eager(tensor: Tensor, row_weights: Tensor | None = None) -> Tensor:
    """The reference in plain PyTorch, of one tensor: an fp64 scalar."""
    # In short rows, because PyTorch's CPU norm of a whole fp32 tensor errs by 4e-6 at half a million elements
    # and 7e-4 at 16 million.
    flat = tensor.flatten()
    if rest := -flat.numel() % ROW:
        flat = torch.nn.functional.pad(flat, (0, rest))
    wide = torch.promote_types(tensor.dtype, torch.float32)
    rows = torch.linalg.vector_norm(flat.view(-1, ROW), dim=1, dtype=wide).double().square_()
    return rows.sum() if row_weights is None else torch.dot(rows, row_weights)


def clip_coefficient(norm: Tensor, limit: float) -> Tensor:
    """The factor for gradients of this norm that makes the norm at most `limit`; a scalar on the device."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)


@triton.jit
def _chunk_kernel(
    blocks,
    addresses,
    sizes,
    found,
    WEIGHTED: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW: tl.constexpr,
):
    tensor = tl.load(blocks + 2 * tl.program_id(0))
    start = tl.load(blocks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    stop = tl.minimum(start + CHUNK, tl.load(sizes + tensor))
    x_ptr = pointer_at(addresses + tensor * (2 if WEIGHTED else 1), DTYPE, ALIGNED)
    row = tl.arange(0, BLOCK // ROW)
    lane = row[:, None] * ROW + tl.arange(0, ROW)[None, :]
    total = tl.zeros([BLOCK // ROW], tl.float64)
    for first in range(start, stop, BLOCK):
        if first + BLOCK <= stop:  # without a mask, which would narrow the loads where a size is odd
            x = tl.load(x_ptr + first + lane).to(tl.float32)
        else:
            x = tl.load(x_ptr + first + lane, mask=first + lane < stop, other=0.0).to(tl.float32)
        squares = tl.sum(x * x, 1).to(tl.float64)
        if WEIGHTED:
            weights = pointer_at(addresses + tensor * 2 + 1, tl.float64, ALIGNED) + first // ROW
            squares *= tl.load(weights + row, mask=first + row * ROW < stop, other=0.0)
        total += squares
    tl.store(found + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _total_kernel(found, total, programs, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float64)
    for first in range(0, programs, BLOCK):
        sums += tl.load(found + first + lane, mask=first + lane < programs, other=0.0)
    tl.store(total, tl.sum(sums, 0))
