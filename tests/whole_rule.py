"""An optimizer that needs whole matrices, for tests: momentum, made nearly orthogonal, with a state of another shape than its parameter.

As a user's own file would do, it registers itself when it is read.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field
from torch import Tensor

from megacore.optimizers.rule import ParameterShard, Rule, Shape, State, register
from megacore.section import Fraction, Section

ROUNDS = 3  # of the iteration; more would enlarge the last bits in which layouts differ


class OrthogonalSettings(Section):
    """Its settings."""

    orthogonal_momentum: Fraction = Field(0.9, description="orthogonal: the part of the last update that is added to the next")


@register
class Orthogonal(Rule[OrthogonalSettings]):
    """Newton and Schulz's iteration on each matrix of rows and columns, whose rows are first divided by their usual size."""

    name, settings_type, whole, kinds = "orthogonal", OrthogonalSettings, True, ("orthogonal_m",)

    @classmethod
    def own_state(cls, shape: Shape) -> dict[str, Shape]:
        return {"orthogonal_rows": (shape[0],)}

    @classmethod
    def refuses(cls, shape: Shape) -> str | None:
        return "it is no matrix" if len(shape) < 2 else None

    def direction(self, given: ParameterShard) -> tuple[Tensor, dict[str, Tensor]]:
        assert given.shard.global_shape == given.gradient.shape == given.read_master().shape, f"a piece of {given.name}"
        momentum = self.settings.orthogonal_momentum * given.state["orthogonal_m"] + given.gradient
        flat = momentum.flatten(1)
        rows = given.state["orthogonal_rows"] + flat.square().mean(1)
        x = flat / (rows / given.updates + 1e-12).sqrt().unsqueeze(1)
        x = x / (x.norm() + 1e-12)
        for _ in range(ROUNDS):
            x = 1.5 * x - 0.5 * x @ (x.T @ x)
        return x.view_as(momentum), {"orthogonal_m": momentum, "orthogonal_rows": rows}

    def reference_state(self, before: State, gradient: np.ndarray, step: int) -> State:
        momentum = self.settings.orthogonal_momentum * before["orthogonal_m"] + gradient
        of_rows = np.mean(np.square(momentum.reshape(len(momentum), -1)), axis=1)
        return {"orthogonal_m": momentum, "orthogonal_rows": before["orthogonal_rows"] + of_rows}

    def reference_direction(self, state: State, gradient: np.ndarray, step: int) -> np.ndarray:
        flat = state["orthogonal_m"].reshape(len(gradient), -1)
        x = flat / np.sqrt(state["orthogonal_rows"] / step + 1e-12)[:, None]
        x = x / (np.linalg.norm(x) + 1e-12)
        for _ in range(ROUNDS):
            x = 1.5 * x - 0.5 * (x @ x.T) @ x
        return x.reshape(gradient.shape)
