"""Fused linear and cross entropy on a real GPU: the interpreter's checks again, and
what only a GPU can show.
"""

import pytest
import torch

from megacore.kernels import linear_cross_entropy
from megacore.kernels.cross_entropy import triton
from tests.kernel_checks import TOLERANCE
from tests.unit.test_cross_entropy_kernel import ALL, PLAIN
from tests.unit.test_linear_cross_entropy_kernel import (
    TOKENS,
    check_corners,
    check_fp16,
    error_against_fp64,
    error_on_split_vocabulary,
)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(triton is None, reason="Triton is not installed"),
]
# Logits of up to 8 are rounded here, to 2^-6 in bf16, and their gradient with them.
ROUNDED = TOLERANCE | {torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
@pytest.mark.parametrize("chunk", [3, TOKENS, None])
@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "smoothed"])
def test_triton_equals_fp64(options, chunk, dtype):
    assert error_against_fp64("triton", "cuda", dtype, options, chunk) < ROUNDED[dtype]


def test_corner_cases():
    check_corners("cuda")
    assert check_fp16("cuda") < 2**-10
    assert error_on_split_vocabulary("triton", "cuda", ALL) < TOLERANCE[torch.float32]


def test_peak_memory_is_a_quarter_of_the_logits():
    """Beside the gradients of hidden and weight, which the unfused one makes too, the
    weight's here in fp32.
    """
    tokens, features, rows = 8192, 256, 32768
    hidden = torch.randn(tokens, features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(rows, features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(rows, (tokens,), device="cuda")
    (hidden @ weight.T)[:1].sum().item()  # whatever the matrix library takes for itself, it has now
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy.linear_cross_entropy(hidden, weight, targets).backward()
    # and a chunk's product before it is put in its place
    gradients = (tokens * 2 + rows * (4 + 2)) * features + tokens // 4 * features * 2
    assert torch.cuda.max_memory_allocated() - before < tokens * rows * 2 / 4 + gradients + 2**20
