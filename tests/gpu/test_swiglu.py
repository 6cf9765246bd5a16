"""SwiGLU on a real GPU: the interpreter's checks again, and what only a GPU can show."""

import pytest
import torch

from megacore.kernels import swiglu
from tests.kernel_checks import TOLERANCE
from tests.unit.test_swiglu_kernel import SHAPES, check_strided_extreme_and_empty, error_against_fp64

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(swiglu.triton is None, reason="Triton is not installed"),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 2 * 5504), (1000, 2 * 14336)], ids=str)
def test_triton_equals_fp64(shape, dtype):
    assert error_against_fp64("triton", "cuda", shape, dtype) < TOLERANCE[dtype]


def test_corner_cases():
    check_strided_extreme_and_empty("cuda")


def test_auto_is_fused():
    y = swiglu.swiglu(torch.randn(5, 64, device="cuda", requires_grad=True))
    assert y.grad_fn.next_functions[0][0].name() == "_SwiGLUBackward"


def test_offsets_beyond_32_bits():
    """More than 2^31 elements: 32-bit row offsets would wrap around into other rows."""
    if torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("needs 10 GiB of free GPU memory")
    x = torch.zeros(2**17 + 1, 2**14 + 256, device="cuda", dtype=torch.bfloat16)
    x[-1] = 2.0
    expected = swiglu.swiglu_eager(x[-1])
    y = swiglu.swiglu(x)
    assert torch.allclose(y[-1], expected) and not y[-2].any()
