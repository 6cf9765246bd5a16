"""AdEMAMix (Pagliardini et al. 2024, The AdEMAMix Optimizer: Better, Faster, Older): AdamW with a
second, slow mean of gradients.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from megacore.optimizers.adamw import AdamWSettings
from megacore.optimizers.rule import ParameterShard, ReferenceStep, Rule, State, register
from megacore.section import NonNegative, Whole

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class AdEMAMixSettings(AdamWSettings):
    """The settings of AdEMAMix: those of AdamW, and those of the slow mean."""

    slow_beta: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.9999, description="ademamix: decay rate of the slow average of gradients"
    )
    slow_alpha: NonNegative = Field(
        8.0, description="ademamix: weight of the slow average in the update; the paper uses 4 to 10"
    )
    slow_warmup: Whole | None = Field(
        None,
        description="ademamix: steps over which `slow_alpha` grows from 0, and `slow_beta` from `beta1`, "
        "to their values; null: `train.steps`; 0: full values from the first step",
    )


@register
class AdEMAMix(Rule[AdEMAMixSettings]):
    """``(m1 / (1 - beta1^t) + alpha · m2) / (sqrt(v / (1 - beta2^t)) + eps)``, with m2 a
    mean over some ten thousand steps.

    With both schedulers of the paper: alpha grows linearly, and beta3 so that the half-life of m2 does.
    """

    name = "ademamix"
    settings_type = AdEMAMixSettings
    kinds = ("ademamix_m", "ademamix_slow", "ademamix_v")
    update_size = "one"

    def direction(self, given: ParameterShard) -> tuple[Tensor, dict[str, Tensor]]:
        own, g, state = self.settings, given.gradient, given.state
        t = given.updates.double()  # 1 - beta3 has few digits in fp32
        done = (t / own.slow_warmup).clamp(max=1.0) if own.slow_warmup else t.clamp(max=1.0)
        inverse = (1 - done) * (1 / math.log(own.beta1) if own.beta1 else 0.0) + done / math.log(
            own.slow_beta
        )
        fast = state["ademamix_m"].lerp(g, 1 - own.beta1)
        # beta3 is never above its last value, also where that is below beta1
        part = (-(1 / inverse).expm1()).clamp(min=1 - own.slow_beta)
        slow = state["ademamix_slow"].lerp(g, part.to(g.dtype))
        squares = state["ademamix_v"].lerp(g * g, 1 - own.beta2)
        size = (squares / (1 - own.beta2**t).to(g.dtype)).sqrt() + own.eps
        mixed = fast / (1 - own.beta1**t).to(g.dtype) + (own.slow_alpha * done).to(g.dtype) * slow
        return mixed / size, {"ademamix_m": fast, "ademamix_slow": slow, "ademamix_v": squares}

    def reference_state(self, step: ReferenceStep) -> State:
        own, g, before = self.settings, step.gradient, step.before
        beta3, part = own.slow_beta, step.number / own.slow_warmup if own.slow_warmup else 1.0
        if part < 1 and own.beta1:
            start, end = math.log(own.beta1), math.log(own.slow_beta)
            beta3 = min(math.exp(start * end / ((1 - part) * end + part * start)), own.slow_beta)
        elif part < 1:
            beta3 = own.slow_beta ** (1 / part)
        return {
            "ademamix_m": own.beta1 * before["ademamix_m"] + (1 - own.beta1) * g,
            "ademamix_slow": beta3 * before["ademamix_slow"] + (1 - beta3) * g,
            "ademamix_v": own.beta2 * before["ademamix_v"] + (1 - own.beta2) * g**2,
        }

    def reference_direction(self, step: ReferenceStep, after: State) -> np.ndarray:
        own, t = self.settings, step.number
        alpha = own.slow_alpha * (min(t / own.slow_warmup, 1.0) if own.slow_warmup else 1.0)
        unbiased = (after["ademamix_v"] / (1 - own.beta2**t)) ** 0.5 + own.eps
        direction: np.ndarray = (
            after["ademamix_m"] / (1 - own.beta1**t) + alpha * after["ademamix_slow"]
        ) / unbiased
        return direction
