"""The fused causal softmax against fp64 autograd, run by Triton's interpreter, without a GPU.

The checks are plain functions of a device: tests/gpu runs the same ones on a real GPU.
"""

from functools import cache
from typing import Any

import pytest
import torch

from megacore.kernels import softmax
from tests.kernel_checks import (
    INTERPRETED_TOLERANCE,
    TOLERANCE,
    launches,
    needs_triton,
    relative_error,
    seeded,
    with_fault,
)

SCALE = 0.37
FAULT = 1e-5
LONG = {"MAX_BLOCK": 16}  # what makes a row of 17 as long as one of 16385
CAUSAL: list[tuple[tuple[int, ...], dict[str, int]]] = [
    ((1, 1, 1, 1), {}),  # one score: probability 1, gradient 0
    ((1, 2, 1, 13), {}),  # one query of a longer sequence, as in generation
    ((2, 2, 5, 7), {}),
    ((1, 1, 5, 31), {"THREADS": 4}),  # four rows a program and, backward, two; the last one of each is alone
    ((1, 1, 16, 16), LONG),  # exactly one block
    ((1, 1, 2, 17), LONG),  # the last row crosses into the second block, the first just does not
    ((1, 2, 3, 53), LONG),
    ((1, 1, 9, 9), {"MAX_BLOCK": 4}),  # rows whose visible keys end in each of three blocks
]


def visible(shape: tuple[int, ...]) -> torch.Tensor:
    """The causal mask."""
    return torch.ones(shape[-2:], dtype=torch.bool).tril(shape[-1] - shape[-2])


