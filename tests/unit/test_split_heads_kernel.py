"""Queries, keys and values and the gradients of what they are split from, against fp64, through Triton's
interpreter; tests/gpu runs the same checks on a GPU.
"""

import pytest
import torch

from megacore.kernels import dispatch, split_heads
from tests.kernel_checks import (
    INTERPRETED_TOLERANCE,
    TOLERANCE,
    needs_triton,
    poisoned_memory,
    relative_error,
    seeded,
    with_fault,
)

# [batch, seq, kv heads, group + 2, head]
SHAPES = [
    (1, 1, 1, 3, 1),
    (2, 5, 3, 3, 8),  # multi-head
    (1, 7, 2, 6, 10),  # grouped queries, a head that is no power of two
    (3, 50, 2, 3, 4),  # more than one tile down the rows, the last one partly filled
    (1, 3, 9, 3, 40),  # more than one tile along the row
]


def error_against_fp64(
    implementation: str, device: str, shape: tuple[int, ...], dtype: torch.dtype, transposed: bool = False
) -> float:
    """Largest error of the gradients of qkv and bias, relative to the largest value of each; infinite unless
    q, k and v are parts of qkv, and the gradient of qkv theirs, bit by bit.

    transposed: gradients as attention gives them, with the heads of a token next to each other.
    """
    qkv = seeded(shape, device, dtype).requires_grad_()
    bias = seeded(shape[2:], device, dtype, seed=1).requires_grad_()
    results = split_heads.split_heads(qkv, bias, implementation=implementation)
    group = shape[3] - 2
    parts = [qkv[:, :, :, :group].flatten(2, 3), qkv[:, :, :, group], qkv[:, :, :, group + 1]]
    exact = [part.transpose(1, 2) for part in parts]
    if not all(torch.equal(*pair) for pair in zip(results, exact, strict=True)):
        return float("inf")
    grads = [seeded(tuple(y.shape), device, dtype, seed=2 + i) for i, y in enumerate(results)]
    if transposed:
        grads = [grad.transpose(1, 2).contiguous().transpose(1, 2) for grad in grads]
    with poisoned_memory():
        grad_qkv, grad_bias = torch.autograd.grad(results, (qkv, bias), grads)
    (exact_qkv,) = torch.autograd.grad(exact, qkv, grads)
    if grad_bias.dtype != dtype or not torch.equal(grad_qkv, exact_qkv):
        return float("inf")
    return relative_error(grad_bias, exact_qkv.double().sum((0, 1)))


def check_many_rows_a_program(device: str) -> None:
    """With fewer programs than tiles each goes down several tiles, of which the last
    reaches beyond the rows.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "multiprocessors", lambda device: 1)
        patch.setattr(split_heads, "BACKWARD_PROGRAMS", 2)
        error = error_against_fp64("triton", device, (2, 75, 5, 3, 4), torch.float32)
    assert error < TOLERANCE[torch.float32]


def check_strided_frozen_and_empty(device: str) -> None:
    """Gradients of any strides are taken, a constant bias gets none, and no tokens are no error."""
    shape = (2, 4, 2, 3, 6)
    qkv, bias = seeded(shape, device).requires_grad_(), seeded(shape[2:], device, seed=1)
    results = split_heads.split_heads(qkv, bias, implementation="triton")
    grads = [seeded((2, 2, 6, 4), device, seed=i).mT for i in range(3)]  # heads that are no rows in memory
    (grad,) = torch.autograd.grad(results, qkv, grads)
    assert torch.equal(grad, torch.stack(grads, 3).permute(0, 2, 1, 3, 4))
    empty = split_heads.split_heads(qkv[:0], bias.requires_grad_(), implementation="triton")
    assert [y.shape for y in empty] == [(0, 2, 4, 6)] * 3


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triton_equals_fp64(interpreted, shape, dtype):
    for transposed in (False, True):
        error = interpreted(error_against_fp64, "triton", "cpu", shape, dtype, transposed)
        assert error < INTERPRETED_TOLERANCE[dtype]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_eager_equals_fp64(shape):
    for dtype, tolerance in (TOLERANCE | {torch.float64: 1e-14}).items():
        assert error_against_fp64("eager", "cpu", shape, dtype) < tolerance


@needs_triton
@pytest.mark.parametrize("check", [check_many_rows_a_program, check_strided_frozen_and_empty])
def test_corner_cases(interpreted, check):
    interpreted(check, "cpu")


FAULTS = {
    "a query of another head": ("(kv_head * GROUP + member) * q_head", "kv_head * GROUP * q_head"),
    "keys for values": ("v += kv_head * v_head", "v = k + 0 * v_head"),
    "the first sequence's rows": ("position * k_seq", "position * k_seq - batch * k_batch"),
    "only the last tile is summed": ("total += grad", "total = grad"),
    "the last tile is left out": ("(0, rows_per_program, ROWS)", "(0, rows_per_program - ROWS, ROWS)"),
    "a part is overwritten": ("bias_parts + chunk * features", "bias_parts + 0 * features"),
}


@needs_triton
@pytest.mark.parametrize("right, wrong", FAULTS.values(), ids=list(FAULTS))
def test_planted_faults_are_caught(interpreted, right, wrong):
    given = ("triton", "cpu", (2, 300, 2, 4, 4), torch.float32)  # several tiles a program
    error = interpreted(with_fault, "split_heads", right, wrong, error_against_fp64, *given)
    assert error > TOLERANCE[torch.float32]


def test_wrong_shapes():
    with pytest.raises(ValueError, match=r"split_heads: bias is \[4\] \(right: \[3, 3, 4\], as in qkv\)"):
        split_heads.split_heads(torch.zeros(1, 2, 3, 3, 4), torch.zeros(4))
    with pytest.raises(ValueError, match=r"split_heads: qkv is \[2, 3\] \(right: \[batch, seq, kv heads"):
        split_heads.split_heads(torch.zeros(2, 3), torch.zeros(4))
