"""Lion, EvoLved Sign Momentum (Chen et al. 2023, Symbolic Discovery of Optimization
Algorithms, algorithm 2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from megacore.optimizers.rule import ParameterShard, ReferenceStep, Rule, State, register
from megacore.section import Fraction, Section

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class LionSettings(Section):
    """The settings of Lion."""

    lion_beta1: Fraction = Field(
        0.9,
        description="lion: weight of the running average in the update; 0.95 is usual for language models",
    )
    lion_beta2: Fraction = Field(
        0.99,
        description="lion: decay rate of the running average of gradients; 0.98 is usual for language models",
    )


@register
class Lion(Rule[LionSettings]):
    """The sign of a mean of the gradient and of the running mean *before* this step.

    Every element moves by the whole rate: the paper takes a third to a tenth of AdamW's rate, and as many
    times its weight decay.
    """

    name = "lion"
    settings_type = LionSettings
    kinds = ("lion_m",)
    update_size = "one"

    def direction(self, given: ParameterShard) -> tuple[Tensor, dict[str, Tensor]]:
        mean = given.state["lion_m"]
        stepped = mean.lerp(given.gradient, 1 - self.settings.lion_beta1).sign_()
        return stepped, {"lion_m": mean.lerp(given.gradient, 1 - self.settings.lion_beta2)}

    def reference_state(self, step: ReferenceStep) -> State:
        beta2 = self.settings.lion_beta2
        return {"lion_m": beta2 * step.before["lion_m"] + (1 - beta2) * step.gradient}

    def reference_direction(self, step: ReferenceStep, after: State) -> np.ndarray:
        import numpy as np

        beta1 = self.settings.lion_beta1
        return np.sign(beta1 * step.before["lion_m"] + (1 - beta1) * step.gradient)
