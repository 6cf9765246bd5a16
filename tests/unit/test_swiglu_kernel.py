"""SwiGLU against fp64 autograd, through Triton's interpreter; tests/gpu runs the same checks on a GPU."""

import pytest
import torch

from megacore.kernels import swiglu
from tests.kernel_checks import (
    INTERPRETED_TOLERANCE,
    TOLERANCE,
    needs_triton,
    relative_error,
    seeded,
    with_fault,
)

SHAPES = [
    (1, 2),
    (3, 14),
    (2, 3, 32),  # leading dims are flattened
    (37, 122),  # more than one tile down the rows, the last one partly filled
    (3, 2 * (swiglu.MAX_BLOCK + 13)),  # more than one tile along the row
]


def error_against_fp64(implementation: str, device: str, shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """Largest error of result and gradient, relative to the largest value of each."""
    x = seeded(shape, device, dtype, spread=2.0).requires_grad_()
    y = swiglu.swiglu(x, implementation=implementation)
    assert y.dtype == dtype and y.shape == (*shape[:-1], shape[-1] // 2)
    grad = seeded(tuple(y.shape), device, dtype, seed=2)
    exact = x.detach().double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    exact_y = gate / (1 + torch.exp(-gate)) * up
    (grad_x,), (exact_grad,) = (
        torch.autograd.grad(y, x, grad),
        torch.autograd.grad(exact_y, exact, grad.double()),
    )
    return max(relative_error(y, exact_y), relative_error(grad_x, exact_grad))


def check_strided_extreme_and_empty(device: str) -> None:
    """A view of some columns and a transposed gradient give what their copies give; the gate
    saturates; no rows are no error.
    """
    x = seeded((5, 24), device)[:, 3:17].detach().requires_grad_()
    grad = seeded((7, 5), device).T
    fused, eager = swiglu.swiglu(x, implementation="triton"), swiglu.swiglu(x, implementation="eager")
    torch.testing.assert_close(fused, eager)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, grad)[0] for y in (fused, eager)))
    far = torch.tensor(
        [[-1e4, -200.0, 200.0, float("nan"), 2.0, 2.0, 2.0, 2.0]], device=device, requires_grad=True
    )
    y = swiglu.swiglu(far, implementation="triton")
    assert y[0, :3].tolist() == [0, 0, 400] and y[0, 3].isnan()
    assert torch.autograd.grad(y[0, :3].sum(), far)[0][0, [0, 1, 2, 4, 5, 6]].tolist() == [0, 0, 2, 0, 0, 200]
    assert swiglu.swiglu(torch.empty(0, 8, device=device), implementation="triton").shape == (0, 4)


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triton_equals_fp64(interpreted, shape, dtype):
    assert interpreted(error_against_fp64, "triton", "cpu", shape, dtype) < INTERPRETED_TOLERANCE[dtype]


@needs_triton
def test_triton_corner_cases(interpreted):
    interpreted(check_strided_extreme_and_empty, "cpu")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_eager_equals_fp64(dtype):
    assert error_against_fp64("eager", "cpu", (37, 122), dtype) < TOLERANCE[dtype]
    assert error_against_fp64("auto", "cpu", (3, 14), torch.float64) < 1e-14


FAULTS = [
    ("(1.0 + gate * (1.0 - s))", "(1.0 + gate * (1.0001 - s))"),
    ("gate / (1.0 + tl.exp(-gate)) * up", "gate / (1.0 + tl.exp(-1.0001 * gate)) * up"),
    ("dy * gate * s,", "dy * s,"),
    ("row * x_stride + features + column", "row * x_stride + column"),
]


@needs_triton
@pytest.mark.parametrize("right, wrong", FAULTS)
def test_planted_faults_are_caught(interpreted, right, wrong):
    error = interpreted(
        with_fault, "swiglu", right, wrong, error_against_fp64, "triton", "cpu", (3, 14), torch.float32
    )
    assert error > TOLERANCE[torch.float32]


def test_refusals():
    with pytest.raises(ValueError, match=r"swiglu: x is \[2, 3\] \(right: \[..., 2 · features\]\)"):
        swiglu.swiglu(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="implementation 'fast' is unknown"):
        swiglu.swiglu(torch.zeros(2, 4), implementation="fast")
    with pytest.raises(ValueError, match=r"x is torch.float64|Triton is not installed"):
        swiglu.swiglu(torch.zeros(2, 4).double(), implementation="triton")
