"""Schedule-free AdamW (Defazio et al. 2024, The Road Less Scheduled, algorithm 1): an average of
weights in place of a decaying rate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from megacore.optimizers.rule import AVERAGE, ParameterShard, ReferenceStep, Rule, State, register
from megacore.section import Epsilon, Fraction, Section

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class ScheduleFreeSettings(Section):
    """The settings of schedule-free AdamW."""

    free_beta1: Fraction = Field(
        0.9,
        description="schedule_free: weight of the averaged weights in the interpolation at which "
        "gradients are taken",
    )
    free_beta2: Fraction = Field(0.999, description="schedule_free: decay rate of the second moment")
    free_eps: Epsilon = Field(
        1e-8, description="schedule_free: added to the square root of the second moment"
    )


@register
class ScheduleFree(Rule[ScheduleFreeSettings]):
    """AdamW without momentum moves z.

    The average x of all z is what to evaluate. Gradients are taken, and weights decay, between both.

    The parameter is ``y = (1 - beta1) · z + beta1 · x``, and x is kept as state. A step counts in the average
    by the square of its rate. Use it with ``optim.schedule=constant`` and a warm-up.
    """

    name = "schedule_free"
    settings_type = ScheduleFreeSettings
    kinds = (AVERAGE, "free_v")
    update_size = "one"
    numbers = ("free_sum",)  # of the squares of all rates

    def direction(self, given: ParameterShard) -> tuple[Tensor, dict[str, Tensor]]:
        own, y, dtype = self.settings, given.read_master(), given.gradient.dtype
        x = y.where(given.updates <= 1, given.state[AVERAGE])
        apart = (y - x) / (1 - own.free_beta1)  # z - x
        squares = given.state["free_v"].lerp(given.gradient.square(), 1 - own.free_beta2)
        unbiased = (1 - own.free_beta2 ** given.updates.double()).sqrt()  # times the given rate: the paper's
        total = given.state["free_sum"] + ((given.rate * unbiased) ** 2).to(dtype)
        # times the given rate: this step's part in the average
        share = given.rate * unbiased**2 / total.double().clamp(min=1e-300)
        part, share = (given.rate * share).to(dtype), share.to(dtype)
        moved = unbiased.to(dtype) * (
            given.gradient / (squares.sqrt() + own.free_eps) + given.weight_decay * y
        )
        direction = (
            (1 - own.free_beta1 * (1 - part)) * moved
            - own.free_beta1 * share * apart
            - given.weight_decay * y
        )
        return direction, {
            AVERAGE: x + part * (apart - given.rate * moved),
            "free_v": squares,
            "free_sum": total,
        }

    def reference_state(self, step: ReferenceStep) -> State:
        squares = (
            self.settings.free_beta2 * step.before["free_v"]
            + (1 - self.settings.free_beta2) * step.gradient**2
        )
        total = step.before["free_sum"] + self._rate(step) ** 2
        return {AVERAGE: self._moved(step, squares, total)[1], "free_v": squares, "free_sum": total}

    def reference_direction(self, step: ReferenceStep, after: State) -> np.ndarray:
        z, x = self._moved(step, after["free_v"], after["free_sum"])
        y = (1 - self.settings.free_beta1) * z + self.settings.free_beta1 * x
        return ((1 - step.rate * step.weight_decay) * step.weights - y) / (step.rate or 1.0)

    def _rate(self, step: ReferenceStep) -> float:
        rate: float = step.rate * (1 - self.settings.free_beta2**step.number) ** 0.5
        return rate

    def _moved(
        self, step: ReferenceStep, squares: np.ndarray, total: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """For the proof: z and x after the step, as the paper writes them."""
        own, y, rate = self.settings, step.weights, self._rate(step)
        x = y if step.number == 1 else step.before[AVERAGE]
        z = (y - own.free_beta1 * x) / (1 - own.free_beta1)
        z = z - rate * step.gradient / (squares**0.5 + own.free_eps) - rate * step.weight_decay * y
        part = rate**2 / total if rate else 0.0
        return z, (1 - part) * x + part * z
