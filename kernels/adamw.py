"""AdamW (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101) over many tensors in one launch.

For each element, with the accumulated gradient G, its tensor's weight decay w, and t updates including this
one:

    g = G / scale
    m = b1 m + (1 - b1) g
    v = b2 v + (1 - b2) g²
    p = (1 - lr w) p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

One pass reads G, p, m and v and writes p, m and v, and the rounded copy of p that the model computes with: 28
bytes an element in fp32, 2 more for a copy in 16 bits and 2 fewer for gradients in 16 bits. One program reads
loss scale, clipping (both in `scale`), the decision to skip a step and the count of updates on the device in
advance, so the host does not wait.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw as pytorch_adamw

from megacore.kernels.dispatch import Implementation, use_triton
from megacore.kernels.tensor_table import TensorTable, check_columns

try:
    import triton
    import triton.language as tl

    from megacore.kernels.tensor_table import pointer_at
except ImportError:  # a CPU build of torch brings no Triton
    from megacore.kernels.absent import tl, triton

BLOCK = 1024  # elements a program: of each fp32 tensor 16 bytes a thread
THREADS = 256
COPIES = (torch.bfloat16, torch.float16)


class AdamW:
    """AdamW over tensors that stay where they are; `updates` (an fp32 scalar on the device) counts
    the steps that were not skipped.

    Eager is PyTorch's own fused AdamW if all is fp32 and it fits, and otherwise `adamw_eager`, which is
    several times slower.

    masters, first_moments, second_moments: lists of tensors of the same shapes, contiguous; fp32, or fp64
    through eager.
    gradients: the same, in fp32, bf16 or fp16 (fp64 with fp64).
    weight_decay: one number, or one a tensor.
    copies: bf16 or fp16 tensors, into which every step rounds the masters.
    Raises ValueError naming the argument whose lengths, shapes, dtypes or devices do not fit.
    """

    def __init__(
        self,
        masters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        first_moments: Sequence[Tensor],
        second_moments: Sequence[Tensor],
        *,
        weight_decay: float | Sequence[float],
        beta1: float,
        beta2: float,
        eps: float,
        copies: Sequence[Tensor] | None = None,
        implementation: Implementation = "auto",
    ) -> None:
        state = {"masters": masters, "first_moments": first_moments, "second_moments": second_moments}
        check_columns("AdamW", {**state, "gradients": gradients, "copies": copies})
        wide = masters[0].dtype
        for name, column in state.items():
            if column[0].dtype != wide or wide not in (torch.float32, torch.float64):
                raise ValueError(f"AdamW: {name} are {column[0].dtype} (right: all fp32 or all fp64)")
        if copies is not None and copies[0].dtype not in COPIES:
            raise ValueError(f"AdamW: copies are {copies[0].dtype} (right: bf16 or fp16)")
        self.decays = (
            [weight_decay] * len(masters) if isinstance(weight_decay, int | float) else list(weight_decay)
        )
        if len(self.decays) != len(masters):
            raise ValueError(
                f"AdamW: weight_decay has {len(self.decays)} numbers (right: one, or {len(masters)}, as "
                "masters)"
            )
        self.beta1, self.beta2, self.eps, self.copies = beta1, beta2, eps, copies
        self.masters, self.gradients, self.first_moments, self.second_moments = (
            masters,
            gradients,
            first_moments,
            second_moments,
        )
        self.updates = torch.zeros((), dtype=torch.float32, device=masters[0].device)
        self.table: TensorTable | None = None
        if use_triton("AdamW", implementation, masters=masters[0], gradients=gradients[0]):
            columns = [
                masters,
                gradients,
                first_moments,
                second_moments,
                *([] if copies is None else [copies]),
            ]
            self.table = TensorTable(columns, BLOCK)
            self.decays_on_device = torch.tensor(self.decays, dtype=torch.float32).to(masters[0].device)
            self.factors = torch.empty(4, dtype=torch.float32, device=masters[0].device)

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor | None = None, skip: Tensor | None = None) -> None:
        """Updates all tensors from ``gradients / scale`` (a scalar on the device, fp32 or fp64),
        unless `skip` (likewise) is not 0.
        """
        if self.table is not None:
            self._launch(self.table, lr, scale, skip)
            return
        by_pytorch = self.masters[0].dtype == self.gradients[0].dtype == torch.float32
        if by_pytorch:
            self._step_by_pytorch(lr, scale, skip)
        self.updates += 1 if skip is None else skip == 0
        for i, master in enumerate(self.masters):
            if not by_pytorch:
                tensors = (master, self.gradients[i], self.first_moments[i], self.second_moments[i])
                adamw_eager(
                    *tensors, lr, self.beta1, self.beta2, self.eps, self.decays[i], self.updates, scale, skip
                )
            if self.copies is not None:
                self.copies[i].copy_(master)

    def _step_by_pytorch(self, lr: float, scale: Tensor | None, skip: Tensor | None) -> None:
        """One call for each weight decay."""
        state = (self.masters, self.gradients, self.first_moments, self.second_moments)
        for decay in set(self.decays):
            masters, gradients, first, second = (
                [column[i] for i, own in enumerate(self.decays) if own == decay] for column in state
            )
            pytorch_adamw(
                masters,
                gradients,
                first,
                second,
                max_exp_avg_sqs=[],
                state_steps=[self.updates.clone() for _ in masters],  # it counts for itself
                fused=True,
                grad_scale=None if scale is None else scale.float(),
                found_inf=None if skip is None else skip.float(),
                amsgrad=False,
                beta1=self.beta1,
                beta2=self.beta2,
                lr=lr,
                weight_decay=decay,
                eps=self.eps,
                maximize=False,
            )

    def _launch(self, table: TensorTable, lr: float, scale: Tensor | None, skip: Tensor | None) -> None:
        logs = (log_decay(self.beta1), log_decay(self.beta2))
        _prepare_kernel[(1,)](self.factors, self.updates, scale, skip, lr, *logs, num_warps=1)
        if table.programs:  # a launch of no programs is an error
            names = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
            _adamw_kernel[(table.programs,)](
                table.blocks,
                table.addresses,
                table.sizes,
                self.decays_on_device,
                self.factors,
                lr,
                1.0 - self.beta1,
                1.0 - self.beta2,
                self.eps,
                GRADIENT=names[self.gradients[0].dtype],
                COPY=None if self.copies is None else names[self.copies[0].dtype],
                ALIGNED=table.aligned,
                BLOCK=BLOCK,
                num_warps=THREADS // (64 if torch.version.hip else 32),
            )


def log_decay(beta: float) -> float:
    """The logarithm of a moment's decay rate; -inf for a moment that is just the latest gradient."""
    return math.log(beta) if beta else -math.inf


