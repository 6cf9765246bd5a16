"""The gradient of an embedding: each row of the table gets the sum of its tokens' gradients.

    total[i] += sum over the tokens t with ids[t] = i of grad[t]

Text repeats its tokens, and all tokens of a microbatch may even be alike. So the ids are sorted, and each
program gets a block of `POSITIONS` sorted tokens. The program in whose block a run of equal ids starts adds
the sum of its part to the row. A program whose block continues the run writes a partial sum instead, so each
row has one writer. Partial sums keep the order of their ids. Therefore the same kernel runs again on the
partial sums, until one block is left: a run of n tokens takes about log n launches of short loops, not n
additions one after the other.

There are no atomics and the order of additions depends on the ids alone, so the same input gives the same
bits. Launches depend on the number of tokens alone, so the host waits for nothing.
"""

import torch
from torch import Tensor

from megacore.kernels.dispatch import Implementation, check_shape, use_triton

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch brings no Triton
    from megacore.kernels.absent import tl, triton

POSITIONS = 16  # sorted tokens of a program: few, because it adds them one after the other
COLUMNS = 512  # features of a program, a warp: at least 16 bytes of bf16 a thread on every GPU
NO_ID = tl.constexpr(-1)  # of a block without a partial sum


def add_embedding_grad(
    total: Tensor, grad: Tensor, ids: Tensor, *, implementation: Implementation = "auto"
) -> Tensor:
    """Add to each row of `total` the gradients of the tokens with its id, in place, and return `total`.

    total: ``[vocabulary, features]``, contiguous. Sums are in its dtype. The Triton kernel needs fp32.
    grad: ``[tokens, features]`` in any floating dtype.
    ids: ``[tokens]`` integers from 0 to vocabulary - 1. Triton does not check them: the lookup has.
    Raises ValueError for a shape, dtype or device that the implementation cannot take.
    """
    check_shape("add_embedding_grad", "total", total, "[vocabulary, features]", total.dim() == 2)
    check_shape("add_embedding_grad", "ids", ids, "[tokens]", ids.dim() == 1)
    right = f"[{len(ids)}, {total.shape[1]}]: tokens as in ids, features as in total"
    check_shape("add_embedding_grad", "grad", grad, right, grad.shape == (len(ids), total.shape[1]))
    if not use_triton("add_embedding_grad", implementation, total=total, grad=grad, ids=ids):
        return add_embedding_grad_eager(total, grad, ids)
    if total.dtype != torch.float32 or not total.is_contiguous():
        wrong = f"{total.dtype}, stride {total.stride()}"
        raise ValueError(f"add_embedding_grad: total is {wrong} (right: fp32, contiguous)")
    if grad.numel():
        _add_by_triton(total, grad, ids)
    return total


def add_embedding_grad_eager(total: Tensor, grad: Tensor, ids: Tensor) -> Tensor:
    """The reference in plain PyTorch."""
    # Both add a row's tokens in a fixed order; `index_put_` on CPU threads and `index_add_` on GPUs do not.
    if total.device.type == "cpu":
        return total.index_add_(0, ids, grad.to(total.dtype))
    return total.index_put_((ids,), grad.to(total.dtype), accumulate=True)


@triton.jit(do_not_specialize=["positions"])
def _sum_runs_kernel(
    grad,
    ids,
    order,
    total,
    partials,
    partial_ids,
    positions,
    features,
    grad_stride,
    column_blocks,
    POSITIONS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block = tl.program_id(0) // column_blocks
    column = tl.program_id(0) % column_blocks * COLUMNS + tl.arange(0, COLUMNS)
    start = block * POSITIONS
    stop = tl.minimum(start + POSITIONS, positions)

    # Only the first run of a block can have started in an earlier one.
    run_id = tl.load(ids + start)
    id_before = tl.load(ids + start - 1, mask=start > 0, other=NO_ID)
    tl.store(partial_ids + block, tl.where(run_id == id_before, run_id, NO_ID))

    partial = partials + block.to(tl.int64) * features + column
    sums = tl.zeros((COLUMNS,), dtype=tl.float32)
    for position in range(start, stop):
        next_id = tl.load(ids + position + 1, mask=position + 1 < stop, other=NO_ID)
        ends = (next_id != run_id) & (run_id != NO_ID)  # the run, or the block
        has_value = column < tl.where(run_id != NO_ID, features, 0)
        to_total = column < tl.where(ends & (run_id != id_before), features, 0)
        to_partial = column < tl.where(ends & (run_id == id_before), features, 0)

        # Both are loaded before one is needed, so that the program waits once.
        token = position if order is None else tl.load(order + position)
        values = tl.load(grad + tl.cast(token, tl.int64) * grad_stride + column, mask=has_value, other=0.0)
        row = total + run_id.to(tl.int64) * features + column
        old = tl.load(row, mask=to_total, other=0.0)

        sums += values.to(tl.float32)
        tl.store(row, old + sums, mask=to_total)
        tl.store(partial, sums, mask=to_partial)
        sums = tl.where(ends, 0.0, sums)
        run_id = next_id


def _add_by_triton(total: Tensor, grad: Tensor, ids: Tensor) -> None:
    """`add_embedding_grad` by its kernel: a launch for the tokens, and one for each level of partial sums."""
    features = total.shape[1]
    column_blocks = triton.cdiv(features, COLUMNS)
    values = grad if grad.stride(1) == 1 else grad.contiguous()
    order: Tensor | None
    ids, order = torch.sort(ids.int(), stable=True)  # in half the passes that 64 bits take
    while True:
        positions = len(ids)
        blocks = triton.cdiv(positions, POSITIONS)
        partials = total.new_empty(blocks, features)
        partial_ids = ids.new_empty(blocks)
        with torch.cuda.device_of(total):
            _sum_runs_kernel[(blocks * column_blocks,)](
                values,
                ids,
                order,
                total,
                partials,
                partial_ids,
                positions,
                features,
                values.stride(0),
                column_blocks,
                POSITIONS=POSITIONS,
                COLUMNS=COLUMNS,
                num_warps=1,
            )
        if blocks == 1:
            return
        # Partial sums are in the order of their ids. They change at most `blocks` rows, and the view has no
        # more rows, because dry runs count the bytes of a launch's arguments.
        values, ids, order, total = partials, partial_ids, None, total[:blocks]
