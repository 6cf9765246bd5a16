"""A linear layer and the cross entropy of its outputs, in chunks of tokens, so that the
logits never exist as a whole.

    forward    logits = h wᵀ,  loss = sum of cross_entropy(logits)           of one chunk of tokens at a time
    backward   dh = dlogits w,  dw = sum over chunks of dlogitsᵀ h           computed in forward, scaled in
               backward

The gradient of a chunk's logits is written over them as soon as their loss is known, and turned into those of
h and w before the next chunk takes its place, as in Liger-Kernel (Hsu et al. 2024,
https://arxiv.org/abs/2410.10989). Three products, as many as without chunks, for a `chunk / tokens`-th of the
logits' memory. The price is one fp32 gradient of w between forward and
backward, to which every chunk adds: chunks must be long enough for their products to dwarf that
(`default_chunk`).
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megacore.kernels.cross_entropy import Settings, check_ratio, losses, losses_and_gradients, taken_apart
from megacore.kernels.dispatch import Implementation, check_shape, use_triton

SHARE = 4  # a chunk has one in so many of the logits, if there are tokens enough
# Tokens of the shortest chunk. Each chunk reads and writes the fp32 gradient of w, at 8 bytes an element
# against 6 FLOPs a token: with 1024 tokens that is a fifth of the products' time on a Hopper if nothing
# overlaps. A CPU is slower at products.
SHORTEST = {"cpu": 128}
SHORTEST_ON_GPU = 1024
# elements: rows of logits start where vector loads and matrix units like it, whatever the vocabulary
ALIGNMENT = 64
# fp16 gradients of logits are multiplied by this: far below 1 they would underflow before the caller's loss
# scale applies.
UNIT = {torch.float16: 2.0**8}


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    first_row: int = 0,
    gather: Callable[[Tensor], Tensor] | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
    accumulate: Callable[[Tensor], None] | None = None,
    ignored: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    apart: bool = False,
    chunk: int | None = None,
    implementation: Implementation = "auto",
) -> Any:
    """The sum of the losses of all tokens, in nats: a scalar in fp32 (fp64 for fp64).

    Backward runs once only.

    hidden: ``[tokens, features]``. weight: ``[vocabulary rows of this rank, features]`` of the same dtype,
    `first_row` its first. targets, gather, ignored, label_smoothing, z_loss, vocab_size, apart: as in
    `cross_entropy`; one small collective a chunk.
    reduce: with a split vocabulary, sums the gradient of hidden ``[tokens, features]`` over the ranks, in
    place or not; without
        it that gradient is this rank's part, for a caller who sums it on its way further back.
    accumulate: is given the gradient of weight in backward, in fp32 at least, and autograd is given none.
    chunk: tokens at a time, the same on every rank; by default a quarter, though no fewer than make long
    products.
    Raises ValueError for what the implementation cannot take, as `cross_entropy`.
    """
    settings = Settings(first_row, gather, ignored, label_smoothing, z_loss, vocab_size, apart)
    name = "linear_cross_entropy"
    check_shape(name, "hidden", hidden, "[tokens, features]", hidden.dim() == 2)
    right = f"[vocabulary rows of this rank, {hidden.shape[1]}], the features of hidden"
    check_shape(
        name,
        "weight",
        weight,
        right,
        weight.dim() == 2 and weight.shape[0] > 0 and weight.shape[1] == hidden.shape[1],
    )
    if weight.dtype != hidden.dtype:
        raise ValueError(f"{name}: weight is {weight.dtype}, hidden {hidden.dtype} (right: one dtype)")
    if chunk is not None and chunk < 1:
        raise ValueError(f"{name}: chunk is {chunk} (right: at least one token)")
    fused = use_triton(name, implementation, hidden=hidden, weight=weight, targets=targets)
    settings.check(name, targets, len(hidden), len(weight))
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    chunk = chunk or default_chunk(len(hidden), hidden.device.type)
    return _LinearCrossEntropy.apply(
        hidden, weight, targets, settings, reduce, accumulate, chunk, fused, wanted
    )


def default_chunk(tokens: int, device: str) -> int:
    """Tokens at a time, a whole number of the matrix units' tiles."""
    return max(-(-tokens // (SHARE * ALIGNMENT)) * ALIGNMENT, SHORTEST.get(device, SHORTEST_ON_GPU))


class _LinearCrossEntropy(torch.autograd.Function):
    """T tokens in chunks of C, F features, V vocabulary rows of this rank.

    forward      logits [C, V] = h [C, F] · wᵀ [F, V]     loss = sum of their losses, all chunks'
                 dh [C, F] = dlogits [C, V] · w [V, F]    dw [V, F] += dlogitsᵀ · h, in fp32
    grad of h    [T, F]  = dloss · dh                     with `reduce`, summed over the ranks
    grad of w    [V, F]  = dloss · dw                     with `accumulate`, given to that
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        settings: Settings,
        reduce: Any,
        accumulate: Any,
        chunk: int,
        fused: bool,
        wanted: bool,
    ) -> Any:
        (tokens, _), (rows, features), dtype = hidden.shape, weight.shape, hidden.dtype
        wide = torch.promote_types(dtype, torch.float32)
        if hidden.device.type == "cpu":  # most CPUs emulate narrow products, ten times slower than fp32
            hidden, weight = hidden.to(wide), weight.to(wide)
        wanted_hidden, wanted_weight = (wanted and need for need in ctx.needs_input_grad[:2])
        unit = torch.full((), UNIT.get(dtype, 1.0), dtype=wide, device=hidden.device)
        totals = torch.zeros(1 + settings.apart, dtype=wide, device=hidden.device)
        grad_hidden = (
            torch.empty((tokens, features), dtype=dtype, device=hidden.device) if wanted_hidden else None
        )
        grad_weight = (
            torch.zeros((rows, features), dtype=wide, device=hidden.device) if wanted_weight else None
        )
        room = hidden.new_empty(min(chunk, tokens), -(-rows // ALIGNMENT) * ALIGNMENT)[:, :rows]
        for start in range(0, tokens, chunk):
            part, h, t = (
                slice(start, start + chunk),
                hidden[start : start + chunk],
                targets[start : start + chunk],
            )
            logits = torch.mm(h, weight.t(), out=room[: len(h)])
            if not wanted:
                loss, (lse, _) = losses(logits, t, settings, fused, keep=False)
                _add_sums(totals, taken_apart(loss, lse, t, settings))
                continue
            _add_sums(totals, losses_and_gradients(logits, t, unit, settings, fused))
            if grad_hidden is not None:
                grad_hidden[part] = torch.mm(logits, weight)
            if grad_weight is not None:
                _add_product(grad_weight, logits.t(), h)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.reduce, ctx.accumulate, ctx.dtype, ctx.unit, ctx.settings = (
            reduce,
            accumulate,
            dtype,
            UNIT.get(dtype, 1.0),
            settings,
        )
        return (totals[0].clone(), totals[1].clone()) if settings.apart else totals[0].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *of_squares: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        check_ratio(grad, of_squares, ctx.settings)
        scale = (grad / ctx.unit).view(1, 1)  # as a scalar it would be rounded to the dtype of what it scales
        if grad_hidden is not None:
            torch.mul(grad_hidden, scale, out=grad_hidden)
            if ctx.reduce is not None:
                grad_hidden = ctx.reduce(grad_hidden)
        if grad_weight is not None and ctx.accumulate is not None:
            ctx.accumulate(grad_weight.mul_(scale))
            grad_weight = None
        elif grad_weight is not None:
            grad_weight = torch.mul(grad_weight, scale, out=torch.empty_like(grad_weight, dtype=ctx.dtype))
        return grad_hidden, grad_weight, *([None] * 7)


def _add_sums(totals: Tensor, found: tuple[Tensor, ...]) -> None:
    for total, of_tokens in zip(totals.unbind(), found, strict=True):
        total.add_(of_tokens.sum())


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds ``a · b`` to an fp32 total, where the device can without rounding it
    to a narrower dtype of theirs.
    """
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif adds_in_fp32(a.device.type, a.dtype):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


@cache
def adds_in_fp32(device: str, dtype: torch.dtype) -> bool:
    """Whether a device can add a product of 16-bit matrices to an fp32 one.

    PyTorch can on CUDA, and warns where it cannot after all. On a CPU it cannot: there a product in fp32
    would take twice as long, which is more than rounding it to bf16 and adding that: see
    benchmarks/results/performance_gpu_estimates.md.
    """
    a, total = torch.zeros(16, 16, dtype=dtype, device=device), torch.zeros(16, 16, device=device)
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        # the device has no such product, or rejects the two dtypes together
        if device == "cuda":
            reason = str(error).partition("\n")[0]
            warnings.warn(
                f"this GPU adds no product of {dtype} in fp32, so products are rounded first ({reason})",
                stacklevel=2,
            )
        return False
    return True
