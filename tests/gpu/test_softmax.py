"""The fused softmax on a real GPU: the interpreter's checks again, and what only a GPU can show."""

import pytest
import torch

from megacore.kernels import softmax
from tests.kernel_checks import TOLERANCE
from tests.unit.test_softmax_kernel import (
    CAUSAL,
    check_extremes,
    check_nan,
    check_strided_and_empty,
    error_against_fp64,
)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(softmax.triton is None, reason="Triton is not installed"),
]
TRAINING_SHAPES = [(2, 4, 1024, 1024), (1, 2, 513, 2053), (1, 1, 9, softmax.MAX_BLOCK + 8), (1, 1, 3, 65536)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_triton_equals_fp64(dtype):
    for shape, sizes in CAUSAL + [(shape, {}) for shape in TRAINING_SHAPES]:
        assert error_against_fp64("triton", "cuda", shape, dtype, sizes) < TOLERANCE[dtype], (shape, sizes)


@pytest.mark.parametrize("check", [check_extremes, check_nan, check_strided_and_empty])
def test_corner_cases(check):
    check("cuda")


def test_auto_is_fused_and_bitwise_repeatable():
    """`auto` must reach the kernel on a GPU, and training's bitwise resume needs it to repeat itself."""
    scores = torch.randn(2, 4, 257, 257, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    outputs = [softmax.causal_softmax(scores, 0.125) for _ in range(2)]
    assert type(outputs[0].grad_fn).__name__ == "_SoftmaxBackward"
    assert torch.equal(*outputs)
    grads = [torch.autograd.grad(output, scores, torch.ones_like(output))[0] for output in outputs]
    assert torch.equal(*grads)


def test_offsets_beyond_32_bits():
    """More than 2^31 scores, as at 8 x 32 heads x 4096 x 4096: 32-bit row offsets
    would wrap around into other rows.
    """
    shape = (1, 160, 4096, 4096)
    if torch.cuda.mem_get_info()[0] < 14 * 2**30:
        pytest.skip("needs 14 GiB of free GPU memory")
    scores = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
    scores[0, -1, -1, 5] = 30.0
    probabilities = softmax.causal_softmax(scores, 1.0)
    assert probabilities[0, -1, -1, 5] == 1 and probabilities[0, -1, -2, 5] == torch.tensor(
        1 / 4095, dtype=torch.bfloat16
    )
