"""The optimizer's side of a step without a host synchronisation: flat buffers, AdamW, loss scale, learning rate."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megacore.config.schema import Optim
from megacore.tensor_parallel.shard import Shard, shard_of

ALIGNMENT = 64  # elements: every parameter starts on a boundary that vector loads and matrix units like


@dataclass
class Slot:
    """One parameter's place in a buffer."""

    name: str
    parameter: nn.Parameter
    start: int
    position: int  # in the order in which backward completes gradients

    @property
    def shard(self) -> Shard:
        return shard_of(self.parameter)

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's part of one of the buffer's flat tensors, in the parameter's shape."""
        return flat[self.start : self.start + self.parameter.numel()].view(self.parameter.shape)


@dataclass
class FlatBuffer:
    """Parameters that are treated alike, laid end to end, so that a step is a few operations on long tensors.

    The model's parameters become views of `values` (compute dtype); gradients accumulate in `gradients` (fp32, or
    fp64); the optimizer updates `master`, which is `values` itself where that is exact enough.
    """

    decay: bool
    partial: bool
    slots: list[Slot] = field(default_factory=list)
    size: int = 0

    def add(self, name: str, parameter: nn.Parameter, position: int) -> None:
        self.slots.append(Slot(name, parameter, self.size, position))
        self.size += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT

    def allocate(self) -> None:
        """Moves the parameters into the buffer. The gaps between them stay zero."""
        first = self.slots[0].parameter
        dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        self.values = torch.zeros(self.size, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros(self.size, dtype=dtype, device=first.device)
        for slot in self.slots:
            slot.view(self.values).copy_(slot.parameter.detach())
            slot.parameter.data = slot.view(self.values)
        # Masters are made from the rounded weights: exact, and what a resumed run would see.
        self.master = self.values if first.dtype == dtype else self.values.to(dtype)

    def rows_where(self, condition: Callable[[Slot], bool]) -> Tensor:
        """1 for each row of `ALIGNMENT` elements that belongs to a parameter of which `condition` holds, else 0; fp64."""
        rows = torch.zeros(self.size // ALIGNMENT, dtype=torch.float64, device=self.values.device)
        for slot in self.slots:
            first = slot.start // ALIGNMENT
            rows[first : first - (-slot.parameter.numel() // ALIGNMENT)] = condition(slot)
        return rows

    @property
    def rounds(self) -> bool:
        """Whether the parameters are a rounded copy of the masters."""
        return self.master is not self.values

    def publish(self) -> None:
        """Rounds the masters into the parameters."""
        if self.rounds:
            self.values.copy_(self.master)


def fill_buffers(module: nn.Module) -> list[FlatBuffer]:
    """Sorts a module's parameters into buffers, last parameter first: the order in which backward completes them."""
    buffers: dict[tuple[bool, bool], FlatBuffer] = {}
    for position, (name, parameter) in enumerate(reversed(list(module.named_parameters()))):
        shard = shard_of(parameter)
        kind = (shard.decay, shard.partial)
        buffers.setdefault(kind, FlatBuffer(*kind)).add(name, parameter, position)
    for buffer in buffers.values():
        buffer.allocate()
    return list(buffers.values())


class AdamW:
    """AdamW (Loshchilov and Hutter 2019) over flat buffers, through PyTorch's fused kernel.

    The kernel divides gradients by a scale on the device and does nothing if a flag on the device is set, so unscaling,
    clipping and skipping cost no pass of their own and no synchronisation.
    """

    def __init__(self, buffers: list[FlatBuffer], optim: Optim) -> None:
        self.buffers = buffers
        self.parameters = [nn.Parameter(buffer.master) for buffer in buffers]
        groups = [
            {"params": [p], "weight_decay": optim.weight_decay if b.decay else 0.0} for b, p in zip(buffers, self.parameters, strict=True)
        ]
        self.inner = torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)
        for buffer, parameter in zip(buffers, self.parameters, strict=True):
            parameter.grad = buffer.gradients
            # Made here rather than at the first step, so that a checkpoint can be read into it.
            self.inner.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=buffer.master.device),
                "exp_avg": torch.zeros_like(buffer.master),
                "exp_avg_sq": torch.zeros_like(buffer.master),
            }

    def step(self, lr: float, scale: Tensor, skip: Tensor) -> None:
        """Updates the masters from ``gradients / scale`` (an fp64 scalar), unless `skip` (an fp32 scalar) is 1."""
        for group in self.inner.param_groups:
            group["lr"] = lr
        if self.buffers[0].gradients.dtype == torch.float64:
            # The kernel's own scale is fp32, too coarse for proofs in fp64.
            for buffer in self.buffers:
                buffer.gradients.div_(scale)
            scale = torch.ones_like(scale)
        self.inner.grad_scale, self.inner.found_inf = scale.float(), skip  # type: ignore[attr-defined]
        self.inner.step()

    def moments(self, index: int) -> tuple[Tensor, Tensor]:
        """The flat first and second moments of a buffer."""
        state = self.inner.state[self.parameters[index]]
        return state["exp_avg"], state["exp_avg_sq"]

    @property
    def updates(self) -> Tensor:
        """How many steps were not skipped: what bias correction counts."""
        return self.inner.state[self.parameters[0]]["step"]

    def set_updates(self, count: float) -> None:
        for parameter in self.parameters:
            self.inner.state[parameter]["step"].fill_(count)


class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018), kept on the device: halved when a gradient overflowed,
    doubled after `INTERVAL` steps without. Constant 1 unless the precision is fp16."""

    INTERVAL = 1000

    def __init__(self, dynamic: bool, initial: float, device: torch.device) -> None:
        self.dynamic = dynamic
        self.value = torch.full((), initial if dynamic else 1.0, device=device, dtype=torch.float64)
        self.good_steps = torch.zeros((), device=device, dtype=torch.float64)

    def update(self, overflowed: Tensor) -> None:
        """`overflowed` is 1 if this step's gradients were not finite, else 0."""
        if not self.dynamic:
            return
        self.good_steps.add_(1.0).mul_(1.0 - overflowed)
        grown = self.good_steps == self.INTERVAL
        self.value.mul_(torch.where(overflowed > 0, 0.5, torch.where(grown, 2.0, 1.0)))
        self.good_steps.masked_fill_(grown, 0.0)


def learning_rate(optim: Optim, step: int, steps: int) -> float:
    """The rate of `step` (from 1) of `steps`: linear warmup, then the schedule.

    cosine and linear fall to `min_lr` at `decay_steps` and stay there; wsd holds `lr` and falls linearly over the last
    `decay_steps` (Hu et al. 2024, MiniCPM); constant holds.
    """
    assert optim.decay_steps is not None
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    if optim.schedule == "wsd":
        done = (step - (steps - optim.decay_steps)) / optim.decay_steps
    else:
        done = (step - optim.warmup_steps) / max(1, optim.decay_steps - optim.warmup_steps)
    done = min(max(done, 0.0), 1.0)
    remaining = 0.5 * (1.0 + math.cos(math.pi * done)) if optim.schedule == "cosine" else 1.0 - done
    return optim.min_lr + remaining * (optim.lr - optim.min_lr)
