"""Products of groups of rows on a real GPU: the interpreter's checks again, at larger sizes,
and without a wait of the host.
"""

import pytest
import torch

from megacore.kernels import grouped_product
from tests.kernel_checks import TOLERANCE
from tests.unit.test_grouped_product_kernel import COUNTS, SIZES, errors_against_fp64

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(grouped_product.triton is None, reason="Triton is not installed"),
]
LARGE = [1000, 0, 3, 511, 2000, 0, 64, 65]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("counts", [*COUNTS.values(), LARGE], ids=str)
@pytest.mark.parametrize("size", [*SIZES, (40, grouped_product.COLUMNS + 5), (512, 1376)], ids=str)
def test_triton_equals_fp64(counts, size, dtype):
    assert max(errors_against_fp64("triton", "cuda", counts, size, dtype, {})) < TOLERANCE[dtype]


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="no GPU from Hopper on",
)
def test_auto_takes_pytorchs_own(monkeypatch):
    """In bf16, whose rows begin at multiples of 16 bytes."""
    monkeypatch.setattr(grouped_product, "_product", None)
    assert (
        max(errors_against_fp64("auto", "cuda", LARGE, (512, 1376), torch.bfloat16, {}))
        < TOLERANCE[torch.bfloat16]
    )


def test_the_host_does_not_wait():
    """A step may wait for the device in one place only, where tokens are exchanged."""
    x, weight = (
        torch.randn(4096, 512, device="cuda", dtype=torch.bfloat16),
        torch.randn(8, 1024, 512, device="cuda", dtype=torch.bfloat16),
    )
    ends = torch.tensor([100, 100, 600, 2000, 2000, 3000, 4096, 4096], device="cuda")
    y = grouped_product.grouped_product(x, weight, ends)  # compiled
    grouped_product.grouped_outer(y, x, ends, torch.float32)
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = grouped_product.grouped_product(x, weight, ends)
        grouped_product.grouped_outer(y, x, ends, torch.float32)
    finally:
        torch.cuda.set_sync_debug_mode("default")
