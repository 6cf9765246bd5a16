"""The counter-based dropout: published Philox values, the same bits everywhere,
and sums against fp64 autograd.

Through Triton's interpreter; tests/gpu runs the same checks on a GPU.
"""

import pytest
import torch

from megacore.kernels import dispatch, dropout
from tests.kernel_checks import (
    INTERPRETED_TOLERANCE,
    TOLERANCE,
    needs_triton,
    relative_error,
    seeded,
    with_fault,
)

SHAPES = [
    (1, 1),
    (3, 7),  # rows that start anywhere in a Philox block
    (2, 3, 32),  # leading dims are flattened
    (37, 60),  # more than one tile down the rows, the last one partly filled
    (3, dropout.MAX_BLOCK + 12),  # more than one tile along the row
]
KEY, PROBABILITY, SCALE = 0x1234567_89ABCDEF, 0.3, 0.6


def philox_in_python(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Salmon et al. 2011, section 2.3, in Python's integers."""
    (a, b, c, d), (low, high) = counter, key
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32) ^ b ^ low, right % 2**32, (left >> 32) ^ d ^ high, left % 2**32
        low, high = (low + 0x9E3779B9) % 2**32, (high + 0xBB67AE85) % 2**32
    return a, b, c, d


def words(first: int, count: int, key: int) -> list[tuple[int, ...]]:
    drawn = dropout._philox(first, count, key, torch.device("cpu"))
    return list(zip(*((word & dropout.LOW).tolist() for word in drawn), strict=True))


def mask_of_kernel(
    device: str, tokens: int, features: int, first: int, key: int, probability: float
) -> torch.Tensor:
    """What the kernel keeps of ones."""
    ones = torch.ones(tokens, features, device=device)
    y = dropout.bias_dropout_residual(
        ones, None, None, probability, key, first=first, implementation="triton"
    )
    return y != 0


def error_against_fp64(
    implementation: str,
    device: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    first: int = 8,
    parts: tuple[bool, bool] = (True, True),
) -> float:
    """Largest error of result and gradients, relative to the largest value of each."""
    x, grad = seeded(shape, device, dtype).requires_grad_(), seeded(shape, device, dtype, seed=3)
    bias = seeded(shape[-1:], device, dtype, seed=1).requires_grad_() if parts[0] else None
    residual = seeded(shape, device, dtype, seed=2).requires_grad_() if parts[1] else None
    y = dropout.bias_dropout_residual(
        x, bias, residual, PROBABILITY, KEY, first=first, scale=SCALE, implementation=implementation
    )
    assert y.dtype == dtype and y.shape == x.shape
    tokens, features = x.numel() // shape[-1], shape[-1]
    keep = dropout.keep_mask(tokens, features, PROBABILITY, KEY, first=first, device=device).view(shape)
    given = [t for t in (x, bias, residual) if t is not None]
    exact = [t.detach().double().requires_grad_() for t in given]
    branch = exact[0] + exact[1] if parts[0] else exact[0]
    exact_y = branch * keep * (SCALE / (1 - PROBABILITY))
    if parts[1]:
        exact_y = exact_y + exact[-1]
    pairs = zip(
        torch.autograd.grad(y, given, grad), torch.autograd.grad(exact_y, exact, grad.double()), strict=True
    )
    return max(relative_error(y, exact_y), *(relative_error(got, right) for got, right in pairs))


def check_same_bits(device: str) -> None:
    """The kernel's mask is keep_mask's on the CPU, for rows that start anywhere and for
    positions beyond 2^32 and 2^34.
    """
    for tokens, features, first in [
        (5, 8, 0),
        (5, 7, 0),
        (3, 8, 6),
        (2, 16, 2**32 - 16),
        (2, 7, 2**34 + 3),
        (2, 16, 2**34 + 16),
    ]:
        for probability in (0.1, 0.75):
            expected = dropout.keep_mask(tokens, features, probability, KEY, first=first, device="cpu")
            assert torch.equal(
                mask_of_kernel(device, tokens, features, first, KEY, probability).cpu(), expected
            ), (features, first)


