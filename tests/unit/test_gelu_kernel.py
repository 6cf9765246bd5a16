"""bias + GELU against fp64 autograd, through Triton's interpreter; tests/gpu runs the
same checks on a GPU.
"""

import math

import pytest
import torch

from megacore.kernels import dispatch, gelu
from tests.kernel_checks import (
    INTERPRETED_TOLERANCE,
    TOLERANCE,
    needs_triton,
    relative_error,
    seeded,
    with_fault,
)

SHAPES = [
    (1, 1),
    (3, 7),
    (2, 3, 32),  # leading dims are flattened
    (37, 61),  # more than one tile down the rows, the last one partly filled
    (3, gelu.MAX_BLOCK + 13),  # more than one tile along the row
]
CASES = [("tanh", True), ("tanh", False), ("none", True), ("none", False)]


def exact_gelu(u: torch.Tensor, approximate: str) -> torch.Tensor:
    """As the papers write it, no code of PyTorch's or the kernel's."""
    if approximate == "tanh":
        return 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
    return 0.5 * u * (1 + torch.erf(u / math.sqrt(2)))


def error_against_fp64(
    implementation: str,
    device: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    approximate: str,
    with_bias: bool,
    spread: float = 2.0,
) -> float:
    """Largest error of result and gradients, relative to the largest value of each."""
    x = seeded(shape, device, dtype, spread=spread).requires_grad_()
    bias = seeded(shape[-1:], device, dtype, seed=1).requires_grad_() if with_bias else None
    grad = seeded(shape, device, dtype, seed=2)
    inputs = [t for t in (x, bias) if t is not None]
    y = gelu.bias_gelu(x, bias, approximate=approximate, implementation=implementation)
    assert y.dtype == dtype and y.shape == x.shape
    exact = [t.detach().double().requires_grad_() for t in inputs]
    exact_y = exact_gelu(sum(exact), approximate)
    pairs = zip(
        torch.autograd.grad(y, inputs, grad), torch.autograd.grad(exact_y, exact, grad.double()), strict=True
    )
    return max(relative_error(y, exact_y), *(relative_error(got, right) for got, right in pairs))


def check_strided_extreme_and_empty(device: str) -> None:
    """A view of some columns and a transposed gradient give what their copies give; the tails
    saturate; no rows are no error.
    """
    wide = seeded((5, 24), device)
    x, bias = wide[:, 3:16].detach().requires_grad_(), seeded((13,), device).requires_grad_()
    grad = seeded((13, 5), device).T
    results = []
    for implementation in ("triton", "eager"):
        y = gelu.bias_gelu(x, bias, implementation=implementation)
        results.append((y, *torch.autograd.grad(y, (x, bias), grad)))
    for fused, eager in zip(*results, strict=True):
        torch.testing.assert_close(fused, eager)
    far = torch.tensor([[-1e4, -30.0, 30.0, 1e4, float("nan")]], device=device, requires_grad=True)
    for approximate in ("tanh", "none"):
        y = gelu.bias_gelu(far, approximate=approximate, implementation="triton")
        assert y[0, :4].tolist() == [0, 0, 30, 1e4] and y[0, 4].isnan()
        assert torch.autograd.grad(y[0, :4].sum(), far)[0][0, :4].tolist() == [0, 0, 1, 1]
    assert gelu.bias_gelu(
        torch.empty(0, 4, device=device), torch.empty(4, device=device), implementation="triton"
    ).shape == (0, 4)


def check_many_rows_a_program(device: str) -> None:
    """With fewer programs than tiles each goes down several tiles, of which the last
    reaches beyond the rows.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "multiprocessors", lambda device: 1)
        patch.setattr(gelu, "BACKWARD_PROGRAMS", 2)
        error = error_against_fp64("triton", device, (150, 61), torch.float32, "tanh", True)
    assert error < TOLERANCE[torch.float32]


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triton_equals_fp64(interpreted, shape, dtype):
    for approximate, with_bias in CASES:
        error = interpreted(error_against_fp64, "triton", "cpu", shape, dtype, approximate, with_bias)
        assert error < INTERPRETED_TOLERANCE[dtype], (approximate, with_bias)


@needs_triton
@pytest.mark.parametrize("check", [check_strided_extreme_and_empty, check_many_rows_a_program])
def test_triton_corner_cases(interpreted, check):
    interpreted(check, "cpu")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_eager_equals_fp64(dtype):
    for approximate, with_bias in CASES:
        assert error_against_fp64("eager", "cpu", (37, 61), dtype, approximate, with_bias) < TOLERANCE[dtype]
        assert error_against_fp64("auto", "cpu", (3, 7), torch.float64, approximate, with_bias) < 1e-14


FAULTS = [
    ("0.044715", "0.0447", "tanh"),
    ("1.5957691216057308", "1.5958", "tanh"),
    ("3.0 * CUBIC", "2.0 * CUBIC", "tanh"),
    ("0.7071067811865476", "0.70711", "none"),
    ("0.3989422804014327", "0.39895", "none"),
    ("tl.where(inside, dx, 0.0)", "tl.where(inside & (row > 0), dx, 0.0)", "tanh"),
]


@needs_triton
@pytest.mark.parametrize("right, wrong, approximate", FAULTS)
def test_planted_faults_are_caught(interpreted, right, wrong, approximate):
    """A constant wrong in its fifth digit, or a row missing from the bias's gradient, must
    not pass the comparison above.
    """
    error = interpreted(
        with_fault,
        "gelu",
        right,
        wrong,
        error_against_fp64,
        "triton",
        "cpu",
        (3, 7),
        torch.float32,
        approximate,
        True,
    )
    assert error > TOLERANCE[torch.float32]


def test_refusals():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"bias_gelu: bias is \[2\] \(right: \[3\]"):
        gelu.bias_gelu(x, torch.zeros(2))
    with pytest.raises(ValueError, match="approximate 'sigmoid' is unknown"):
        gelu.bias_gelu(x, approximate="sigmoid")
    with pytest.raises(ValueError, match=r"x is \[\]"):
        gelu.bias_gelu(torch.zeros(()))
    with pytest.raises(ValueError, match="bias is on meta, x on cpu"):
        gelu.bias_gelu(x, torch.zeros(3, device="meta"))
    with pytest.raises(ValueError, match=r"x is torch.float64|Triton is not installed"):
        gelu.bias_gelu(x.double(), implementation="triton")
