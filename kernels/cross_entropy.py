"""Cross entropy over logits whose vocabulary may be split over ranks: one read and one
write, or two reads and one write.

With p = exp(x - lse), target t, V the whole vocabulary, label smoothing e (Szegedy et al. 2016,
https://arxiv.org/abs/1512.00567) and z-loss z (Chowdhery et al. 2022, PaLM,
https://arxiv.org/abs/2204.02311):

    forward    lse   = log sum_j exp(x[j])
               loss  = lse - (1 - e) x[t] - e / V sum_j x[j] + z lse^2           0 if t is ignored
    backward   dx[j] = dloss (p[j] (1 + 2 z lse) - (1 - e) [j = t] - e / V)       in the memory of the logits

Forward gathers a row's maximum and sum of exponentials online (Milakov & Gimelshein 2018,
https://arxiv.org/abs/1805.02867). The ranks then exchange, in one collective, two numbers a token: their own
lse and, the one that has it, the target's logit (with label smoothing also the sum of the logits).

A caller who knows dloss in advance, one number for all tokens, has the gradient written in forward. On a
whole vocabulary that reads memory once and writes it once, because a row is still in the cache when it is
read again. Else backward computes it, in a
read and a write more: a gradient without its dloss would have to be scaled there, at the same cost, and
underflows in fp16.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megacore.kernels.dispatch import Implementation, check_shape, use_triton

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch brings no Triton
    from megacore.kernels.absent import tl, triton

BLOCK_BYTES = 2**14  # bytes of a row that a program holds at once: 64 a thread of 8 warps
# Rows that a program reads twice must stay in the GPU's cache in between. With so many warps a program, a
# multiprocessor works on one or two of them: on an H100 264 rows of 50304 numbers of 16 bits, 27 MB of its
# 50.
# bytes; AMD's programs have 16 warps at most
LONG_ROW, WARPS_OF_LONG_ROW = 2**15, 16 if torch.version.hip else 32
LOG2_E = math.log2(math.e)
# elements that eager handles at once: on a CPU as many as stay in the cache
EAGER_BLOCK = {"cpu": 2**18, "cuda": 2**27}


@dataclass(frozen=True)
class Settings:
    """The arguments of `cross_entropy` besides its tensors."""

    first_row: int = 0
    gather: Callable[[Tensor], Tensor] | None = None
    ignored: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    vocab_size: int | None = None
    apart: bool = False

    def share(self, rows: int) -> float:
        """The share of the target that label smoothing gives to each row of the vocabulary.

        This rank has `rows` of them.
        """
        return self.label_smoothing / (self.vocab_size or rows)

    def factors(self, rows: int) -> tuple[float, float, float]:
        """The factors of the target, of every row, and of lse^2 in the loss."""
        return 1.0 - self.label_smoothing, self.share(rows), self.z_loss

    def check(self, operation: str, targets: Tensor, tokens: int, rows: int) -> None:
        """Raises ValueError naming the wrong argument.

        Targets are checked only on a CPU: elsewhere the host would wait for them.
        """
        check_shape(
            operation, "targets", targets, f"[{tokens}], one for each token", targets.shape == (tokens,)
        )
        if targets.dtype != torch.int64:
            raise ValueError(f"{operation}: targets are {targets.dtype} (right: torch.int64)")
        if self.apart and not self.z_loss:
            raise ValueError(f"{operation}: apart without a z-loss (right: a z_loss above 0)")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"{operation}: label_smoothing is {self.label_smoothing} (right: 0 to below 1)")
        if self.label_smoothing and self.gather is not None and self.vocab_size is None:
            raise ValueError(
                f"{operation}: vocab_size is missing (label smoothing over a split vocabulary needs it)"
            )
        if targets.device.type != "cpu":
            return
        low, high = (self.first_row, self.first_row + rows) if self.gather is None else (0, self.vocab_size)
        wrong = (targets < low) if high is None else (targets < low) | (targets >= high)
        wrong &= targets != self.ignored
        if wrong.any():
            right = f"from {low}" if high is None else f"{low} to {high - 1}"
            raise ValueError(
                f"{operation}: targets hold {int(targets[wrong][0])} (right: {right}, or {self.ignored} "
                "to ignore)"
            )


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    first_row: int = 0,
    gather: Callable[[Tensor], Tensor] | None = None,
    ignored: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    gradient: Tensor | None = None,
    apart: bool = False,
    implementation: Implementation = "auto",
) -> Any:
    """The loss of every token, ``[tokens]``, in nats; fp32 (fp64 for fp64 logits).

    The gradient overwrites the logits: nothing else may read them afterwards. Backward runs only once.

    logits: ``[tokens, vocabulary rows of this rank]``, contiguous along the rows; `first_row` is the first of
    them.
    targets: ``[tokens]`` int64 over the whole vocabulary, or `ignored`: no loss and no gradient.
    gather: with a split vocabulary, the collective: every rank's ``[1, k, tokens]`` → ``[ranks, k, tokens]``,
    `k` being 2 or 3.
    vocab_size: rows of all ranks, needed for label smoothing over a split vocabulary.
    gradient: the scalar, on the device, that backward will be given as the gradient of each of the losses, if
    it is known already:
        forward then writes the logits' gradient, if one is wanted. Another one in backward is a RuntimeError
        on a CPU, and goes unnoticed elsewhere, where looking would be a wait.
    apart: the loss without the z-loss, and lse^2 of every token, two tensors. Backward must be given `z_loss`
    times the first's gradient
        for the second: it computes that of their sum. Another one is a RuntimeError on a CPU, and goes
            unnoticed elsewhere.
    Raises ValueError for what the implementation cannot take, on a CPU also for a target outside of the
    vocabulary, whose loss is infinite elsewhere.
    """
    settings = Settings(first_row, gather, ignored, label_smoothing, z_loss, vocab_size, apart)
    right = "[tokens, vocabulary rows of this rank], rows contiguous"
    check_shape(
        "cross_entropy",
        "logits",
        logits,
        right,
        logits.dim() == 2 and logits.shape[1] > 0 and logits.stride(1) == 1,
    )
    fused = use_triton("cross_entropy", implementation, logits=logits, targets=targets)
    settings.check("cross_entropy", targets, *logits.shape)
    return _CrossEntropy.apply(
        logits, targets, gradient, settings, fused, torch.is_grad_enabled() and logits.requires_grad
    )


def losses(
    logits: Tensor, targets: Tensor, settings: Settings, fused: bool, keep: bool
) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    """The losses ``[tokens]``, and what `write_gradients` needs besides the logits, which eager
    may overwrite if told to `keep`.
    """
    if fused and settings.gather is None:
        loss, lse = _triton_statistics(logits, targets, settings)
        return loss, (lse, None)
    if fused:
        statistics, top = _triton_statistics(logits, targets, settings)[1], None
    else:
        statistics, top = _eager_statistics(logits, targets, settings, keep)
    gathered = statistics[None] if settings.gather is None else settings.gather(statistics[None])
    lse = gathered[0, 0] if len(gathered) == 1 else gathered[:, 0].logsumexp(0)
    # -inf where it is not: missing everywhere, an infinite loss
    loss = lse - gathered[:, 1].amax(0) * (1.0 - settings.label_smoothing)
    if settings.label_smoothing:
        loss -= gathered[:, 2].sum(0) * settings.share(logits.shape[1])
    if settings.z_loss:
        loss += settings.z_loss * lse.square()
    return loss.masked_fill_(targets == settings.ignored, 0.0), (lse, top)


def write_gradients(
    logits: Tensor,
    targets: Tensor,
    grad: Tensor,
    saved: tuple[Tensor, Tensor | None],
    settings: Settings,
    fused: bool,
) -> None:
    """Overwrites the logits by their gradient; `grad` ``[tokens]`` is that of the losses."""
    if fused:
        _triton_gradients(logits, targets, grad, saved[0], settings)
    else:
        _eager_gradients(logits, targets, grad, *saved, settings)


def taken_apart(loss: Tensor, lse: Tensor, targets: Tensor, settings: Settings) -> tuple[Tensor, ...]:
    """The losses, or if they are to be `apart`, those without the z-loss, and the squares of lse."""
    if not settings.apart:
        return (loss,)
    squares = lse.square().masked_fill_(targets == settings.ignored, 0.0)
    return loss.sub_(squares, alpha=settings.z_loss), squares


def losses_and_gradients(
    logits: Tensor, targets: Tensor, gradient: Tensor, settings: Settings, fused: bool
) -> tuple[Tensor, ...]:
    """The losses ``[tokens]``, see `taken_apart`; overwrites the logits by their gradient, `gradient`
    being that of every loss, a scalar.

    No autograd.
    """
    tokens, rows = logits.shape
    if settings.gather is not None:
        loss, saved = losses(logits, targets, settings, fused, keep=True)
        lse = saved[0]
        write_gradients(logits, targets, gradient.to(loss.dtype).expand(tokens), saved, settings, fused)
    elif fused:
        loss, options = (
            torch.empty(tokens, dtype=torch.float32, device=logits.device),
            launch_options(rows, logits.element_size()),
        )
        lse = torch.empty_like(loss) if settings.apart else loss
        if rows * logits.element_size() > LONG_ROW:
            options["num_warps"] = WARPS_OF_LONG_ROW
        if tokens:  # a launch of no programs is an error
            sizes = (rows, logits.stride(0), settings.first_row, settings.ignored)
            _loss_and_gradient_kernel[(tokens,)](
                logits,
                targets,
                loss,
                lse,
                gradient,
                *sizes,
                *settings.factors(rows),
                SMOOTHED=settings.label_smoothing > 0,
                APART=settings.apart,
                **options,
            )
    else:
        loss, lse = _eager_losses_and_gradients(logits, targets, gradient, settings)
    return taken_apart(loss, lse, targets, settings)


class _CrossEntropy(torch.autograd.Function):
    """T tokens, V vocabulary rows of this rank, R ranks. Statistics in fp32 (fp64 for fp64 logits).

    forward      statistics [2, T] = own lse, target's logit     gathered to [R, 2, T]; saves lse [T] and the
                 logits [T, V]
    grad logits  [T, V]                                          in the memory of the logits; written in
        forward if dloss is known
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        gradient: Tensor | None,
        settings: Settings,
        fused: bool,
        keep: bool,
    ) -> Any:
        ctx.settings, ctx.fused, ctx.known = settings, fused, keep and gradient is not None
        if keep and gradient is not None:
            found = losses_and_gradients(logits, targets, gradient, settings, fused)
            ctx.save_for_backward(logits, gradient)
        else:
            loss, saved = losses(logits, targets, settings, fused, keep)
            found = taken_apart(loss, saved[0], targets, settings)
            ctx.save_for_backward(logits, targets, *saved)
        return found if settings.apart else found[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *of_squares: Tensor) -> tuple[Tensor | None, ...]:
        logits, *saved = ctx.saved_tensors
        check_ratio(grad, of_squares, ctx.settings)
        if not ctx.known:
            targets, *statistics = saved
            write_gradients(logits, targets, grad, statistics, ctx.settings, ctx.fused)
        elif grad.device.type == "cpu" and not torch.allclose(
            grad, saved[0].to(grad.dtype), 0.0, 0.0, equal_nan=True
        ):
            raise RuntimeError(
                f"cross_entropy: backward is given {grad.flatten()[0]}, and forward was told {saved[0]}"
            )
        torch.autograd.graph.increment_version(logits)  # so that autograd refuses a second backward
        return logits, None, None, None, None, None


