"""Products of rows with the weights of their groups: a mixture's experts, each with the rows of its tokens.

    product    y[r]  = x[r] · w[e]ᵀ            of the rows r of each group e, which end at ends[e]
    outer      dw[e] = sum over its rows of dy[r]ᵀ · x[r]

The number of rows of a group is known to the device alone. So a launch has as many programs as there can be
tiles, and each finds its group by counting the tiles of those before it: the host waits for nothing. A group
without rows has none in the product, and zeros in the outer product. Rows behind the last end belong to no
group: nobody reads them, and of the product they are zero. The gradient of x is a product too, with the
weights' last dims exchanged.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megacore.kernels.dispatch import Implementation, check_shape, use_grouped_mm, use_triton

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch brings no Triton
    from megacore.kernels.absent import tl, triton

# of a tile, and of what is multiplied at a time: its fp32 sums are 64 registers a thread
ROWS, COLUMNS, DEPTH = 64, 128, 32
SMALLEST = 16  # that a matrix unit multiplies


def grouped_product(
    x: Tensor, weight: Tensor, ends: Tensor, *, implementation: Implementation = "auto"
) -> Tensor:
    """``x · weight[e]ᵀ`` of each row, accumulated in fp32 at least: ``[rows, in]`` and
    ``[groups, out, in]`` → ``[rows, out]``.

    ends: ``[groups]`` integers, where the rows of each group end; rows behind the last become zero.
    Strides of weight are taken as they are. Raises ValueError for what the implementation cannot take.
    """
    check_shape("grouped_product", "x", x, "[rows, in]", x.dim() == 2)
    right = f"[{len(ends)}, out, {x.shape[1]}]: groups as in ends, in as in x"
    check_shape(
        "grouped_product",
        "weight",
        weight,
        right,
        weight.dim() == 3 and weight.shape[::2] == (len(ends), x.shape[1]),
    )
    if use_grouped_mm(implementation, x, weight):
        # which leaves rows behind the last end as memory was
        return cleared(torch._grouped_mm(x, weight.mT, offs=ends.int()), ends)
    if use_triton("grouped_product", implementation, x=x, weight=weight, ends=ends):
        return _product(x, weight, ends)
    y, own = x.new_empty(len(x), weight.shape[1]), slice(0, 0)
    for own, matrix in zip(spans(ends, len(x)), weight, strict=True):
        multiply(x[own], matrix.t(), y[own])
    y[own.stop :] = 0
    return y


def grouped_outer(
    grad: Tensor, x: Tensor, ends: Tensor, dtype: torch.dtype, *, implementation: Implementation = "auto"
) -> Tensor:
    """``gradᵀ · x`` of each group's rows, accumulated in fp32 at least: ``[rows, out]`` and ``[rows,
    in]`` → ``[groups, out, in]``.

    dtype: of the result. A group without rows has zeros. Raises ValueError for what the implementation cannot
    take.
    """
    right = f"[{len(x)}, out], as many rows as x {list(x.shape)}"
    check_shape(
        "grouped_outer", "grad", grad, right, grad.dim() == 2 and x.dim() == 2 and len(grad) == len(x)
    )
    total = torch.empty(len(ends), grad.shape[1], x.shape[1], dtype=dtype, device=x.device)
    if use_triton("grouped_outer", implementation, grad=grad, x=x, ends=ends):
        return _outer(grad, x, ends, total)
    for part, own in zip(total, spans(ends, len(x)), strict=True):
        multiply(grad[own].t(), x[own], part)
    return total


def cleared(y: Tensor, ends: Tensor, implementation: Implementation = "auto") -> Tensor:
    """`y` with zeros behind the last end, in place.

    On a GPU it only touches these rows, if any, and the host does not wait.
    """
    if not use_triton("cleared", implementation, y=y, ends=ends):
        return y.masked_fill_((torch.arange(len(y), device=y.device) >= ends[-1])[:, None], 0)
    with torch.cuda.device_of(y):
        _clear_kernel[(triton.cdiv(len(y), ROWS),)](
            y, ends, len(y), y.shape[1], len(ends), ROWS=ROWS, COLUMNS=COLUMNS
        )
    return y


def spans(ends: Tensor, rows: int) -> Iterator[slice]:
    """The rows of each group.

    It waits for the device; on `meta`, where nobody knows, all groups have as many.
    """
    stops = [rows * (i + 1) // len(ends) for i in range(len(ends))] if ends.is_meta else ends.tolist()
    return (slice(*pair) for pair in pairwise([0, *stops]))


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Writes ``a · b`` to `out`, without a copy where it is the product's dtype."""
    a, b = widened(a), widened(b)
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(a @ b)


def widened(x: Tensor) -> Tensor:
    """In fp32 where a CPU would emulate 16 bits, ten times slower."""
    return x.float() if x.device.type == "cpu" and x.element_size() == 2 else x


