"""Cross entropy against fp64 autograd, through Triton's interpreter; tests/gpu runs the
same checks on a GPU.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.kernels import cross_entropy
from tests.kernel_checks import (
    INTERPRETED_TOLERANCE,
    TOLERANCE,
    needs_triton,
    relative_error,
    seeded,
    with_fault,
)

ONE_BLOCK, CROSSING = (3, 16), (3, 331)
SHAPES = [
    (1, 2),  # a row shorter than one 16-byte load
    (4, 7),
    ONE_BLOCK,
    CROSSING,  # whole blocks and a rest, with the block that `short_blocks` sets
]
PLAIN, ALL = {}, {"label_smoothing": 0.1, "z_loss": 1e-2}
IGNORED = -100


def short_blocks() -> None:
    """256 bytes at a time, so that the rows of `CROSSING` are long ones.

    The worker's module, not the test's own.
    """
    cross_entropy.BLOCK_BYTES = 256


def exact_losses(
    logits: Tensor, targets: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """As the papers write it, in fp64, no code of PyTorch's loss or the kernel's."""
    counted = targets != IGNORED
    logits = logits.double()
    lse = logits.exp().sum(1).log()
    wanted = (
        F.one_hot(targets.where(counted, 0), logits.shape[1]).double() * (1 - label_smoothing)
        + label_smoothing / logits.shape[1]
    )
    return (lse - (wanted * logits).sum(1) + z_loss * lse**2) * counted


def seeded_targets(tokens: int, rows: int, device: str) -> Tensor:
    """The first and the last row of the vocabulary among them, and, of three and more,
    one that is ignored.
    """
    targets = seeded((tokens,), "cpu", spread=1e3).long().remainder(rows)
    targets[0] = rows - 1
    if tokens > 2:
        targets[1], targets[2] = IGNORED, 0
    return targets.to(device)


def split(logits: Tensor, targets: Tensor, ranks: int, **options: Any) -> list[Tensor]:
    """Every rank's losses, their collective played through: each rank's numbers are
    collected first, then handed to all.
    """
    parts, sent = logits.tensor_split(ranks, 1), []
    firsts = [sum(part.shape[1] for part in parts[:rank]) for rank in range(ranks)]
    options["vocab_size"] = logits.shape[1]

    def losses(gather: Callable[[Tensor], Tensor]) -> list[Tensor]:
        # rows with a stride of their own
        padded = [F.pad(part, (0, 5))[:, : part.shape[1]] for part in parts]
        return [
            cross_entropy.cross_entropy(part, targets, first_row=first, gather=gather, **options)
            for part, first in zip(padded, firsts, strict=True)
        ]

    with torch.no_grad():
        losses(lambda statistics: sent.append(statistics) or statistics)  # type: ignore[func-returns-value]
    return losses(lambda statistics: torch.cat(sent))


def error_against_fp64(
    implementation: str,
    device: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    options: dict[str, float],
    ranks: int = 1,
) -> float:
    """Largest error of losses and of their gradient, written in backward and in forward,
    relative to the largest value.
    """
    logits = seeded(shape, device, dtype, spread=3.0).requires_grad_()
    targets, grad = seeded_targets(*shape, device), seeded(shape[:1], device, seed=1)
    exact = exact_losses(logits, targets, **options)
    (exact_grad,) = torch.autograd.grad(exact, logits, grad.double(), retain_graph=True)
    errors = []
    if ranks == 1:
        call = partial(
            lambda **more: [
                cross_entropy.cross_entropy(
                    logits * 1, targets, implementation=implementation, **options, **more
                )
            ]
        )
    else:
        call = partial(split, logits, targets, ranks, implementation=implementation, **options)
    half = torch.tensor(0.5, device=device, dtype=torch.promote_types(dtype, torch.float32))
    known = call(gradient=half)
    (written,) = torch.autograd.grad(known, logits, [half.expand_as(loss) for loss in known])
    (exact_half,) = torch.autograd.grad(exact, logits, torch.full_like(exact, 0.5), retain_graph=True)
    errors.append(relative_error(written, exact_half))
    found = call()
    for loss in known + found:
        assert loss.dtype == torch.promote_types(dtype, torch.float32)
        errors.append(relative_error(loss, exact))
    (grad_logits,) = torch.autograd.grad(found, logits, [grad.to(loss.dtype) for loss in found])
    assert grad_logits.dtype == dtype
    errors.append(float(loss[targets == IGNORED].any() or grad_logits[targets == IGNORED].any()))
    return max(*errors, relative_error(grad_logits, exact_grad))


def error_apart(implementation: str, ranks: int) -> float:
    """Largest relative error of losses, of squares of lse told apart, and of the gradient of both,
    written in backward and in forward.
    """
    options: dict[str, Any] = {"z_loss": 0.1, "apart": True, "implementation": implementation}
    logits, targets = (
        seeded(CROSSING, "cpu", spread=3.0).requires_grad_(),
        seeded_targets(*CROSSING[:1], CROSSING[1], "cpu"),
    )
    exact, both = exact_losses(logits, targets), exact_losses(logits, targets, z_loss=0.1)
    (exact_grad,) = torch.autograd.grad(0.5 * both.sum(), logits)
    errors = []
    for more in ({}, {"gradient": torch.tensor(0.5)}):
        if ranks == 1:
            found = [cross_entropy.cross_entropy(logits * 1, targets, **options, **more)]
        else:
            found = split(logits, targets, ranks, **options, **more)
        for loss, squares in found:
            errors += [relative_error(loss, exact), relative_error(squares, (both - exact) / 0.1)]
        (grad,) = torch.autograd.grad(
            sum(0.5 * loss.sum() + 0.05 * squares.sum() for loss, squares in found), logits
        )
        errors.append(relative_error(grad, exact_grad))
    return max(errors)


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_squares_of_lse_come_apart(ranks: int) -> None:
    assert error_apart("eager", ranks) < TOLERANCE[torch.float32]
    logits = seeded((3, 71), "cpu").requires_grad_()
    loss, squares = cross_entropy.cross_entropy(
        logits * 1, seeded_targets(3, 71, "cpu"), z_loss=0.1, apart=True
    )
    with pytest.raises(RuntimeError, match="not z_loss times"):
        (loss.sum() + squares.sum()).backward()


@needs_triton
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_squares_of_lse_come_apart_in_triton(interpreted: Any, ranks: int) -> None:
    assert interpreted(error_apart, "triton", ranks) < TOLERANCE[torch.float32]


def gradients_of_one_row_block(dtype: torch.dtype, options: dict[str, float], **more: Any) -> Tensor:
    """Of 12 losses, each with a gradient of 1/12, by eager."""
    logits, targets = (
        seeded((12, 61), "cpu", dtype, spread=3.0).requires_grad_(),
        seeded_targets(12, 61, "cpu"),
    )
    weight = torch.tensor(1.0, dtype=dtype) / 12
    more = {key: weight if key == "gradient" else value for key, value in more.items()}
    loss = cross_entropy.cross_entropy(logits * 1, targets, implementation="eager", **options, **more)
    return torch.autograd.grad(loss, logits, weight.expand(12))[0]


@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "smoothed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_forward_writes_the_bits_that_backward_would(dtype: torch.dtype, options: dict[str, float]) -> None:
    """Otherwise a run would change its numbers with who writes the gradient: the whole vocabulary, a
    split one, or another release.
    """
    in_backward = gradients_of_one_row_block(dtype, options)
    assert torch.equal(gradients_of_one_row_block(dtype, options, gradient=True), in_backward)
    alone = gradients_of_one_row_block(
        dtype, options, gradient=True, gather=lambda statistics: statistics, vocab_size=61
    )
    assert torch.equal(alone, in_backward)


def check_extremes(device: str) -> None:
    """Logits that overflow a naive exp and whole blocks of -inf stay exact; a NaN spoils its
    own row; no rows are no error.
    """
    for shape in (ONE_BLOCK, CROSSING):
        huge = torch.full(shape, -3e38, device=device)
        huge[:, 1] = 3e38
        targets = torch.ones(shape[0], dtype=torch.int64, device=device)
        assert not cross_entropy.cross_entropy(huge, targets, implementation="triton").any()
        masked = torch.full(shape, float("-inf"), device=device)
        masked[:, -2:] = 0.0
        masked[0, 0] = float("nan")
        logits = masked.clone().requires_grad_()
        loss = cross_entropy.cross_entropy(logits * 1, targets - 1 + shape[1] - 2, implementation="triton")
        torch.testing.assert_close(
            loss.cpu(), torch.tensor([float("nan")] + [2.0] * (shape[0] - 1)).log(), equal_nan=True
        )
        (grad,) = torch.autograd.grad(loss.sum(), logits)
        torch.testing.assert_close(grad[1:, -2:].cpu(), torch.tensor([[-0.5, 0.5]] * (shape[0] - 1)))
        assert grad[0].isnan().all() and not grad[1:, :-2].any()
    empty = torch.empty(0, 5, device=device, requires_grad=True)
    loss = cross_entropy.cross_entropy(
        empty * 1, torch.empty(0, dtype=torch.int64, device=device), implementation="triton"
    )
    assert loss.shape == (0,) and torch.autograd.grad(loss.sum(), empty)[0].shape == (0, 5)


def check_targets_outside(device: str) -> None:
    """Where looking would be a wait, a target outside of the vocabulary shows as an
    infinite loss, in split ones too.
    """
    logits = seeded((2, 7), device)
    for target in (-1, 7):
        targets = torch.tensor([2, target], device=device)
        for gather in (None, lambda statistics: statistics):
            loss, _ = cross_entropy.losses(
                logits, targets, cross_entropy.Settings(gather=gather), fused=True, keep=False
            )
            assert loss.isfinite().tolist() == [True, False]


def check_in_place(device: str) -> None:
    """The gradient lies in the logits' memory, and a second backward, which would
    read it as logits, is refused.
    """
    for implementation, known in product(("triton", "eager"), (None, torch.tensor(1.0, device=device))):
        x = seeded((3, 11), device).requires_grad_()
        logits = x * 1
        targets = torch.tensor([1, 2, 10], device=device)
        loss = cross_entropy.cross_entropy(logits, targets, gradient=known, implementation=implementation)
        gradients: list[Tensor] = []
        logits.register_hook(gradients.append)
        loss.sum().backward(retain_graph=True)
        assert gradients[0].data_ptr() == logits.data_ptr()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.sum().backward()
    logits = seeded((3, 11), device)
    before = logits.clone()
    cross_entropy.cross_entropy(logits, targets, gradient=known, implementation=implementation)
    assert torch.equal(logits, before), "without a gradient to come, the logits are left alone"


def check_scaled_before_rounding(device: str) -> None:
    """In fp16, a probability that is no fp16 number times a loss scale that is large:
    forward must scale before it rounds.
    """
    for implementation in ("triton", "eager"):
        x = torch.tensor([[18.0, 0.0]], device=device, dtype=torch.float16, requires_grad=True)
        scale = torch.tensor(2.0**16, device=device)
        (loss,) = cross_entropy.cross_entropy(
            x * 1, torch.tensor([0], device=device), gradient=scale, implementation=implementation
        )
        (grad,) = torch.autograd.grad(loss, x, scale)
        assert math.isclose(float(grad[0, 1]), 2**16 * math.exp(-18), rel_tol=2**-10)


def interpreted_check(check: Callable[..., Any], *args: Any) -> Any:
    short_blocks()
    return check(*args)


@needs_triton
def test_both_paths_run(monkeypatch):
    """Blocks and the rest of a row are two pieces of code: the shapes above must reach
    both, and each alone.
    """
    monkeypatch.setattr(cross_entropy, "BLOCK_BYTES", 256)
    paths = {shape: divmod(shape[1], cross_entropy.launch_options(shape[1], 4)["BLOCK"]) for shape in SHAPES}
    assert paths == {(1, 2): (1, 0), (4, 7): (1, 3), ONE_BLOCK: (1, 0), CROSSING: (5, 11)}


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "smoothed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triton_equals_fp64(interpreted, shape, options, dtype):
    assert (
        interpreted(interpreted_check, error_against_fp64, "triton", "cpu", shape, dtype, options)
        < INTERPRETED_TOLERANCE[dtype]
    )


@needs_triton
@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "smoothed"])
def test_triton_on_split_vocabulary(interpreted, options):
    """Three ranks with uneven pieces: each computes the whole loss and its own piece of the gradient."""
    error = interpreted(
        interpreted_check, error_against_fp64, "triton", "cpu", (3, 71), torch.float32, options, 3
    )
    assert error < TOLERANCE[torch.float32]


@needs_triton
@pytest.mark.parametrize(
    "check", [check_extremes, check_targets_outside, check_in_place, check_scaled_before_rounding]
)
def test_triton_corner_cases(interpreted, check):
    interpreted(interpreted_check, check, "cpu")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "smoothed"])
@pytest.mark.parametrize("shape, ranks", [*((shape, 1) for shape in SHAPES), ((3, 71), 3)], ids=str)
def test_eager_equals_fp64(monkeypatch, shape, ranks, options, dtype):
    monkeypatch.setitem(cross_entropy.EAGER_BLOCK, "cpu", 700)  # two rows of the longest at a time
    assert error_against_fp64("eager", "cpu", shape, dtype, options, ranks) < TOLERANCE[dtype]


def test_eager_keeps_fp64():
    """precision=fp64 is for proofs: statistics in fp32 would show as an error of about 1e-7."""
    assert error_against_fp64("auto", "cpu", (4, 31), torch.float64, ALL) < 1e-14
    assert error_against_fp64("auto", "cpu", (4, 31), torch.float64, ALL, ranks=3) < 1e-14


@pytest.mark.parametrize("ranks", [1, 3])
def test_backward_with_another_gradient_than_forward_was_told(ranks):
    """What forward wrote would be returned, and nobody would see that it belongs to another loss."""
    logits, told = seeded((3, 71), "cpu").requires_grad_(), torch.tensor(0.5)
    losses = split(logits, seeded_targets(3, 71, "cpu"), ranks, gradient=told)
    with pytest.raises(RuntimeError, match="is given 0.25, and forward was told 0.5"):
        torch.autograd.grad(losses, logits, [torch.full_like(loss, 0.25) for loss in losses])


def test_eager_takes_rows_of_minus_infinity():
    """A rank of which every row is masked: no NaN, and its share of the sum is nothing."""
    logits = torch.full((1, 4), float("-inf"))
    statistics, _ = cross_entropy._eager_statistics(
        logits, torch.tensor([9]), cross_entropy.Settings(), keep=True
    )
    assert statistics[:, 0].tolist() == [float("-inf")] * 2


FAULTS = {
    "the running sum is not brought to the new maximum": ("total * tl.exp(maximum - highest)", "total"),
    "the rest of a row is left out": ("if whole < rows:", "if whole > rows:"),
    "the sum of the logits counts what is beyond the row": (
        "tl.where(inside, x, 0.0)",
        "tl.where(inside, x, 1.0)",
    ),
    "a target one row off": (
        "x_target = _target_logit(row, target - first_row, rows)",
        "x_target = _target_logit(row, 0, rows)",
    ),
    "smoothing's share of the loss": ("- share * plain", "- 1.01 * share * plain"),
    "z-loss of half the size": ("2.0 * z_loss * lse), grad", "z_loss * lse), grad"),
    "the gradient of an ignored target": (
        "tl.where(target == ignored, 0.0, tl.load(gradient).to(tl.float32))",
        "tl.load(gradient)",
    ),
    "the gradient at the target": ("dx - at_target, dx", "dx - 0.999 * at_target, dx"),
    "smoothing's share of the gradient": ("* scale - share", "* scale"),
}


@needs_triton
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(interpreted, fault):
    """The comparison itself: were it blind to one of these, it would prove nothing."""
    check = (error_against_fp64, "triton", "cpu", CROSSING, torch.float32, ALL)
    assert (
        interpreted(with_fault, "cross_entropy", *FAULTS[fault], interpreted_check, *check)
        > TOLERANCE[torch.float32]
    )


REFUSALS = {
    "logits": lambda x, t: cross_entropy.cross_entropy(x[0], t),
    "rows contiguous": lambda x, t: cross_entropy.cross_entropy(x.mT, t),
    r"targets is \[2\]": lambda x, t: cross_entropy.cross_entropy(x, t[:2]),
    "targets are torch.int32": lambda x, t: cross_entropy.cross_entropy(x, t.int()),
    "targets hold 5 ": lambda x, t: cross_entropy.cross_entropy(x, t + 4),
    "targets hold -1 ": lambda x, t: cross_entropy.cross_entropy(x, t - 2, gather=lambda s: s),
    "targets hold 1 ": lambda x, t: cross_entropy.cross_entropy(x, t, first_row=2),
    "vocab_size is missing": lambda x, t: cross_entropy.cross_entropy(
        x, t, label_smoothing=0.1, gather=lambda s: s
    ),
    "label_smoothing is 1": lambda x, t: cross_entropy.cross_entropy(x, t, label_smoothing=1.0),
    "targets is on meta": lambda x, t: cross_entropy.cross_entropy(x, t.to("meta")),
    "'fast' is unknown": lambda x, t: cross_entropy.cross_entropy(x, t, implementation="fast"),
    "logits is torch.float64|not installed": lambda x, t: cross_entropy.cross_entropy(
        x.double(), t, implementation="triton"
    ),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_refusals(message):
    with pytest.raises(ValueError, match=message):
        REFUSALS[message](torch.zeros(3, 5), torch.tensor([1, 2, 3]))