def check_ratio(grad: Tensor, of_squares: tuple[Tensor, ...], settings: Settings) -> None:
    """Raises `RuntimeError` if the gradient of squares that are `apart` is not what backward counts with.

    Only on a CPU.
    """
    for other in of_squares:
        if other.device.type == "cpu" and not torch.allclose(
            other, settings.z_loss * grad, 1e-5, 0.0, equal_nan=True
        ):
            raise RuntimeError(
                f"cross_entropy: the gradient of lse^2 is {other.flatten()[0]}, not z_loss times the loss's"
            )


def _row_blocks(logits: Tensor) -> Iterator[slice]:
    rows = max(1, EAGER_BLOCK.get(logits.device.type, 2**27) // logits.shape[1])
    return (slice(start, start + rows) for start in range(0, logits.shape[0], rows))


def _exp_less(x: Tensor, less: Tensor, out: Tensor | None = None) -> Tensor:
    """exp(x - less) as a power of two, which PyTorch computes 4.5 times as fast on a CPU (Zen 5).

    The difference is scaled, and not both before it: that would round large logits once more.
    """
    return torch.sub(x, less, out=out).mul_(LOG2_E).exp2_()


def _exponentials(x: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's maximum, exp(x - that), in the place of x if told to `keep`, and its sum."""
    # of a row of -inf, exp(-inf) = 0 and no NaN
    top = x.amax(1, keepdim=True).clamp_(min=torch.finfo(x.dtype).min / 2)
    e = _exp_less(x, top, x if keep else None)
    return top, e, e.sum(1, keepdim=True)


def _eager_losses_and_gradients(
    logits: Tensor, targets: Tensor, gradient: Tensor, settings: Settings
) -> tuple[Tensor, Tensor]:
    """See `losses_and_gradients`: rows of a whole vocabulary, as many at a time as stay in the cache.

    The losses, and lse.
    """
    confidence, share, z_loss = settings.factors(logits.shape[1])
    local, here, target_logits = _at_targets(logits, targets, settings)
    grad = (
        gradient.to(target_logits.dtype)
        .expand(len(logits), 1)
        .masked_fill((targets == settings.ignored)[:, None], 0.0)
    )
    at_target, lse, plain = (
        -confidence * grad * here,
        torch.empty_like(target_logits),
        torch.zeros_like(target_logits),
    )
    for block in _row_blocks(logits):
        part = logits[block]
        x = part.to(lse.dtype)
        if share:
            torch.sum(x, 1, keepdim=True, out=plain[block])
        top, e, total = _exponentials(x, keep=True)
        torch.add(top, total.log_(), out=lse[block])
        scale = grad[block] * (1.0 + 2.0 * z_loss * lse[block]) if z_loss else grad[block]
        # and not grad / total: to the bit what backward and split vocabularies compute
        e.mul_(scale * (top - lse[block]).exp())
        if share:
            e.sub_(grad[block] * share)
        e.scatter_add_(1, local[block], at_target[block])
        if e is not part:
            part.copy_(e)
    losses = lse - confidence * target_logits - share * plain + z_loss * lse.square()
    return losses[:, 0].masked_fill_(targets == settings.ignored, 0.0), lse[:, 0]


def _at_targets(logits: Tensor, targets: Tensor, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token ``[tokens, 1]`` the target among these rows, whether it is
    one of them, and its logit, or -inf.
    """
    local = (targets - settings.first_row)[:, None]
    here = (local >= 0) & (local < logits.shape[1]) & (targets != settings.ignored)[:, None]
    local = local.masked_fill(~here, 0)
    return (
        local,
        here,
        logits.gather(1, local)
        .to(torch.promote_types(logits.dtype, torch.float32))
        .masked_fill(~here, float("-inf")),
    )


def _eager_statistics(
    logits: Tensor, targets: Tensor, settings: Settings, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Statistics ``[2 or 3, tokens]``; if told to `keep`, fp32 logits become exp(logits -
    top) and `top` is returned too.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    statistics = torch.empty(
        3 if settings.label_smoothing else 2, len(logits), dtype=wide, device=logits.device
    )
    statistics[1] = _at_targets(logits, targets, settings)[2][:, 0]
    keep = keep and logits.dtype == wide
    top = torch.empty(len(logits), 1, dtype=wide, device=logits.device)
    for block in _row_blocks(logits):
        x = logits[block].to(wide)
        if settings.label_smoothing:
            statistics[2, block] = x.sum(1)
        top[block], _, total = _exponentials(x, keep)
        torch.add(top[block][:, 0], total.log_()[:, 0], out=statistics[0, block])
    return statistics, top if keep else None


def _eager_gradients(
    logits: Tensor, targets: Tensor, grad: Tensor, lse: Tensor, top: Tensor | None, settings: Settings
) -> None:
    grad = grad.masked_fill(targets == settings.ignored, 0.0)[:, None]
    local = (targets - settings.first_row)[:, None]
    here = (local >= 0) & (local < logits.shape[1])
    at_target = (settings.label_smoothing - 1.0) * grad * here
    local = local.masked_fill(~here, 0)
    lse = lse[:, None]
    scale = grad * (1.0 + 2.0 * settings.z_loss * lse)
    if top is not None:
        scale = scale * (top - lse).exp()
    for block in _row_blocks(logits):
        x = logits[block]
        e = x if top is not None else _exp_less(x.to(lse.dtype), lse[block])
        e.mul_(scale[block])
        if settings.label_smoothing:
            e.sub_(grad[block] * settings.share(logits.shape[1]))
        e.scatter_add_(1, local[block], at_target[block])
        if e is not x:
            x.copy_(e)


@triton.jit
def _fold(x, maximum, total):
    """Takes ``[LANES, WIDTH]`` logits into each lane's maximum and sum of
    exponentials: nothing here crosses lanes.
    """
    highest = tl.maximum(maximum, tl.max(x, 1))
    return highest, total * tl.exp(maximum - highest) + tl.sum(tl.exp(x - highest[:, None]), 1)


@triton.jit
def _row_statistics(row, rows, SMOOTHED: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """log sum exp of the logits from `row` on, and their sum if it is wanted; WIDTH of them are 16 bytes."""
    lane = tl.arange(0, BLOCK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    # Starting from the least finite number, not -inf, logits of -inf give exp(-inf) = 0 and no NaN.
    maximum = tl.full([BLOCK // WIDTH], -3.4028234663852886e38, tl.float32)
    total = tl.zeros([BLOCK // WIDTH], tl.float32)
    plain = tl.zeros([BLOCK // WIDTH], tl.float32)
    whole = rows // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):  # without a mask, which would narrow the loads where `rows` is odd
        x = tl.load(row + start + lane).to(tl.float32)
        maximum, total = _fold(x, maximum, total)
        if SMOOTHED:
            plain += tl.sum(x, 1)
    if whole < rows:
        inside = whole + lane < rows
        x = tl.load(row + whole + lane, mask=inside, other=float("-inf")).to(tl.float32)
        maximum, total = _fold(x, maximum, total)
        if SMOOTHED:
            plain += tl.sum(tl.where(inside, x, 0.0), 1)
    top = tl.max(maximum, 0)
    return top + tl.log(tl.sum(total * tl.exp(maximum - top), 0)), tl.sum(plain, 0)


@triton.jit
def _target_logit(row, local, rows):
    here = (local >= 0) & (local < rows)
    return tl.load(row + local, mask=here, other=float("-inf")).to(tl.float32)


@triton.jit
def _statistics_kernel(
    logits,
    targets,
    statistics,
    losses,
    tokens,
    rows,
    stride,
    first_row,
    ignored,
    confidence,
    share,
    z_loss,
    WHOLE: tl.constexpr,
    SMOOTHED: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0)
    row = logits + token.to(tl.int64) * stride  # passes 2^31 at ordinary sizes
    target = tl.load(targets + token)
    x_target = _target_logit(row, target - first_row, rows)
    lse, plain = _row_statistics(row, rows, SMOOTHED, BLOCK, WIDTH)
    tl.store(statistics + token, lse)
    if WHOLE:
        loss = lse - confidence * x_target - share * plain + z_loss * lse * lse
        tl.store(losses + token, tl.where(target == ignored, 0.0, loss))
    else:
        tl.store(statistics + tokens + token, x_target)
        if SMOOTHED:
            tl.store(statistics + 2 * tokens + token, plain)


@triton.jit
def _write_gradient(row, column, inside, local, lse, scale, at_target, share):
    x = tl.load(row + column, mask=inside).to(tl.float32)
    dx = tl.exp(x - lse) * scale - share
    tl.store(row + column, tl.where(column == local, dx - at_target, dx), mask=inside)


@triton.jit
def _gradient_kernel(
    logits,
    targets,
    grads,
    lses,
    rows,
    stride,
    grad_stride,
    blocks,
    first_row,
    ignored,
    confidence,
    share,
    z_loss,
    BLOCK: tl.constexpr,
):
    # neighbours in a row are neighbouring programs: memory is walked through in order
    token = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * BLOCK
    row = logits + token.to(tl.int64) * stride
    target = tl.load(targets + token)
    lse = tl.load(lses + token)
    grad = tl.where(target == ignored, 0.0, tl.load(grads + token.to(tl.int64) * grad_stride))
    scale, at_target, share = grad * (1.0 + 2.0 * z_loss * lse), grad * confidence, grad * share
    column = start + tl.arange(0, BLOCK)
    if start + BLOCK <= rows:  # without a mask, which would narrow the loads where `rows` is odd
        _write_gradient(row, column, None, target - first_row, lse, scale, at_target, share)
    else:
        _write_gradient(row, column, column < rows, target - first_row, lse, scale, at_target, share)


@triton.jit
def _loss_and_gradient_kernel(
    logits,
    targets,
    losses,
    lses,
    gradient,
    rows,
    stride,
    first_row,
    ignored,
    confidence,
    share,
    z_loss,
    SMOOTHED: tl.constexpr,
    APART: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0)
    row = logits + token.to(tl.int64) * stride
    target = tl.load(targets + token)
    x_target = _target_logit(row, target - first_row, rows)
    lse, plain = _row_statistics(row, rows, SMOOTHED, BLOCK, WIDTH)
    loss = lse - confidence * x_target - share * plain + z_loss * lse * lse
    tl.store(losses + token, tl.where(target == ignored, 0.0, loss))
    if APART:
        tl.store(lses + token, lse)
    tl.debug_barrier()  # every thread has read the target's logit, before one of them overwrites it
    grad = tl.where(target == ignored, 0.0, tl.load(gradient).to(tl.float32))
    scale, at_target, share = grad * (1.0 + 2.0 * z_loss * lse), grad * confidence, grad * share
    whole = rows // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        _write_gradient(
            row, start + tl.arange(0, BLOCK), None, target - first_row, lse, scale, at_target, share
        )
    if whole < rows:
        column = whole + tl.arange(0, BLOCK)
        _write_gradient(row, column, column < rows, target - first_row, lse, scale, at_target, share)


def launch_options(rows: int, element_size: int) -> dict[str, int]:
    """Compile-time sizes for rows of so many elements: 64 bytes a thread, whole
    blocks and a rest that is shorter.
    """
    block = min(triton.next_power_of_2(rows + 1) // 2, BLOCK_BYTES // element_size)
    width = min(16 // element_size, block)
    return {"BLOCK": block, "WIDTH": width, "num_warps": min(max(block * element_size // 2048, 1), 8)}


def _triton_statistics(logits: Tensor, targets: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Losses ``[tokens]`` and lse ``[tokens]``; with a split vocabulary nothing, and
    statistics ``[2 or 3, tokens]``.
    """
    (tokens, rows), smoothed, whole = logits.shape, settings.label_smoothing > 0, settings.gather is None
    statistics = torch.empty(1 if whole else 2 + smoothed, tokens, dtype=torch.float32, device=logits.device)
    losses = torch.empty(tokens if whole else 0, dtype=torch.float32, device=logits.device)
    if tokens:  # a launch of no programs is an error
        sizes, options = (tokens, rows, logits.stride(0)), launch_options(rows, logits.element_size())
        constants = (settings.first_row, settings.ignored, *settings.factors(rows))
        _statistics_kernel[(tokens,)](
            logits, targets, statistics, losses, *sizes, *constants, WHOLE=whole, SMOOTHED=smoothed, **options
        )
    return losses, statistics[0] if whole else statistics


def _triton_gradients(logits: Tensor, targets: Tensor, grad: Tensor, lse: Tensor, settings: Settings) -> None:
    (tokens, rows), options = logits.shape, launch_options(logits.shape[1], logits.element_size())
    del options["WIDTH"]
    blocks = triton.cdiv(rows, options["BLOCK"])
    if tokens:
        sizes = (rows, logits.stride(0), grad.stride(0), blocks, settings.first_row, settings.ignored)
        _gradient_kernel[(tokens * blocks,)](
            logits, targets, grad, lse, *sizes, *settings.factors(rows), **options
        )
