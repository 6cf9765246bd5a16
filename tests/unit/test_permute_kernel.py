"""Spreading tokens to rows of experts and combining them, against fp64 autograd; tests/gpu
runs the same checks on a GPU.
"""

import pytest
import torch

from megacore.kernels import permute
from tests.kernel_checks import (
    INTERPRETED_TOLERANCE,
    TOLERANCE,
    needs_triton,
    relative_error,
    seeded,
    with_fault,
)

SHAPES = [(1, 1, 1), (5, 2, 16), (7, 3, permute.MAX_BLOCK + 13), (3, 8, 40)]  # tokens, copies, features


def slots_for(tokens: int, copies: int, device: str) -> torch.Tensor:
    """Rows in an order of no pattern."""
    return permute.slots_of(
        torch.randperm(tokens * copies, generator=torch.Generator().manual_seed(1)).to(device), copies
    )


def errors_against_fp64(
    implementation: str, device: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> list[float]:
    """Errors of both results and all gradients, relative to the largest value of each.

    A plain loop stands for the sums.
    """
    tokens, copies, features = shape
    slots, how = slots_for(tokens, copies, device), {"implementation": implementation}
    x = seeded((tokens, features), device, dtype).requires_grad_()
    rows = seeded((tokens * copies, features), device, dtype, seed=1).requires_grad_()
    weights = (
        seeded((tokens, copies), device, seed=2)
        .to(torch.promote_types(dtype, torch.float32))
        .requires_grad_()
    )
    spread, combined = permute.spread(x, slots, **how), permute.combine(rows, slots, weights, **how)
    assert spread.dtype == combined.dtype == dtype
    exact = [t.detach().double().requires_grad_() for t in (x, rows, weights)]
    exact_spread = torch.stack([exact[0][(slots == row).nonzero()[0, 0]] for row in range(tokens * copies)])
    exact_combined = torch.stack(
        [sum(exact[2][t, k] * exact[1][slots[t, k]] for k in range(copies)) for t in range(tokens)]
    )
    grads = (
        seeded(tuple(spread.shape), device, dtype, seed=3),
        seeded(tuple(combined.shape), device, dtype, seed=4),
    )
    got = torch.autograd.grad([spread, combined], [x, rows, weights], grads)
    right = torch.autograd.grad([exact_spread, exact_combined], exact, [g.double() for g in grads])
    assert [g.dtype for g in got] == [dtype, dtype, weights.dtype]
    return [
        relative_error(*pair)
        for pair in zip((spread, combined, *got), (exact_spread, exact_combined, *right), strict=True)
    ]


def check_strided_and_empty(device: str) -> None:
    """Views of columns and transposed gradients give what their copies give; no tokens are no error."""
    slots, weights = slots_for(4, 2, device), seeded((4, 2), device)
    x, rows = (
        seeded((4, 9), device)[:, 2:7].detach().requires_grad_(),
        seeded((5, 8), device).T.detach().requires_grad_(),
    )
    for function, given, shape in (
        (permute.spread, (x, slots), (5, 8)),
        (permute.combine, (rows, slots, weights), (5, 4)),
    ):
        results = [function(*given, implementation=how) for how in ("triton", "eager")]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(
            *(torch.autograd.grad(y, given[0], seeded(shape, device).T)[0] for y in results)
        )
    none = torch.empty(0, 3, device=device), torch.empty(0, 2, dtype=torch.int64, device=device)
    assert permute.spread(*none, implementation="triton").shape == (0, 3)


@needs_triton
@pytest.mark.parametrize(
    "shape, dtype",
    [*((shape, torch.float32) for shape in SHAPES), *((SHAPES[1], t) for t in TOLERANCE)],
    ids=str,
)
def test_triton_equals_fp64(interpreted, shape, dtype):
    assert max(interpreted(errors_against_fp64, "triton", "cpu", shape, dtype)) < INTERPRETED_TOLERANCE[dtype]


@needs_triton
def test_triton_corner_cases(interpreted):
    interpreted(check_strided_and_empty, "cpu")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_eager_equals_fp64(dtype):
    assert max(errors_against_fp64("eager", "cpu", (5, 2, 16), dtype)) < TOLERANCE[dtype]
    assert max(errors_against_fp64("auto", "cpu", (7, 3, 5), torch.float64)) < 1e-14


FAULTS = [
    ("rows + slot * features + column, values", "rows + (token * COPIES + k) * features + column, values"),
    ("row *= tl.load(weights + token * COPIES + k)", "row *= tl.load(weights + slot)"),
    (
        "tl.store(grad_rows + slot * features + column, weight * dy",
        "tl.store(grad_rows + slot * features + column, dy",
    ),
    (
        "tl.load(rows + slot * features + column, mask=inside",
        "tl.load(rows + token * features + column, mask=inside",
    ),
    ("dot += dy *", "dot = dy *"),  # forgets all but the last features
]


@needs_triton
@pytest.mark.parametrize("right, wrong", FAULTS)
def test_planted_faults_are_caught(interpreted, right, wrong):
    shape = (3, 2, permute.MAX_BLOCK + 13)
    errors = interpreted(
        with_fault, "permute", right, wrong, errors_against_fp64, "triton", "cpu", shape, torch.float32
    )
    assert max(errors) > TOLERANCE[torch.float32]


def test_refusals():
    slots = torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match=r"spread: x is \[2, 3\] \(right: \[1, features\]\)"):
        permute.spread(torch.zeros(2, 3), slots)
    with pytest.raises(ValueError, match=r"combine: weights is \[2, 1\] \(right: \[1, 2\], as slots\)"):
        permute.combine(torch.zeros(2, 3), slots, torch.zeros(2, 1))