def expected(
    scores: torch.Tensor, seen: torch.Tensor, grad_output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and gradient in fp64, by autograd through the definition: what is
    not seen has no weight.
    """
    exact = scores.double().requires_grad_()
    weights = torch.exp(SCALE * (exact - exact.detach().amax(-1, keepdim=True))) * seen
    probabilities = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    return probabilities.detach(), torch.autograd.grad(probabilities, exact, grad_output.double())[0]


def error_against_fp64(
    implementation: Any,
    device: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    sizes: dict[str, int] | None = None,
    shift: float = 0.0,
) -> float:
    """Largest error of probabilities and gradient, relative to the largest value of each;
    `sizes` replace the module's own.
    """
    scores = (seeded(shape, device, spread=3.0) + shift).to(dtype).requires_grad_()
    grad_output = seeded(shape, device, dtype, seed=1)
    seen = visible(shape).to(device)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (sizes or {}).items():
            patch.setattr(softmax, name, value)
        probabilities = softmax.causal_softmax(scores, SCALE, implementation)
        (grad_scores,) = torch.autograd.grad(probabilities, scores, grad_output)
    assert probabilities.dtype == dtype
    beyond = ~seen.expand(shape)
    assert not probabilities[beyond].any() and not grad_scores[beyond].any(), (
        "not exactly zero beyond what is seen"
    )
    pairs = zip((probabilities, grad_scores), expected(scores.detach(), seen, grad_output), strict=True)
    return max(relative_error(got, exact) if exact.any() else float(got.any()) for got, exact in pairs)


def paths_run(device: str, shape: tuple[int, ...], sizes: dict[str, int]) -> set[tuple[str, bool, bool]]:
    """Each kernel launched: its name, whether a row is one block, whether a program takes several rows."""
    with launches() as log:
        error_against_fp64("triton", device, shape, torch.float32, sizes)
    return {(name, options["ONE_BLOCK"], options["ROWS"] > 1) for name, options in log}


def check_extremes(device: str) -> None:
    """Scores that overflow a naive exp, equal ones, and -inf ones (a whole first
    block of them) stay exact and finite.
    """
    for max_block in (softmax.MAX_BLOCK, 16):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(softmax, "MAX_BLOCK", max_block)
            huge = torch.full((1, 2, 3, 53), -3e38, device=device)
            huge[..., 1] = 3e38
            one_hot = softmax.causal_softmax(huge, 1.0, "triton")
            assert (
                torch.equal(one_hot, softmax.causal_softmax_eager(huge, 1.0)) and one_hot[..., 1].min() == 1
            )
            flat = softmax.causal_softmax(torch.full_like(huge, 7e37), 1.0, "triton")
            torch.testing.assert_close(flat[0, 0, -1], torch.full_like(flat[0, 0, -1], 1 / 53))
            blocked = torch.zeros_like(huge)
            blocked[..., :50] = float("-inf")
            torch.testing.assert_close(
                softmax.causal_softmax(blocked, 1.0, "triton"), softmax.causal_softmax_eager(blocked, 1.0)
            )


def check_nan(device: str) -> None:
    """A NaN spoils the rows that see it, so that a diverged run shows, and no other."""
    for max_block in (softmax.MAX_BLOCK, 16):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(softmax, "MAX_BLOCK", max_block)
            scores = torch.zeros(1, 1, 19, 19, device=device)
            scores[..., 9] = float("nan")
            probabilities = softmax.causal_softmax(scores, 1.0, "triton")[0, 0]
            assert not probabilities[:9].isnan().any() and all(
                probabilities[i, : i + 1].isnan().all() for i in range(9, 19)
            )


def check_strided_and_empty(device: str) -> None:
    """A transposed view and gradient give what their contiguous copies give; no rows are no error."""
    scores = torch.randn(2, 7, 3, 5, device=device).transpose(1, 3).requires_grad_()  # [2, 5, 3, 7]
    grad_output = torch.randn(2, 7, 3, 5, device=device).transpose(1, 3)
    fused, eager = (
        softmax.causal_softmax(scores, SCALE, "triton"),
        softmax.causal_softmax_eager(scores, SCALE),
    )
    torch.testing.assert_close(fused, eager)
    torch.testing.assert_close(*(torch.autograd.grad(y, scores, grad_output)[0] for y in (fused, eager)))
    empty = torch.empty(0, 2, 3, 3, device=device, requires_grad=True)
    softmax.causal_softmax(empty, SCALE, "triton").sum().backward()
    assert empty.grad is not None and empty.grad.shape == (0, 2, 3, 3)


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape, sizes", CAUSAL, ids=str)
def test_causal_triton_equals_fp64(interpreted, shape, sizes, dtype):
    assert (
        interpreted(error_against_fp64, "triton", "cpu", shape, dtype, sizes) < INTERPRETED_TOLERANCE[dtype]
    )


@needs_triton
def test_both_paths_run(interpreted):
    """Rows of one block and longer ones are different code: the cases above must reach
    both, and several rows a program.
    """
    names = ("_forward_kernel", "_backward_kernel")
    assert interpreted(paths_run, "cpu", (1, 1, 2, 17), {}) == {(name, True, True) for name in names}
    assert interpreted(paths_run, "cpu", (1, 1, 2, 17), LONG) == {(name, False, False) for name in names}


@needs_triton
@pytest.mark.parametrize("check", [check_extremes, check_nan, check_strided_and_empty])
def test_triton_corner_cases(interpreted, check):
    interpreted(check, "cpu")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_eager_equals_fp64(dtype):
    for shape, _ in CAUSAL:
        assert error_against_fp64("eager", "cpu", shape, dtype) < TOLERANCE[dtype], shape


def test_eager_keeps_fp64():
    """precision=fp64 is for proofs: statistics in fp32 would show as an error of about 1e-7."""
    assert error_against_fp64("auto", "cpu", (2, 2, 5, 7), torch.float64) < 1e-14


def worst_error(device: str) -> float:
    """Over short and long rows, and scores far below 0; of a fault, the first error that shows it."""
    shape, worst = (1, 2, 3, 37), 0.0
    cases: list[tuple[dict[str, int], float]] = [({}, 0.0), (LONG, 0.0), (LONG, -300.0)]
    for sizes, shift in cases:
        try:
            worst = max(worst, error_against_fp64("triton", device, shape, torch.float32, sizes, shift))
        except AssertionError:
            return float("inf")
        if worst > FAULT:
            return worst
    return worst


@cache
def sound_error(device: str) -> float:
    return worst_error(device)


@needs_triton
@pytest.mark.parametrize(
    "right, wrong",
    [
        ("query_size + 1", "query_size + 2"),  # a key of the future
        ("(visible + 15) // 16", "visible // 16"),  # the ragged end is not loaded
        ("-3.4028234663852886e38", "0.0"),  # the running maximum starts too high
        ("total * tl.exp(previous - maximum)", "total"),
        (".to(tl.float32) * scale", ".to(tl.float32) * 1.001 * scale"),
        ("numerator * (1.0", "numerator * (1.001"),
        ("inverse = (1.0", "inverse = (1.001"),
        ("dx = scale * y * (dy - ", "dx = scale * y * (dy - 1.001 * "),
        ("0.0) - inner", "0.0) - 1.001 * inner"),
    ],
)
def test_the_check_catches_planted_faults(interpreted, right, wrong):
    """A tenth of a percent is caught; unspoilt, scores of -300 round by 2^-18 each, which is what is left."""
    assert (
        interpreted(with_fault, "softmax", right, wrong, worst_error, "cpu")
        > FAULT
        > interpreted(sound_error, "cpu")
    )


def test_refusals():
    scores = torch.zeros(1, 1, 3, 2)
    with pytest.raises(ValueError, match=r"causal_softmax: scores is \[1, 1, 3, 2\]"):
        softmax.causal_softmax(scores, 1.0)
    with pytest.raises(ValueError, match="implementation 'fast' is unknown"):
        softmax.causal_softmax(scores.mT, 1.0, "fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"scores is torch.float64|Triton is not installed"):
        softmax.causal_softmax(scores.mT.double(), 1.0, "triton")
    with pytest.raises(ValueError, match="scores are torch.int64"):
        softmax.causal_softmax(scores.mT.long(), 1.0)
