"""Spreading and combining rows of experts on a real GPU: the interpreter's checks again, at larger sizes."""

import pytest
import torch

from megacore.kernels import permute
from tests.kernel_checks import TOLERANCE
from tests.unit.test_permute_kernel import SHAPES, check_strided_and_empty, errors_against_fp64

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(permute.triton is None, reason="Triton is not installed"),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (100, 8, 4096)], ids=str)
def test_triton_equals_fp64(shape, dtype):
    assert max(errors_against_fp64("triton", "cuda", shape, dtype)) < TOLERANCE[dtype]


def test_corner_cases():
    check_strided_and_empty("cuda")


def test_the_same_bits_every_time():
    """Nothing is added by atomics."""
    slots = permute.slots_of(torch.randperm(8 * 512, device="cuda"), 8)
    rows, weights = (
        torch.randn(8 * 512, 1024, device="cuda", dtype=torch.bfloat16),
        torch.rand(512, 8, device="cuda"),
    )
    first = permute.combine(rows, slots, weights)
    assert all(torch.equal(permute.combine(rows, slots, weights), first) for _ in range(5))
