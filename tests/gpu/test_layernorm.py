"""Fused layer and RMS norm on a real GPU: the interpreter's checks again, and what only a GPU can show."""

import pytest
import torch

from megacore.kernels import layernorm
from tests.kernel_checks import TOLERANCE, launches, seeded
from tests.unit.test_layernorm_kernel import CASES, check_corner_cases, check_many_shares, error_against_fp64

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(layernorm.triton is None, reason="Triton is not installed"),
]
# Rows of attention's heads, of models, and longer than the blocks of backward and of forward.
TRAINING_SHAPES = [(4099, 64), (1031, 1024), (517, 4096), (257, 8192), (67, 16384), (33, 65536), (129, 5003)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("rms", [False, True], ids=["layer_norm", "rms_norm"])
def test_triton_equals_fp64(rms, adds, dtype):
    for shape, sizes in CASES + [(shape, {}) for shape in TRAINING_SHAPES]:
        assert error_against_fp64(rms, adds, "triton", "cuda", shape, dtype, sizes) < 2 * TOLERANCE[dtype], (
            shape,
            sizes,
        )


@pytest.mark.parametrize("check", [check_corner_cases, check_many_shares])
def test_corner_cases(check):
    check("cuda")


@pytest.mark.parametrize("features", [128, 4096, 32768])
def test_auto_is_fused_and_bitwise_repeatable(features):
    """`auto` must reach the kernels on a GPU, and training's bitwise resume needs every
    sum to repeat itself.
    """
    x = seeded((3001, features), "cuda", torch.bfloat16).requires_grad_()
    weight, bias = (seeded((features,), "cuda", torch.bfloat16, seed=i).requires_grad_() for i in (1, 2))
    grad = seeded((3001, features), "cuda", torch.bfloat16, seed=3)
    with launches() as log:
        outcomes = []
        for _ in range(2):
            y = layernorm.layer_norm(x, weight, bias)
            outcomes.append((y, *torch.autograd.grad(y, (x, weight, bias), grad)))
    assert {"_forward_kernel", "_backward_kernel", "_add_parts_kernel"} <= {name for name, _ in log}
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def test_offsets_beyond_32_bits():
    """More than 2^31 elements: 32-bit row offsets would wrap around into other rows."""
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    x = torch.ones(2**19 + 2, 4096, device="cuda", dtype=torch.bfloat16)
    x[-1, ::2] = 3.0
    x.requires_grad_()
    weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = layernorm.layer_norm(x, weight)
    assert y[-1, 0] == 1 and y[-1, 1] == -1 and not y[-2].any()
    (grad,) = torch.autograd.grad(
        y, x, torch.nn.functional.one_hot(torch.tensor([7], device="cuda"), 4096).to(y.dtype).expand_as(y)
    )
    assert grad[-1, 7] < 2 < grad[-2, 7]  # 1 / std is 1 in the last row, 316 in the others


def test_tensors_on_a_device_that_is_not_current():
    """A launch goes to the current device: one that is not the tensors' would read what is not its own."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    x, weight = torch.ones(4, 64, device="cuda:1"), torch.ones(64, device="cuda:1")
    torch.testing.assert_close(layernorm.rms_norm(x, weight), torch.ones_like(x))
