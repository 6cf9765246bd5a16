"""The scale of an fp16 loss, which grows while nothing overflows (Micikevicius et al. 2018)."""

import torch
from torch import Tensor


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
