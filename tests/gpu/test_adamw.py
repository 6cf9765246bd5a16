"""AdamW on a real GPU: the interpreter's checks again, and what only a GPU can show."""

import pytest
import torch

from megacore.kernels import adamw
from tests.kernel_checks import TOLERANCE
from tests.unit.test_adamw_kernel import GRADIENTS, check_first_update, check_unaligned, error_against_fp64

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(adamw.triton is None, reason="Triton is not installed"),
]


@pytest.mark.parametrize("dtype", GRADIENTS, ids=str)
@pytest.mark.parametrize("implementation", ["triton", "eager"])
def test_equals_fp64(implementation, dtype):
    assert error_against_fp64(implementation, "cuda", dtype) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("check", [check_first_update, check_unaligned])
def test_corner_cases(check):
    check("cuda")


def test_the_host_does_not_wait():
    """A step that synchronises empties the queue of launches: a bubble as long as a backward pass is deep."""
    columns = [[torch.ones(5000, device="cuda")] for _ in range(4)]
    optim = adamw.AdamW(*columns, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)  # type: ignore[misc]
    scale, skip = torch.ones((), dtype=torch.float64, device="cuda"), torch.zeros((), device="cuda")
    optim.step(0.1, scale, skip)  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        optim.step(0.1, scale, skip)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert optim.table is not None and optim.updates == 2


def test_a_tensor_of_more_than_32_bits_of_elements():
    if torch.cuda.mem_get_info()[0] < 38 * 2**30:
        pytest.skip("needs 38 GiB of free GPU memory")
    columns = [[torch.ones(2**31 + 5, device="cuda")] for _ in range(4)]
    adamw.AdamW(*columns, weight_decay=0.0, beta1=0.9, beta2=0.95, eps=1e-8).step(0.5)  # type: ignore[misc]
    (master,) = columns[0]
    assert master[-1] == master[0] != 1 and (master == master[0]).all()
