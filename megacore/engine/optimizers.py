"""Optimizers, by `optim.kind`, as rules over tensors that stay where they are. `engine/optimizer_states.py` lists the state of each.

To add one: write a function here that takes what `adamw` takes, enter it in `UPDATES` and its state in `engine.optimizer_states.STATES`,
and name it in `OptimConfig.kind` of the schema. Engines, checkpoints, sharding, offload and the planner ask for nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megacore.config.schema import OptimConfig
from megacore.kernels.adamw import AdamW
from megacore.kernels.dispatch import Implementation


class Update(Protocol):
    """Updates one rank's tensors. `updates`, an fp32 scalar on the device, counts the steps that were not skipped."""

    updates: Tensor

    def step(self, lr: float, scale: Tensor | None = None, skip: Tensor | None = None) -> None:
        """Updates all masters from ``gradients / scale``, unless `skip` is not 0; both are scalars on the device."""


@dataclass(frozen=True)
class ParameterShards:
    """The tensors that one rank updates: lists of flat tensors, of equal length and sizes."""

    masters: Sequence[Tensor]  # fp32 or fp64
    gradients: Sequence[Tensor]
    states: Mapping[str, Sequence[Tensor]]  # by kind, see `engine.optimizer_states.STATES`
    decay: Sequence[bool]  # whether weight decay applies
    copies: Sequence[Tensor] | None  # 16-bit parameters that compute, if they are not the masters: every step rounds the masters into them


def adamw(optim: OptimConfig, tensors: ParameterShards, implementation: Implementation) -> Update:
    """AdamW (Loshchilov and Hutter 2019); see `kernels.adamw`."""
    return AdamW(
        tensors.masters,
        tensors.gradients,
        tensors.states["adam_m"],
        tensors.states["adam_v"],
        weight_decay=[optim.weight_decay if own else 0.0 for own in tensors.decay],
        beta1=optim.beta1,
        beta2=optim.beta2,
        eps=optim.eps,
        copies=tensors.copies,
        implementation=implementation,
    )


class SGD:
    """Stochastic gradient descent with momentum (Polyak 1964) and decoupled weight decay (Loshchilov and Hutter 2019).

    For each element: ``b = momentum · b + g``, then ``p = (1 - lr · decay) · p - lr · b``. There is one implementation, in PyTorch.
    """

    def __init__(self, optim: OptimConfig, tensors: ParameterShards, implementation: Implementation) -> None:
        self.momentum, self.decays = optim.momentum, [optim.weight_decay if own else 0.0 for own in tensors.decay]
        self.masters, self.gradients, self.copies = tensors.masters, tensors.gradients, tensors.copies
        self.buffers = tensors.states["momentum"]
        self.updates = torch.zeros((), dtype=torch.float32, device=self.masters[0].device)

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor | None = None, skip: Tensor | None = None) -> None:
        """See `Update`."""
        taken = torch.ones_like(self.updates, dtype=torch.bool) if skip is None else skip == 0
        self.updates += taken
        for i, (master, gradient, buffer, decay) in enumerate(zip(self.masters, self.gradients, self.buffers, self.decays, strict=True)):
            gradient = gradient.to(master.dtype)
            moved = self.momentum * buffer + (gradient if scale is None else gradient / scale.to(master.dtype))
            # A skipped step may have infinite gradients, so `where` selects and nothing is multiplied.
            buffer.copy_(torch.where(taken, moved, buffer))
            master.copy_(torch.where(taken, master * (1.0 - lr * decay) - lr * moved, master))
            if self.copies is not None:
                self.copies[i].copy_(master)


UPDATES: dict[str, Callable[[OptimConfig, ParameterShards, Implementation], Update]] = {"adamw": adamw, "sgd": SGD}
