"""Fused linear and cross entropy against fp64 autograd, through Triton's interpreter; tests/gpu
runs the same checks on a GPU.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megacore.kernels import linear_cross_entropy
from tests.kernel_checks import TOLERANCE, needs_triton, relative_error, seeded, with_fault
from tests.unit.test_cross_entropy_kernel import ALL, PLAIN, exact_losses, seeded_targets

TOKENS, FEATURES, ROWS = 7, 5, 37
# On a CPU products are in fp32 whatever the dtype, so 16 bits round less often there than on a GPU, where
# logits and their gradient are rounded too: that is averaged over many logits.
GRAD = 0.37


def inputs(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    hidden = seeded((TOKENS, FEATURES), device, dtype).requires_grad_()
    weight = seeded((ROWS, FEATURES), device, dtype, seed=1).requires_grad_()
    return hidden, weight, seeded_targets(TOKENS, ROWS, device)


def error_against_fp64(
    implementation: str, device: str, dtype: torch.dtype, options: dict[str, Any], chunk: int | None
) -> float:
    """Largest error of the loss and of both gradients, relative to the largest value of each."""
    hidden, weight, targets = inputs(device, dtype)
    fused = linear_cross_entropy.linear_cross_entropy(
        hidden, weight, targets, chunk=chunk, implementation=implementation, **options
    )
    assert fused.dtype == torch.promote_types(dtype, torch.float32) and fused.shape == ()
    exact = exact_losses(hidden.double() @ weight.double().T, targets, **options).sum()
    got, right = (torch.autograd.grad(loss * GRAD, (hidden, weight)) for loss in (fused, exact))
    assert all(grad.dtype == dtype for grad in got)
    with torch.no_grad():
        alone = linear_cross_entropy.linear_cross_entropy(
            hidden, weight, targets, chunk=chunk, implementation=implementation, **options
        )
    pairs = [(fused, exact), (alone, exact), *zip(got, right, strict=True)]
    return max(relative_error(*pair) for pair in pairs)


def error_on_split_vocabulary(implementation: str, device: str, options: dict[str, float]) -> float:
    """Three ranks with uneven pieces, their collective played through as in the test of
    cross entropy, here once a chunk.
    """
    hidden, weight, targets = inputs(device, torch.float32)
    exact = exact_losses(hidden.double() @ weight.double().T, targets, **options).sum()
    parts, chunk = [part.detach().requires_grad_() for part in weight.tensor_split(3)], 3
    sent: list[list[Tensor]] = [[] for _ in range(0, TOKENS, chunk)]

    def losses(gather: Any, **more: Any) -> list[Tensor]:
        firsts = [sum(map(len, parts[:rank])) for rank in range(3)]
        more |= options | {"vocab_size": ROWS, "chunk": chunk, "implementation": implementation}
        operation = linear_cross_entropy.linear_cross_entropy
        return [
            operation(hidden, part, targets, first_row=first, gather=gather(), **more)
            for part, first in zip(parts, firsts, strict=True)
        ]

    def collect() -> Any:
        calls = iter(sent)
        return lambda statistics: next(calls).append(statistics) or statistics

    def hand_out() -> Any:
        calls = iter(sent)
        return lambda statistics: torch.cat(next(calls))

    with torch.no_grad():
        losses(collect)
    found = losses(hand_out, reduce=lambda grad: 2 * grad)
    right = torch.autograd.grad(exact * GRAD, (hidden, weight))
    grad_hidden, *grad_parts = torch.autograd.grad([loss * GRAD for loss in found], (hidden, *parts))
    pairs = [
        *((loss, exact) for loss in found),
        (grad_hidden, 2 * right[0]),
        (torch.cat(grad_parts), right[1]),
    ]
    return max(relative_error(*pair) for pair in pairs)


def check_corners(device: str) -> None:
    """A frozen weight or hidden costs no gradient; no tokens are no error and leave
    the weight a gradient of zeros.
    """
    hidden, weight, targets = inputs(device, torch.float32)
    for implementation in ("triton", "eager"):
        both = linear_cross_entropy.linear_cross_entropy(
            hidden, weight, targets, chunk=3, implementation=implementation
        )
        expected = torch.autograd.grad(both, (hidden, weight))
        for i, (h, w) in enumerate(((hidden, weight.detach()), (hidden.detach(), weight))):
            loss = linear_cross_entropy.linear_cross_entropy(
                h, w, targets, chunk=3, implementation=implementation
            )
            assert torch.equal(torch.autograd.grad(loss, (h, w)[i])[0], expected[i])
        loss = linear_cross_entropy.linear_cross_entropy(
            hidden[:0], weight, targets[:0], implementation=implementation
        )
        assert loss == 0 and not torch.autograd.grad(loss, weight)[0].any()


@needs_triton
@pytest.mark.parametrize("chunk", [3, TOKENS, None])
@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "smoothed"])
def test_triton_equals_fp64(interpreted, options, chunk):
    assert (
        interpreted(error_against_fp64, "triton", "cpu", torch.float32, options, chunk)
        < TOLERANCE[torch.float32]
    )


@needs_triton
def test_triton_corner_cases(interpreted):
    interpreted(check_corners, "cpu")


@needs_triton
def test_triton_on_split_vocabulary(interpreted):
    assert interpreted(error_on_split_vocabulary, "triton", "cpu", ALL) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("chunk", [1, 3, TOKENS, None])
@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "smoothed"])
def test_eager_equals_fp64(options, chunk, dtype):
    assert error_against_fp64("eager", "cpu", dtype, options, chunk) < TOLERANCE[dtype]


def test_eager_keeps_fp64_and_splits():
    assert error_against_fp64("auto", "cpu", torch.float64, ALL, 3) < 1e-14
    assert error_on_split_vocabulary("eager", "cpu", PLAIN) < TOLERANCE[torch.float32]


def test_chunks_add_up_in_fp32():
    """256 chunks of a token each: where their sum is rounded to bf16 in between, most of
    the later ones are rounded away.
    """
    hidden, weight = (
        seeded(shape, "cpu", torch.bfloat16, seed=3).abs().requires_grad_() for shape in ((256, 4), (8, 4))
    )
    targets = torch.zeros(256, dtype=torch.int64)
    loss = linear_cross_entropy.linear_cross_entropy(hidden, weight, targets, chunk=1)
    exact = exact_losses(hidden.double() @ weight.double().T, targets).sum()
    (got,), (right,) = (torch.autograd.grad(each, weight) for each in (loss, exact))
    assert relative_error(got, right) < 2**-8, "one rounding to bf16, at the end"


def check_fp16(device: str) -> float:
    """Of a loss scale that comes with backward nothing is left if the gradient has underflowed by then."""
    hidden = torch.zeros(1, 1, dtype=torch.float16, device=device, requires_grad=True)
    weight = torch.full((2, 1), 2.0**-19, dtype=torch.float16, device=device)
    weight[1] *= 2.03125  # the gradient of hidden, half their difference, is 16.5 of fp16's smallest steps
    loss = linear_cross_entropy.linear_cross_entropy(
        hidden, weight.requires_grad_(), torch.tensor([0], device=device)
    )
    (grad,) = torch.autograd.grad(loss * 2.0**16, hidden)
    return relative_error(grad, (weight[1:] - weight[:1]).detach().double() / 2 * 2.0**16)


def test_fp16_keeps_small_gradients():
    assert check_fp16("cpu") < 2**-10


class _Largest(TorchDispatchMode):
    """The most bytes of any one tensor that operations made."""

    bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


def test_memory_is_a_quarter_of_the_logits():
    """The claim itself: no tensor, forward or backward, above a quarter of what the
    whole logits would take.
    """
    hidden, weight = seeded((1024, 8), "cpu").requires_grad_(), seeded((512, 8), "cpu").requires_grad_()
    with _Largest() as largest:
        linear_cross_entropy.linear_cross_entropy(
            hidden, weight, torch.zeros(1024, dtype=torch.int64)
        ).backward()
    assert largest.bytes == 1024 * 512 * 4 // 4


FAULTS = {
    "only the last chunk reaches the weight": ("total.addmm_(a, b)", "total.addmm_(a, b, beta=0)"),
    "a chunk too far": ("grad_hidden[part] = ", "grad_hidden[: len(h)] = "),
    "the gradient that backward is given": ("(grad / ctx.unit)", "(grad * 0 + 1 / ctx.unit)"),
    "fp16 underflows": ("torch.float16: 2.0**8", "torch.float16: 1.0"),
    "the loss of the last chunk alone": ("total.add_(of_tokens.sum())", "total.copy_(of_tokens.sum())"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault):
    check = (
        (check_fp16, "cpu")
        if "fp16" in fault
        else (error_against_fp64, "eager", "cpu", torch.float32, PLAIN, 3)
    )
    assert with_fault("linear_cross_entropy", *FAULTS[fault], *check) > 2**-10


REFUSALS = {
    "hidden is": lambda op, h, w, t: op(h[0], w, t),
    r"weight is \[37, 4\]": lambda op, h, w, t: op(h, w[:, :4], t),
    "weight is torch.float64, hidden torch.float32": lambda op, h, w, t: op(h, w.double(), t),
    "chunk is 0": lambda op, h, w, t: op(h, w, t, chunk=0),
    r"targets is \[6\]": lambda op, h, w, t: op(h, w, t[1:]),
    "targets hold 37": lambda op, h, w, t: op(h, w, t.clamp(min=0) + 1),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_refusals(message):
    with pytest.raises(ValueError, match=message):
        REFUSALS[message](linear_cross_entropy.linear_cross_entropy, *inputs("cpu", torch.float32))


def test_a_device_that_cannot_add_narrow_products_in_fp32_rounds_each_once() -> None:
    """As a CPU cannot, and some GPUs: the first step would end with PyTorch's error."""
    a, b = seeded((8, 64), "cpu", torch.bfloat16), seeded((64, 8), "cpu", torch.bfloat16, seed=1)
    total = torch.ones(8, 8)
    linear_cross_entropy._add_product(total, a, b)
    assert relative_error(total, 1.0 + a.double() @ b.double()) < 2.0**-8
