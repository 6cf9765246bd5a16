"""Sum of squares on a real GPU: the interpreter's checks again, and what only a GPU can show."""

import pytest
import torch

from megacore.kernels import grad_norm
from tests.kernel_checks import TOLERANCE
from tests.unit.test_grad_norm_kernel import CLOSE, check_corners, error_against_fp64

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(grad_norm.triton is None, reason="Triton is not installed"),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("programs", [1, 2048])
@pytest.mark.parametrize("implementation", ["triton", "eager"])
def test_equals_fp64(monkeypatch, implementation, programs, weighted, dtype):
    monkeypatch.setattr(grad_norm, "PROGRAMS", programs)
    assert error_against_fp64(implementation, "cuda", dtype, weighted, programs) < CLOSE


def test_corner_cases():
    check_corners("cuda")


def test_many_elements_and_the_host_does_not_wait():
    """An error that grows with the number of elements would show here: 2^27 squares of 0.1 in
    one fp32 sum are off by percents.
    """
    x = torch.full((2**27 + 77,), 0.1, device="cuda")
    operation = grad_norm.SumOfSquares([x])
    exact = x.numel() * x[0].double().item() ** 2
    operation()  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        total = operation()
        coefficient = grad_norm.clip_coefficient(total.sqrt(), 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert total.item() == pytest.approx(exact, rel=1e-7)
    assert coefficient.item() == pytest.approx(exact**-0.5, rel=1e-6)
