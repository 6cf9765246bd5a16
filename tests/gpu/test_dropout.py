"""The counter-based dropout on a real GPU: the interpreter's checks again, at training sizes too."""

import pytest
import torch

from megacore.kernels import dropout
from tests.kernel_checks import TOLERANCE
from tests.unit.test_dropout_kernel import (
    KEY,
    SHAPES,
    check_many_rows_a_program,
    check_same_bits,
    check_strided_extreme_and_empty,
    error_against_fp64,
    mask_of_kernel,
)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(dropout.triton is None, reason="Triton is not installed"),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (2048, 768), (1000, 12288)], ids=str)
def test_triton_equals_fp64(shape, dtype):
    # The bias's gradient adds thousands of rows up in fp32.
    assert error_against_fp64("triton", "cuda", shape, dtype) < TOLERANCE[dtype] * (
        5 if shape[0] > 100 else 1
    )


@pytest.mark.parametrize(
    "check", [check_same_bits, check_strided_extreme_and_empty, check_many_rows_a_program]
)
def test_corner_cases(check):
    check("cuda")


def test_keep_mask_is_the_same_on_both_devices():
    for tokens, features, first in [(257, 768, 0), (64, 129, 2**33 + 5)]:
        masks = [
            dropout.keep_mask(tokens, features, 0.1, KEY, first=first, device=device).cpu()
            for device in ("cpu", "cuda")
        ]
        assert torch.equal(*masks) and torch.equal(
            masks[0], mask_of_kernel("cuda", tokens, features, first, KEY, 0.1).cpu()
        )