def check_strided_extreme_and_empty(device: str) -> None:
    """Views of some columns give what their copies give; what is dropped is 0 even if it
    was NaN; no rows are no error.
    """
    x, residual = (seeded((5, 24), device, seed=i)[:, 3:16].detach().requires_grad_() for i in range(2))
    grad = seeded((13, 5), device).T
    results = []
    for implementation in ("triton", "eager"):
        y = dropout.bias_dropout_residual(x, None, residual, 0.5, 7, implementation=implementation)
        results.append((y, *torch.autograd.grad(y, (x, residual), grad)))
    for fused, eager in zip(*results, strict=True):
        torch.testing.assert_close(fused, eager)
    nan = torch.full((4, 8), float("nan"), device=device)
    y = dropout.bias_dropout_residual(nan, None, None, 0.5, 7, implementation="triton")
    assert (
        torch.equal(y.isnan().cpu(), dropout.keep_mask(4, 8, 0.5, 7, device="cpu"))
        and not y.nan_to_num().any()
    )
    plain = dropout.bias_dropout_residual(x, None, residual, 0.0, 7, implementation="triton")
    assert torch.equal(plain, x + residual)
    assert dropout.bias_dropout_residual(nan[:0], None, None, 0.5, 7, implementation="triton").shape == (0, 8)


