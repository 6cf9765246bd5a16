"""Products of groups of rows against fp64, through Triton's interpreter; tests/gpu
runs the same checks on a GPU.
"""

import pytest
import torch

from megacore.kernels import grouped_product
from tests.kernel_checks import TOLERANCE, needs_triton, poisoned_memory, relative_error, seeded, with_fault

COUNTS = {
    "none is empty": [3, 1, 5],
    "empty at the ends and between": [0, 4, 0, 0, 3, 0],
    "all rows in one": [0, 37, 0],  # more than one tile, the last partly filled
    "no rows": [0, 0],
    "one group": [9],
}
BEHIND = 19  # rows of no group: more than a small tile
SIZES = [(1, 1), (20, 40)]  # in, out
# tiles with which a small product has several along each dim
SMALL = {"ROWS": 16, "COLUMNS": 16, "DEPTH": 16}


def errors_against_fp64(
    implementation: str,
    device: str,
    counts: list[int],
    size: tuple[int, int],
    dtype: torch.dtype,
    tiles: dict[str, int],
) -> list[float]:
    """Errors of the product, of the gradient of x as a product with exchanged dims, and of the outer product
    in fp32; each relative to the largest value. New memory holds NaN, and so do rows behind the last group:
    an element that nobody writes is seen, and one that nobody should read.
    """
    (inputs, outputs), rows, how = size, sum(counts) + BEHIND, {"implementation": implementation}
    x, grad = seeded((rows, inputs), device, dtype), seeded((rows, outputs), device, dtype, seed=1)
    weight, ends = (
        seeded((len(counts), outputs, inputs), device, dtype, seed=2),
        torch.tensor(counts, device=device).cumsum(0),
    )
    for t in (x, grad):
        t[len(t) - BEHIND :] = float("nan")
    vars(grouped_product).update(tiles)
    wide = torch.promote_types(dtype, torch.float32)
    with poisoned_memory():
        got = [
            grouped_product.grouped_product(x, weight, ends, **how),
            grouped_product.grouped_product(grad, weight.mT, ends, **how),
            grouped_product.grouped_outer(grad, x, ends, wide, **how),
        ]
    exact_y, exact_x, exact_w = (torch.zeros_like(t, dtype=torch.float64) for t in (grad, x, weight))
    for group, own in enumerate(map(slice, [0, *ends.tolist()[:-1]], ends.tolist())):
        exact_y[own], exact_x[own] = (
            x[own].double() @ weight[group].double().T,
            grad[own].double() @ weight[group].double(),
        )
        exact_w[group] = grad[own].double().T @ x[own].double()
    assert [t.dtype for t in got] == [dtype, dtype, wide]
    return [relative_error(*pair) for pair in zip(got, (exact_y, exact_x, exact_w), strict=True)]


@needs_triton
@pytest.mark.parametrize("counts", COUNTS.values(), ids=list(COUNTS))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_triton_equals_fp64(interpreted, counts, size):
    assert (
        max(interpreted(errors_against_fp64, "triton", "cpu", counts, size, torch.float32, SMALL))
        < TOLERANCE[torch.float32]
    )


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_triton_with_usual_tiles(interpreted, dtype):
    """Not in bf16, whose products the interpreter takes for those of integers: on GPUs alone."""
    counts = COUNTS["empty at the ends and between"]
    assert (
        max(interpreted(errors_against_fp64, "triton", "cpu", counts, (24, 40), dtype, {})) < TOLERANCE[dtype]
    )


@pytest.mark.parametrize("counts", COUNTS.values(), ids=list(COUNTS))
def test_eager_equals_fp64(counts):
    for dtype, tolerance in (TOLERANCE | {torch.float64: 1e-14}).items():
        assert max(errors_against_fp64("eager", "cpu", counts, (20, 40), dtype, {})) < tolerance


@pytest.mark.parametrize("counts", COUNTS.values(), ids=list(COUNTS))
def test_pytorchs_own_equals_fp64(counts, monkeypatch):
    """Where a GPU would take it; it does not write rows behind the last group (transformers PR 48205)."""
    monkeypatch.setattr(grouped_product, "use_grouped_mm", lambda *_: True)
    assert (
        max(errors_against_fp64("auto", "cpu", counts, (24, 40), torch.bfloat16, {}))
        < TOLERANCE[torch.bfloat16]
    )


def rows_cleared(device: str, rows: int, end: int) -> bool:
    """Whether rows from `end` on become zero, and others stay."""
    y, ends = torch.ones(rows, 200, device=device), torch.tensor([0, end], device=device)
    grouped_product.cleared(y, ends, "triton")
    return bool((y[:end] == 1).all()) and not y[end:].any()


@needs_triton
@pytest.mark.parametrize("rows, end", [(70, 0), (70, 64), (129, 100), (64, 64), (1, 1)])
def test_rows_behind_the_last_group_are_cleared(interpreted, rows, end):
    assert interpreted(rows_cleared, "cpu", rows, end)


FAULTS = [
    ("* ROWS\n", "* ROWS + (group > 0)\n"),  # begins a row late: the next group's row at a boundary
    # the first group's last row is another's
    ("tl.load(ends + group).to(tl.int64)", "(tl.load(ends + group) + (group < 1)).to(tl.int64)"),
    ("before = tl.cumsum(tiles, 0) <= tile", "before = tl.cumsum(tiles, 0) < tile"),
    ("weight + group * group_stride", "weight + 0 * group_stride"),
    ("if group <= groups:", "if group < groups:"),  # rows of no group are not written (transformers PR 48205)
    ("for begin in range(start, stop, DEPTH)", "for begin in range(start, stop - 1, DEPTH)"),
    (
        "    total += group * outputs * inputs\n",
        "    if stop == start:\n        return\n    total += group * outputs * inputs\n",
    ),
]


@needs_triton
@pytest.mark.parametrize("right, wrong", FAULTS)
def test_planted_faults_are_caught(interpreted, right, wrong):
    """Rows of a neighbour at a boundary, another group's weight, places of a group
    without rows that nobody writes.
    """
    given = ("triton", "cpu", [3, 0, 17, 1], (17, 20), torch.float32, SMALL)
    errors = interpreted(with_fault, "grouped_product", right, wrong, errors_against_fp64, *given)
    assert max(errors) > TOLERANCE[torch.float32]


def test_the_host_does_not_wait():
    """Where nobody knows the sizes, on `meta`, launches are the same: they depend
    on numbers that the host has.
    """
    x, weight = torch.empty(70, 24, device="meta"), torch.empty(6, 40, 24, device="meta")
    ends = torch.empty(6, dtype=torch.int64, device="meta")
    assert grouped_product.grouped_product(x, weight, ends).shape == (70, 40)
    assert grouped_product.grouped_outer(
        torch.empty(70, 40, device="meta"), x, ends, torch.float32
    ).shape == (6, 40, 24)


def test_refusals():
    ends = torch.tensor([1, 2])
    with pytest.raises(
        ValueError,
        match=r"grouped_product: weight is \[2, 4, 5\] \(right: \[2, out, 3\]: groups as in ends, in as "
        r"in x\)",
    ):
        grouped_product.grouped_product(torch.zeros(2, 3), torch.zeros(2, 4, 5), ends)
    with pytest.raises(
        ValueError, match=r"grouped_outer: grad is \[3, 4\] \(right: \[2, out\], as many rows as x \[2, 3\]\)"
    ):
        grouped_product.grouped_outer(torch.zeros(3, 4), torch.zeros(2, 3), ends, torch.float32)
