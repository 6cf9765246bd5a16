"""bias + GELU on a real GPU: the interpreter's checks again, at training sizes too."""

import pytest
import torch

from megacore.kernels import gelu
from tests.kernel_checks import TOLERANCE
from tests.unit.test_gelu_kernel import (
    CASES,
    SHAPES,
    check_many_rows_a_program,
    check_strided_extreme_and_empty,
    error_against_fp64,
)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(gelu.triton is None, reason="Triton is not installed"),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 3072), (1000, 5504)], ids=str)
def test_triton_equals_fp64(shape, dtype):
    for approximate, with_bias in CASES:
        error = error_against_fp64("triton", "cuda", shape, dtype, approximate, with_bias)
        # The bias's gradient adds thousands of rows up in fp32.
        assert error < TOLERANCE[dtype] * (5 if shape[0] > 100 else 1), (approximate, with_bias)


@pytest.mark.parametrize("check", [check_strided_extreme_and_empty, check_many_rows_a_program])
def test_corner_cases(check):
    check("cuda")


def test_auto_is_fused_and_bitwise_repeatable():
    """Sums over rows must not depend on which program ends first."""
    x = torch.randn(4096, 3072, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(3072, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    outputs = [gelu.bias_gelu(x, bias) for _ in range(2)]
    assert outputs[0].grad_fn.next_functions[0][0].name() == "_BiasGeluBackward"
    grads = [torch.autograd.grad(output, (x, bias), torch.ones_like(output)) for output in outputs]
    assert torch.equal(*outputs) and all(torch.equal(*pair) for pair in zip(*grads, strict=True))
