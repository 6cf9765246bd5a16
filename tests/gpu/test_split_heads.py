"""The gradient of queries, keys and values on a real GPU: the interpreter's checks again, at training sizes
too.
"""

import pytest
import torch

from megacore.kernels import split_heads
from tests.kernel_checks import TOLERANCE
from tests.unit.test_split_heads_kernel import (
    SHAPES,
    check_many_rows_a_program,
    check_strided_frozen_and_empty,
    error_against_fp64,
)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(split_heads.triton is None, reason="Triton is not installed"),
]


@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 1024, 12, 3, 64), (1, 2048, 8, 6, 128)], ids=str)
def test_triton_equals_fp64(shape, dtype, transposed):
    assert error_against_fp64("triton", "cuda", shape, dtype, transposed) < TOLERANCE[dtype]


@pytest.mark.parametrize("check", [check_many_rows_a_program, check_strided_frozen_and_empty])
def test_corner_cases(check):
    check("cuda")


def test_auto_is_fused():
    qkv = torch.randn(1, 3, 2, 3, 8, device="cuda", requires_grad=True)
    bias = torch.randn(2, 3, 8, device="cuda")
    assert type(split_heads.split_heads(qkv, bias)[0].grad_fn).__name__ == "_SplitHeadsBackward"
