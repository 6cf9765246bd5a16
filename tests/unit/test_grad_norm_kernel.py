"""Sum of squares against fp64, through Triton's interpreter; tests/gpu runs the same checks on a GPU."""

import pytest
import torch
from torch import Tensor

from megacore.kernels import grad_norm
from tests.kernel_checks import TOLERANCE, needs_triton, seeded, with_fault

SIZES = [(5,), (64,), (0,), (grad_norm.BLOCK + 65,), (3, 64), (3 * grad_norm.BLOCK,)]
# Of squares summed over rows in fp32, rounding errors are as often up as down: a hundredth of one rounding is
# left of many rows.
CLOSE = 1e-7


def inputs(device: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors whose rows differ in size, and weights 0, 1 and 2."""
    tensors, weights = [], []
    for size in SIZES:
        x = seeded(size, device) * (
            1 + torch.arange(torch.Size(size).numel(), device=device).view(size) // 64
        )
        tensors.append(x.to(dtype))
        weights.append((torch.arange(-(-x.numel() // 64), device=device) % 3).double())
    return tensors, weights


def error_against_fp64(
    implementation: str, device: str, dtype: torch.dtype, weighted: bool, programs: int = 2048
) -> float:
    """The relative error; `programs` few enough give each of them several blocks."""
    grad_norm.PROGRAMS = programs
    tensors, weights = inputs(device, dtype)
    exact = 0.0
    for x, w in zip(tensors, weights, strict=True):
        each = w.repeat_interleave(64)[: x.numel()] if weighted else torch.ones(x.numel(), device=device)
        exact += float((x.double().flatten().square() * each).sum())
    operation = grad_norm.SumOfSquares(tensors, weights if weighted else None, implementation=implementation)  # type: ignore[arg-type]
    got = operation()
    assert got.dtype == torch.float64 and got.shape == () and got.device == tensors[0].device
    assert torch.equal(got, operation()), "not the same bits again"
    return abs(got.item() - exact) / exact


def check_corners(device: str) -> None:
    """What is not finite shows; unaligned tensors; nothing but empty ones."""
    for implementation in ("triton", "eager"):
        for wrong in (float("nan"), float("inf")):
            x = torch.ones(200, device=device)
            x[130] = wrong
            assert not grad_norm.SumOfSquares([x], implementation=implementation)().isfinite()
        x = torch.full((201,), 3.0, device=device)
        assert grad_norm.SumOfSquares([x[1:]], implementation=implementation)().item() == pytest.approx(
            1800, rel=CLOSE
        )
        assert grad_norm.SumOfSquares([x[:0]], implementation=implementation)() == 0


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_triton_equals_fp64(interpreted, weighted, dtype):
    assert interpreted(error_against_fp64, "triton", "cpu", dtype, weighted) < CLOSE


@needs_triton
def test_several_blocks_to_a_program(interpreted):
    """As with a large model, where blocks outnumber the programs that one can add up."""
    assert interpreted(error_against_fp64, "triton", "cpu", torch.float32, True, 1) < CLOSE


@needs_triton
def test_triton_corner_cases(interpreted):
    interpreted(check_corners, "cpu")


@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.float64], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_eager_equals_fp64(weighted, dtype):
    assert error_against_fp64("eager", "cpu", dtype, weighted) < (1e-14 if dtype == torch.float64 else CLOSE)


def test_clip_coefficient():
    norms = torch.tensor([0.0, 0.5, 1.0, 4.0], dtype=torch.float64)
    assert grad_norm.clip_coefficient(norms, 1.0).tolist() == pytest.approx([1.0, 1.0, 1.0, 0.25], rel=2e-6)


FAULTS = {
    "the last rows are left out": (
        "mask=first + lane < stop, other=0.0).to",
        "mask=first + lane < stop - 64, other=0.0).to",
    ),
    "a later block has the first one's weights": ("+ first // ROW", "+ start // ROW"),
    "one program's share is lost": ("mask=first + lane < programs", "mask=first + lane < programs - 1"),
    "the weights are left out": ("squares *= tl.load(", "squares *= 1 + 0 * tl.load("),
    "each block alone": ("total += squares", "total = squares"),
}


@needs_triton
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(interpreted, fault):
    assert (
        interpreted(
            with_fault,
            "grad_norm",
            *FAULTS[fault],
            error_against_fp64,
            "triton",
            "cpu",
            torch.float32,
            True,
            1,
        )
        > CLOSE
    )


REFUSALS = {
    "tensors is empty": lambda x, w: grad_norm.SumOfSquares([]),
    r"tensors\[0\] .* stride": lambda x, w: grad_norm.SumOfSquares([x[::2]]),
    r"tensors\[1\] is torch.bfloat16": lambda x, w: grad_norm.SumOfSquares([x, x.bfloat16()]),
    "row_weights has 2 tensors": lambda x, w: grad_norm.SumOfSquares([x], [w, w]),
    r"row_weights\[0\] is \[2\]": lambda x, w: grad_norm.SumOfSquares([x], [w[:2]]),
    r"row_weights\[0\] is torch.float32": lambda x, w: grad_norm.SumOfSquares([x], [w.float()]),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_refusals(message):
    with pytest.raises(ValueError, match=message):
        REFUSALS[message](torch.zeros(130), torch.ones(3, dtype=torch.float64))
