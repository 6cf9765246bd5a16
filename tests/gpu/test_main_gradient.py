"""Weight gradients on a real GPU: products of 16 bits are added to fp32 sums without being rounded."""

import pytest
import torch

from megacore.kernels.linear_cross_entropy import adds_in_fp32
from tests.unit.test_main_gradient import TOLERANCE, error_of_two_products

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_add_up(dtype: torch.dtype) -> None:
    assert all(adds_in_fp32("cuda", dtype) for dtype in (torch.bfloat16, torch.float16))
    assert error_of_two_products(dtype, "cuda") < min(TOLERANCE.get(dtype, 1.0), TOLERANCE[torch.float32])
