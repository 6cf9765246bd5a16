"""AdamW (Loshchilov and Hutter 2019), by the fused kernel in `kernels/adamw.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from megacore.optimizers.rule import ParameterShards, ReferenceStep, Rule, State, Update, register
from megacore.section import Epsilon, Fraction, Section

if TYPE_CHECKING:
    import numpy as np

    from megacore.kernels.dispatch import Implementation


class AdamWSettings(Section):
    """The settings of AdamW."""

    beta1: Fraction = Field(0.9, description="adamw: decay rate of the first moment")
    beta2: Fraction = Field(0.95, description="adamw: decay rate of the second moment")
    eps: Epsilon = Field(1e-8, description="adamw: added to the square root of the second moment")


@register
class AdamW(Rule[AdamWSettings]):
    """The first moment over the root of the second, both without their bias."""

    name = "adamw"
    settings_type = AdamWSettings
    kinds = ("adam_m", "adam_v")
    update_size = "one"

    def fused(self, tensors: ParameterShards, implementation: Implementation) -> Update:
        from megacore.kernels.adamw import AdamW as FusedAdamW

        return FusedAdamW(
            tensors.masters,
            tensors.gradients,
            tensors.states["adam_m"],
            tensors.states["adam_v"],
            weight_decay=tensors.decays,
            beta1=self.settings.beta1,
            beta2=self.settings.beta2,
            eps=self.settings.eps,
            copies=tensors.copies,
            implementation=implementation,
        )

    def reference_state(self, step: ReferenceStep) -> State:
        beta1, beta2 = self.settings.beta1, self.settings.beta2
        first = beta1 * step.before["adam_m"] + (1 - beta1) * step.gradient
        return {"adam_m": first, "adam_v": beta2 * step.before["adam_v"] + (1 - beta2) * step.gradient**2}

    def reference_direction(self, step: ReferenceStep, after: State) -> np.ndarray:
        unbiased = (after["adam_v"] / (1 - self.settings.beta2**step.number)) ** 0.5 + self.settings.eps
        direction: np.ndarray = after["adam_m"] / (1 - self.settings.beta1**step.number) / unbiased
        return direction
