"""An optimizer that needs whole matrices, for tests: momentum, made nearly orthogonal, with a state of
another shape than its parameter.

As a user's own file would do, it registers itself when it is read.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field
from torch import Tensor

from megacore.optimizers.rule import ParameterShard, ReferenceStep, Rule, Shape, State, register
from megacore.section import Fraction, Section

ROUNDS = 3  # of the iteration; more would enlarge the last bits in which layouts differ


class OrthogonalSettings(Section):
    """Its settings."""

    orthogonal_momentum: Fraction = Field(
        0.9, description="orthogonal: the part of the last update that is added to the next"
    )


@register
class Orthogonal(Rule[OrthogonalSettings]):
    """Newton and Schulz's iteration on each matrix of rows and columns, whose rows are
    first divided by their usual size.
    """

    name, settings_type, whole, kinds = "orthogonal", OrthogonalSettings, True, ("orthogonal_m",)

    def own_state(self, shape: Shape) -> dict[str, Shape]:
        return {"orthogonal_rows": shape[:2]}

    def prepare(self, given: ParameterShard) -> tuple[Tensor, dict[str, Tensor]]:
        momentum = self.settings.orthogonal_momentum * given.state["orthogonal_m"] + given.gradient
        return momentum, {"orthogonal_m": momentum}

    def direction(self, given: ParameterShard) -> tuple[Tensor, dict[str, Tensor]]:
        rows = given.state["orthogonal_rows"] + given.gradient.square().mean(2)
        x = given.gradient / (rows / given.updates + 1e-12).sqrt().unsqueeze(2)
        x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-12)
        for _ in range(ROUNDS):
            x = 1.5 * x - 0.5 * x @ (x.mT @ x)
        return x, {"orthogonal_rows": rows}

    def reference_state(self, step: ReferenceStep) -> State:
        momentum = self.settings.orthogonal_momentum * step.before["orthogonal_m"] + step.gradient
        return {
            "orthogonal_m": momentum,
            "orthogonal_rows": step.before["orthogonal_rows"] + np.mean(np.square(momentum), axis=2),
        }

    def reference_direction(self, step: ReferenceStep, after: State) -> np.ndarray:
        found = []
        for momentum, rows in zip(after["orthogonal_m"], after["orthogonal_rows"], strict=True):
            x = momentum / np.sqrt(rows / step.number + 1e-12)[:, None]
            x = x / (np.linalg.norm(x) + 1e-12)
            for _ in range(ROUNDS):
                x = 1.5 * x - 0.5 * (x @ x.T) @ x
            found.append(x)
        return np.stack(found)