def adamw_eager(
    master: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    update: Tensor,
    scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """The reference in plain PyTorch: one tensor, updated in place; `update` is the count that
    includes this one, if not skipped.
    """
    wide = master.dtype
    done = torch.ones((), dtype=wide, device=master.device) if skip is None else (skip == 0).to(wide)
    update = update.to(wide).clamp(min=1.0)
    step = done * lr / -torch.expm1(update * log_decay(beta1))
    unbias = (-torch.expm1(update * log_decay(beta2))).rsqrt()
    g = gradient.to(wide) if scale is None else gradient.to(wide) / scale.to(wide)
    if skip is not None:
        g = torch.where(skip == 0, g, 0.0)  # a skipped gradient is not finite, and would stay so times 0
    first.lerp_(g, (1.0 - beta1) * done)
    second.lerp_(g.square(), (1.0 - beta2) * done)
    master.mul_(1.0 - lr * weight_decay * done).sub_(step * first / (second.sqrt() * unbias + eps))


@triton.jit
def _prepare_kernel(factors, updates, scale, skip, lr, log_beta1, log_beta2):
    """One program: counts this update, and leaves 1 / scale, the two corrected
    factors, and whether to update at all.
    """
    update = tl.load(updates) + 1.0
    done = 1.0
    if skip is not None:
        done = tl.where(tl.load(skip) == 0, 1.0, 0.0)
    inverse = 1.0
    if scale is not None:
        inverse = (1.0 / tl.load(scale)).to(tl.float32)
    # In fp64, because 1 - b2^t of the first updates would lose up to four digits in fp32.
    wide = update.to(tl.float64)
    tl.store(factors, inverse)
    tl.store(factors + 1, (lr / (1.0 - tl.exp(wide * log_beta1))).to(tl.float32))
    tl.store(factors + 2, (1.0 / tl.sqrt(1.0 - tl.exp(wide * log_beta2))).to(tl.float32))
    tl.store(factors + 3, done)
    tl.store(updates, update - 1.0 + done)


@triton.jit
def _update(
    p_ptr,
    g_ptr,
    m_ptr,
    v_ptr,
    copy_ptr,
    offset,
    inside,
    inverse,
    decay,
    step,
    unbias,
    weight1,
    weight2,
    eps,
    COPY: tl.constexpr,
):
    p = tl.load(p_ptr + offset, mask=inside)
    g = tl.load(g_ptr + offset, mask=inside).to(tl.float32) * inverse
    m = tl.load(m_ptr + offset, mask=inside)
    v = tl.load(v_ptr + offset, mask=inside)
    m += weight1 * (g - m)
    v += weight2 * (g * g - v)
    p = p * decay - step * m / (tl.sqrt(v) * unbias + eps)
    tl.store(p_ptr + offset, p, mask=inside)
    tl.store(m_ptr + offset, m, mask=inside)
    tl.store(v_ptr + offset, v, mask=inside)
    if COPY is not None:
        tl.store(copy_ptr + offset, p.to(COPY), mask=inside)


@triton.jit
def _adamw_kernel(
    blocks,
    addresses,
    sizes,
    decays,
    factors,
    lr,
    weight1,
    weight2,
    eps,
    GRADIENT: tl.constexpr,
    COPY: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    inverse, step, unbias = tl.load(factors), tl.load(factors + 1), tl.load(factors + 2)
    tensor = tl.load(blocks + 2 * tl.program_id(0))
    start = tl.load(blocks + 2 * tl.program_id(0) + 1).to(tl.int64) * BLOCK
    size = tl.where(tl.load(factors + 3) == 0.0, 0, tl.load(sizes + tensor))  # skipped, nothing is inside
    row = addresses + tensor * (4 if COPY is None else 5)
    p_ptr = pointer_at(row, tl.float32, ALIGNED)
    g_ptr = pointer_at(row + 1, GRADIENT, ALIGNED)
    m_ptr = pointer_at(row + 2, tl.float32, ALIGNED)
    v_ptr = pointer_at(row + 3, tl.float32, ALIGNED)
    copy_ptr = p_ptr if COPY is None else pointer_at(row + 4, COPY, ALIGNED)
    decay = 1.0 - lr * tl.load(decays + tensor)
    offset = start + tl.arange(0, BLOCK)
    if start + BLOCK <= size:  # without a mask, which would make loads narrower for odd sizes
        _update(
            p_ptr,
            g_ptr,
            m_ptr,
            v_ptr,
            copy_ptr,
            offset,
            None,
            inverse,
            decay,
            step,
            unbias,
            weight1,
            weight2,
            eps,
            COPY,
        )
    else:
        _update(
            p_ptr,
            g_ptr,
            m_ptr,
            v_ptr,
            copy_ptr,
            offset,
            offset < size,
            inverse,
            decay,
            step,
            unbias,
            weight1,
            weight2,
            eps,
            COPY,
        )
