"""Stochastic gradient descent with momentum (Polyak 1964) and decoupled weight
decay (Loshchilov and Hutter 2019).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from megacore.optimizers.rule import ParameterShard, ReferenceStep, Rule, State, register
from megacore.section import Fraction, Section

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class SGDSettings(Section):
    """The settings of SGD."""

    momentum: Fraction = Field(
        0.9, description="sgd: fraction of the previous update that is added to the next one"
    )


@register
class SGD(Rule[SGDSettings]):
    """The gradient, and a part of the update before: ``b = momentum · b + g``."""

    name = "sgd"
    settings_type = SGDSettings
    kinds = ("momentum",)
    update_size = "gradient"

    def direction(self, given: ParameterShard) -> tuple[Tensor, dict[str, Tensor]]:
        moved = self.settings.momentum * given.state["momentum"] + given.gradient
        return moved, {"momentum": moved}

    def reference_state(self, step: ReferenceStep) -> State:
        return {"momentum": self.settings.momentum * step.before["momentum"] + step.gradient}

    def reference_direction(self, step: ReferenceStep, after: State) -> np.ndarray:
        return after["momentum"]