def check_many_rows_a_program(device: str) -> None:
    """With fewer programs than tiles each goes down several tiles, of which the last
    reaches beyond the rows.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "multiprocessors", lambda device: 1)
        patch.setattr(dropout, "BACKWARD_PROGRAMS", 2)
        error = error_against_fp64("triton", device, (150, 60), torch.float32)
    assert error < TOLERANCE[torch.float32]


def test_philox_equals_python_integers():
    """Wrapping products of int64 give the words that arbitrary precision gives, beyond 2^32
    blocks and with every bit of a key.
    """
    for key in (0, 1, KEY, 2**63 - 1):
        for first in (0, 5, 2**32 - 2, 2**45 + 1):
            counters = [(n & dropout.LOW, n >> 32, 0, 0) for n in range(first, first + 4)]
            assert words(first, 4, key) == [
                philox_in_python(counter, (key & dropout.LOW, key >> 32)) for counter in counters
            ]


def test_python_integers_have_the_published_values():
    """What the test above compares with gives the known answers that were published
    with the generator (Random123).
    """
    ones, pi = (dropout.LOW,) * 4, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert (
        " ".join(f"{w:08x}" for w in philox_in_python((0, 0, 0, 0), (0, 0)))
        == "6627e8d5 e169c58d bc57ac4c 9b00dbd8"
    )
    assert (
        " ".join(f"{w:08x}" for w in philox_in_python(ones, ones[:2]))
        == "408f276d 41c83b0e a20bc7c6 6d5451fd"
    )
    assert (
        " ".join(f"{w:08x}" for w in philox_in_python(pi, (0xA4093822, 0x299F31D0)))
        == "d16cfe09 94fdcceb 5001e420 24126ea1"
    )


def test_a_part_of_the_rows_draws_its_part_of_the_mask(monkeypatch):
    """What a rank with some of the tokens draws must not depend on how they are cut, nor on how
    many blocks are drawn at once.
    """
    whole = dropout.keep_mask(11, 7, PROBABILITY, KEY, device="cpu")
    monkeypatch.setattr(dropout, "CPU_CHUNK", 3)
    parts = [
        dropout.keep_mask(n, 7, PROBABILITY, KEY, first=7 * row, device="cpu")
        for row, n in ((0, 4), (4, 1), (5, 0), (5, 6))
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_masks_keep_the_right_share_and_differ_by_key():
    """4 sigma of 2^18 draws; two keys that differ in the highest or lowest bit agree no
    more often than chance has it.
    """
    draws, keep = 2**18, 1 - PROBABILITY
    masks = [
        dropout.keep_mask(512, 512, PROBABILITY, key, device="cpu") for key in (KEY, KEY ^ 1, KEY ^ 2**62)
    ]
    for mask in masks:
        assert abs(mask.double().mean() - keep) < 4 * (keep * PROBABILITY / draws) ** 0.5
    same = keep**2 + PROBABILITY**2
    for mask in masks[1:]:
        assert abs((mask == masks[0]).double().mean() - same) < 4 * (same * (1 - same) / draws) ** 0.5
    assert dropout.keep_mask(64, 64, 0.0, KEY, device="cpu").all()


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triton_equals_fp64(interpreted, shape, dtype):
    assert interpreted(error_against_fp64, "triton", "cpu", shape, dtype) < INTERPRETED_TOLERANCE[dtype]


@needs_triton
@pytest.mark.parametrize("parts", [(True, False), (False, True), (False, False)])
def test_triton_without_bias_or_residual(interpreted, parts):
    assert (
        interpreted(error_against_fp64, "triton", "cpu", (3, 7), torch.float32, 5, parts)
        < TOLERANCE[torch.float32]
    )


@needs_triton
@pytest.mark.parametrize(
    "check", [check_same_bits, check_strided_extreme_and_empty, check_many_rows_a_program]
)
def test_triton_corner_cases(interpreted, check):
    interpreted(check, "cpu")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_eager_equals_fp64(dtype):
    for parts in ((True, True), (False, True), (True, False)):
        assert error_against_fp64("eager", "cpu", (37, 60), dtype, parts=parts) < TOLERANCE[dtype]
        assert error_against_fp64("auto", "cpu", (3, 7), torch.float64, parts=parts) < 1e-14


FAULTS = [
    ("tl.join(tl.join(a, c), tl.join(b, d))", "tl.join(tl.join(a, b), tl.join(c, d))"),
    ("(first_of_row + block) // 4 + tl", "(first_of_row + block) // 4 + 1 + tl"),
    ("value *= factor", "value *= 1.00001 * factor"),
    ("total += grad", "total += 1.00001 * grad"),
    ("other=0.0).to(tl.float32) * factor", "other=0.0).to(tl.float32)"),
]


@needs_triton
@pytest.mark.parametrize("right, wrong", FAULTS)
def test_planted_faults_are_caught(interpreted, right, wrong):
    """Words in another order, a mask of the next block, a factor wrong in its
    fifth digit or missing in backward.
    """
    error = interpreted(
        with_fault, "dropout", right, wrong, error_against_fp64, "triton", "cpu", (3, 32), torch.float32
    )
    assert error > TOLERANCE[torch.float32]


def test_refusals():
    x = torch.zeros(2, 3)
    call = dropout.bias_dropout_residual
    with pytest.raises(ValueError, match=r"bias is \[2\] \(right: \[3\]"):
        call(x, torch.zeros(2), None, 0.1, 0)
    with pytest.raises(ValueError, match=r"residual is \[3, 2\] \(right: \[2, 3\]"):
        call(x, None, x.T, 0.1, 0)
    with pytest.raises(ValueError, match=r"residual is torch.float64, x torch.float32"):
        call(x, None, x.double(), 0.1, 0)
    with pytest.raises(ValueError, match=r"probability is 1.0"):
        call(x, None, None, 1.0, 0)
    with pytest.raises(ValueError, match=r"key is -1"):
        call(x, None, None, 0.1, -1)
    with pytest.raises(ValueError, match=r"first is -4"):
        call(x, None, None, 0.1, 0, first=-4)
    with pytest.raises(ValueError, match="implementation 'fast' is unknown"):
        call(x, None, None, 0.1, 0, implementation="fast")
