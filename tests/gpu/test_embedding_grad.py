"""The embedding's gradient on a real GPU: the interpreter's checks again, and what only a GPU can show."""

import pytest
import torch

from megacore.kernels import embedding_grad
from megacore.tensor_parallel.gradient import MainGradient
from tests.kernel_checks import TOLERANCE, launches
from tests.unit.test_embedding_grad_kernel import (
    SIZES,
    additions,
    check_corners,
    draw_ids,
    error_against_fp64,
    error_in_bounds,
    error_of_tensor_ranks,
)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(embedding_grad.triton is None, reason="Triton is not installed"),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("implementation", ["triton", "eager"])
def test_equals_fp64(implementation, name, dtype):
    assert error_against_fp64(implementation, "cuda", name, dtype) <= 1


@pytest.mark.parametrize("name", SIZES)
def test_fp64_is_eager(name):
    assert error_against_fp64("auto", "cuda", name, torch.float64) <= 1


@pytest.mark.parametrize("ranks", [2, 3])
def test_tensor_ranks(ranks):
    assert error_of_tensor_ranks("triton", "cuda", ranks) <= 1


def test_corner_cases():
    check_corners("cuda")


@pytest.mark.parametrize("name", ["all alike", "Zipf", "uniform"])
def test_a_microbatch_has_the_same_bits_every_time_and_the_host_does_not_wait(name):
    """As many tokens as a microbatch of gpt_124m has, through the sum that its layers add to."""
    tokens, vocabulary, features = 16 * 1024, 50304, 768
    ids = draw_ids(name, tokens, vocabulary).cuda()
    grad = torch.randn(tokens, features, device="cuda", dtype=torch.bfloat16)
    total = torch.randn(vocabulary, features, device="cuda")

    def summed() -> torch.Tensor:
        main = MainGradient(total.clone())
        main.empty = False
        main.add_rows(grad, ids)
        return main.total

    with launches() as log:
        first = summed()
    assert [kernel for kernel, _ in log] == ["_sum_runs_kernel"] * 4
    torch.cuda.set_sync_debug_mode("error")
    try:
        others = [summed() for _ in range(5)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(other, first) for other in others)
    assert error_in_bounds(first, total, grad, ids, additions("triton", tokens)) <= 1
