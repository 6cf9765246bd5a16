"""Cross entropy on a real GPU: the interpreter's checks again, and what only a GPU can show."""

import math

import pytest
import torch

from megacore.kernels import cross_entropy
from tests.kernel_checks import TOLERANCE
from tests.unit.test_cross_entropy_kernel import (
    ALL,
    PLAIN,
    SHAPES,
    check_extremes,
    check_in_place,
    check_scaled_before_rounding,
    check_targets_outside,
    error_against_fp64,
)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(cross_entropy.triton is None, reason="Triton is not installed"),
]
TRAINING_SHAPES = [(256, 50257), (64, 131072)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "smoothed"])
@pytest.mark.parametrize(
    "shape, ranks", [*((shape, 1) for shape in SHAPES + TRAINING_SHAPES), ((64, 50257), 3)], ids=str
)
def test_triton_equals_fp64(shape, ranks, options, dtype):
    assert error_against_fp64("triton", "cuda", shape, dtype, options, ranks) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "check", [check_extremes, check_targets_outside, check_in_place, check_scaled_before_rounding]
)
def test_corner_cases(check):
    check("cuda")


def test_auto_is_fused_and_bitwise_repeatable():
    """`auto` must reach the kernel on a GPU, and training's bitwise resume needs it to repeat itself."""
    logits = torch.randn(512, 50257, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(50257, (512,), device="cuda")
    losses = [cross_entropy.cross_entropy(logits * 1, targets) for _ in range(2)]
    assert torch.equal(*losses)
    grads = [torch.autograd.grad(loss.sum(), logits)[0] for loss in losses]
    assert torch.equal(*grads)
    torch.testing.assert_close(
        losses[0], cross_entropy.cross_entropy(logits * 1, targets, implementation="eager")
    )


def test_no_memory_beside_the_logits():
    """The point of writing the gradient in place: statistics aside, nothing is
    allocated, forward or backward.
    """
    logits = torch.randn(1024, 32768, device="cuda", dtype=torch.bfloat16, requires_grad=True) * 1
    targets = torch.randint(32768, (1024,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(cross_entropy.cross_entropy(logits, targets).sum(), logits)
    assert torch.cuda.max_memory_allocated() - before < 2**20


def test_offsets_beyond_32_bits():
    """More than 2^31 logits, as of 16 sequences of 4096 tokens: 32-bit row offsets
    would wrap around into other rows.
    """
    if torch.cuda.mem_get_info()[0] < 7 * 2**30:
        pytest.skip("needs 7 GiB of free GPU memory")
    logits = torch.zeros(66000, 32768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(66000, dtype=torch.int64, device="cuda")
    with torch.no_grad():
        logits[-1, 5] = 40.0
    loss = cross_entropy.cross_entropy(logits, targets)
    assert loss[-1] == 40 and loss[-2].item() == pytest.approx(math.log(32768), rel=1e-6)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert grad[-1, 5] == 1 and grad[-1, 0] == -1 and grad[-2, 5] == 2**-15