@triton.jit
def _product_kernel(
    x,
    weight,
    y,
    ends,
    rows,
    columns,
    depth,
    groups,
    x_stride,
    group_stride,
    column_stride,
    depth_stride,
    column_blocks,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    # Neighbouring programs share rows of x. Rows behind the last group are one more, of zeros; those up to a
    # power of two have none.
    tile, i = tl.program_id(0) // column_blocks, tl.arange(0, GROUPS)
    stops = tl.load(ends + i, mask=i < groups, other=rows).to(tl.int64)
    starts = tl.where(i == 0, 0, tl.load(ends + i - 1, mask=(i > 0) & (i <= groups), other=rows).to(tl.int64))
    tiles = (stops - starts + ROWS - 1) // ROWS
    before = tl.cumsum(tiles, 0) <= tile  # groups whose tiles other programs have
    group = tl.sum(before.to(tl.int64))
    if group <= groups:
        first = tl.sum(tl.where(i == group, starts, 0)) + (tile - tl.sum(tl.where(before, tiles, 0))) * ROWS
        row, stop = first + tl.arange(0, ROWS), tl.sum(tl.where(i == group, stops, 0))
        column = tl.program_id(0) % column_blocks * COLUMNS + tl.arange(0, COLUMNS).to(tl.int64)
        weight, depth = weight + group * group_stride, tl.where(group < groups, depth, 0)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for begin in range(0, depth, DEPTH):
            at = begin + tl.arange(0, DEPTH)
            inside = (row < stop)[:, None] & (at < depth)[None, :]
            a = tl.load(x + row[:, None] * x_stride + at[None, :], mask=inside, other=0.0)
            inside = (at < depth)[:, None] & (column < columns)[None, :]
            b = tl.load(
                weight + column[None, :] * column_stride + at[:, None].to(tl.int64) * depth_stride,
                mask=inside,
                other=0.0,
            )
            total = tl.dot(a, b, total, input_precision="ieee")
        tl.store(
            y + row[:, None] * columns + column[None, :],
            total,
            mask=(row < stop)[:, None] & (column < columns)[None, :],
        )


@triton.jit
def _clear_kernel(y, ends, rows, columns, groups, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    stop, row = (
        tl.load(ends + groups - 1).to(tl.int64),
        tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS),
    )
    if tl.program_id(0) * ROWS + ROWS > stop:
        for begin in range(0, columns, COLUMNS):
            column = begin + tl.arange(0, COLUMNS)
            inside = ((row >= stop) & (row < rows))[:, None] & (column < columns)[None, :]
            tl.store(
                y + row[:, None] * columns + column[None, :],
                tl.zeros((ROWS, COLUMNS), dtype=y.dtype.element_ty),
                mask=inside,
            )


@triton.jit
def _outer_kernel(
    grad,
    x,
    total,
    ends,
    outputs,
    inputs,
    grad_stride,
    x_stride,
    output_blocks,
    input_blocks,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    tile = tl.program_id(0) % (output_blocks * input_blocks)
    group = (tl.program_id(0) // (output_blocks * input_blocks)).to(tl.int64)
    start, stop = (
        tl.load(ends + group - 1, mask=group > 0, other=0).to(tl.int64),
        tl.load(ends + group).to(tl.int64),
    )
    output = tile // input_blocks * OUTPUTS + tl.arange(0, OUTPUTS).to(tl.int64)
    column = tile % input_blocks * INPUTS + tl.arange(0, INPUTS)
    sums = tl.zeros((OUTPUTS, INPUTS), dtype=tl.float32)
    for begin in range(start, stop, DEPTH):
        row = begin + tl.arange(0, DEPTH)
        inside = (output < outputs)[:, None] & (row < stop)[None, :]
        a = tl.load(grad + row[None, :] * grad_stride + output[:, None], mask=inside, other=0.0)
        inside = (row < stop)[:, None] & (column < inputs)[None, :]
        b = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
        sums = tl.dot(a, b, sums, input_precision="ieee")
    total += group * outputs * inputs
    tl.store(
        total + output[:, None] * inputs + column[None, :],
        sums,
        mask=(output < outputs)[:, None] & (column < inputs)[None, :],
    )


def block(size: int, most: int) -> int:
    """The size of a tile along a dim: a power of two that a matrix unit takes, and
    that is not far above the dim.
    """
    return min(max(triton.next_power_of_2(size), SMALLEST), most)


def columns_of(x: Tensor, size: int) -> int:
    """The columns of a tile: in fp32 a quarter, because its products hold both operands in registers."""
    return block(size, COLUMNS // 4 if x.element_size() > 2 else COLUMNS)


def _product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`grouped_product` by its kernel."""
    (rows, depth), (groups, columns, _) = x.shape, weight.shape
    x, y = x if x.stride(1) == 1 else x.contiguous(), x.new_empty(rows, columns)
    sizes = {
        "ROWS": block(-(-rows // groups), ROWS),
        "COLUMNS": columns_of(x, columns),
        "DEPTH": block(depth, DEPTH),
    }
    column_blocks = triton.cdiv(columns, sizes["COLUMNS"])
    # tiles: each group, and what is behind, may have one that is not full
    most = rows // sizes["ROWS"] + min(groups + 1, rows)
    given: tuple[Any, ...] = (
        x,
        weight,
        y,
        ends,
        rows,
        columns,
        depth,
        groups,
        x.stride(0),
        *weight.stride(),
        column_blocks,
    )
    if y.numel():
        with torch.cuda.device_of(x):
            _product_kernel[(most * column_blocks,)](
                *given, GROUPS=triton.next_power_of_2(groups + 1), **sizes, num_warps=4
            )
    return y


def _outer(grad: Tensor, x: Tensor, ends: Tensor, total: Tensor) -> Tensor:
    """`grouped_outer` by its kernel."""
    groups, outputs, inputs = total.shape
    grad, x = (t if t.stride(1) == 1 else t.contiguous() for t in (grad, x))
    sizes = {"OUTPUTS": block(outputs, ROWS), "INPUTS": columns_of(x, inputs), "DEPTH": DEPTH}
    blocks = triton.cdiv(outputs, sizes["OUTPUTS"]), triton.cdiv(inputs, sizes["INPUTS"])
    given = grad, x, total, ends, outputs, inputs, grad.stride(0), x.stride(0), *blocks
    if total.numel():
        with torch.cuda.device_of(x):
            _outer_kernel[(groups * blocks[0] * blocks[1],)](*given, **sizes, num_warps=4)
    return total
