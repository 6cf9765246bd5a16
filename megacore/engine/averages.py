"""Means of the weights, which evaluate in place of those that are trained: by a rule
of their own, or by `optim.ema`.
"""

import torch
from torch import Tensor

from megacore.engine.held_tensors import HeldTensors
from megacore.optimizers.rule import AVERAGE


class WeightAverages:
    """The averages among a rank's state: each beside the master that it is of, and divided as that is."""

    def __init__(self, held: HeldTensors, ema: float | None) -> None:
        """`ema`: the decay rate of those that no rule updates."""
        ranges = zip(held.ranges, held.state[AVERAGE], strict=True)
        self.pairs = [(r.master, average) for r, average in ranges if average is not None]
        self.ema = ema

    @torch.no_grad()
    def update(self, updates: Tensor, skip: Tensor) -> None:
        """Takes the weights of a step into the mean, unless it was skipped;
        `updates` counts those that were not.

        The first weights have no part in it: of t steps the last has ``(1 - ema) / (1 - ema^t)``, as Adam's
        moments without their bias.
        """
        if self.ema is None:
            return
        part = (1 - self.ema) / (1 - self.ema ** updates.double())
        part = torch.where(skip.to(part.device) == 0, part, 0.0)
        for master, average in self.pairs:
            average.lerp_(master, part.to(master))

    @torch.no_grad()
    def begin(self) -> None:
        """Before the first step, the average is the weights."""
        for master, average in self.pairs:
            average.copy_(master)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges masters and averages. Twice is as never, bit by bit."""
        for master, average in self.pairs:
            kept = master.clone()
            master.copy_(average)
            average.copy_(kept)
