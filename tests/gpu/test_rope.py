"""Rotary positions on a real GPU: the interpreter's checks again, at training sizes too."""

import pytest
import torch

from megacore.kernels import rope
from tests.kernel_checks import TOLERANCE
from tests.unit.test_rope_kernel import (
    SHAPES,
    check_nan_and_empty,
    normed_error,
    rope_error,
    rope_qkv_error,
    tables,
)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(rope.triton is None, reason="Triton is not installed"),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "shape", [*SHAPES, (2, 1024, 12, 3, 64), (1, 2048, 8, 6, 128), (2, 333, 5, 4, 80)], ids=str
)
def test_triton_equals_fp64(shape, dtype):
    for check in (rope_error, rope_qkv_error, normed_error):
        assert check("triton", "cuda", shape, dtype) < TOLERANCE[dtype], check.__name__
    assert rope_error("triton", "cuda", shape, dtype, in_place=True) < TOLERANCE[dtype], "in place"


def test_corner_cases():
    check_nan_and_empty("cuda")


def test_auto_is_fused():
    cos, sin = tables(3, 8, "cuda")
    qkv = torch.randn(1, 3, 2, 4, 8, device="cuda", requires_grad=True)
    assert type(rope.rope_qkv(qkv, cos, sin)[0].grad_fn).__name__ == "_RopeQKVBackward"
    x = torch.randn(1, 2, 3, 8, device="cuda", requires_grad=True)
    assert type(rope.rope(x, cos, sin).grad_fn).__name__ == "_RopeBackward"
