"""Muon (Jordan et al. 2024): the momentum of each hidden matrix, made nearly orthogonal by
Newton and Schulz's iteration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from megacore.optimizers.rule import ParameterShard, ReferenceStep, Rule, Shape, State, register
from megacore.section import Fraction, NonNegative, Section

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

# one step makes of a singular value s: a·s + b·s³ + c·s⁵ (Jordan et al. 2024)
A, B, C = 3.4445, -4.7750, 2.0315
Steps = Annotated[int, Field(gt=0, le=64)]
LEAST_NORM = 1e-7  # by which a matrix is divided at least, as in `torch.optim.Muon`


class MuonSettings(Section):
    """The settings of Muon."""

    muon_momentum: Fraction = Field(0.95, description="muon: decay rate of the running average of gradients")
    muon_nesterov: bool = Field(True, description="muon: Nesterov momentum")
    muon_steps: Steps = Field(5, description="muon: Newton-Schulz iterations that orthogonalize the update")
    muon_scale: Literal["original", "match_rms_adamw"] = Field(
        "match_rms_adamw",
        description="muon: scale of an update; original: √(rows / columns), at least 1; match_rms_adamw: "
        "0.2 × √(longer side), for which AdamW's learning rates also fit",
    )
    muon_precision: Literal["auto", "bf16", "fp32", "fp64"] = Field(
        "auto", description="muon: dtype of the Newton-Schulz iterations; auto: bf16, or fp64 in fp64 runs"
    )
    muon_heads: Literal["joined", "apart"] = Field(
        "joined",
        description="muon: orthogonalize all query (or key, or value) heads as one matrix, or each head "
        "separately",
    )
    muon_adamw_lr: NonNegative | None = Field(
        None,
        description="muon: learning rate of AdamW, which updates embeddings, LM head, norms and biases; "
        "null: `optim.lr`",
    )


@register
class Muon(Rule[MuonSettings]):
    """``m = β·m + (1 - β)·g``, and the direction is nearly U·Vᵀ of ``(1 - β)·g + β·m = U·S·Vᵀ``."""

    name = "muon"
    settings_type = MuonSettings
    whole, hidden_only = True, True
    kinds = ("muon_m",)
    others_lr = "muon_adamw_lr"

    @property
    def by_head(self) -> bool:
        return self.settings.muon_heads == "apart"

    @property
    def rounding(self) -> float:
        if self.settings.muon_precision not in ("auto", "bf16"):
            return 0.0
        # Rounding x to bf16 adds noise of up to 2^-9 / sqrt(3) of an element. In the directions of small
        # singular values it grows by A = 3.4 in each of five steps: to 0.14 of an update of 64 x 64.
        return 0.15

    def width_factor(self, hidden: bool, width: float) -> float | None:
        """An update's largest singular value is its scale, and should not depend on the width (Yang, Simon
        and Bernstein 2023): `original` does not, and the root of the longer side grows with the root of the
        width. A head by itself has rows that do not grow.
        """
        if self.by_head or not hidden:
            return None
        return 1.0 if self.settings.muon_scale == "original" else width**-0.5

    def cost(self, shape: Shape) -> float:
        batch, rows, columns = shape
        short, long = min(rows, columns), max(rows, columns)
        return self.settings.muon_steps * batch * (4.0 * short * short * long + 2.0 * short**3)

    def prepare(self, given: ParameterShard) -> tuple[Tensor, dict[str, Tensor]]:
        kept = self.settings.muon_momentum
        new = given.gradient * (1 - kept)
        mean = given.state["muon_m"] * kept + new
        return (mean * kept + new if self.settings.muon_nesterov else mean), {"muon_m": mean}

    def direction(self, given: ParameterShard) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        x = given.gradient
        precision = self.settings.muon_precision
        if precision == "auto":
            precision = "fp64" if x.dtype == torch.float64 else "bf16"
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[precision]
        return (orthogonalised(x, self.settings.muon_steps, dtype) * self._scale(*x.shape[1:])).to(
            x.dtype
        ), {}

    def _scale(self, rows: int, columns: int) -> float:
        original = self.settings.muon_scale == "original"
        return max(1.0, rows / columns) ** 0.5 if original else 0.2 * max(rows, columns) ** 0.5

    def reference_state(self, step: ReferenceStep) -> State:
        before = step.before["muon_m"]
        return {"muon_m": before + (1 - self.settings.muon_momentum) * (step.gradient - before)}

    def reference_direction(self, step: ReferenceStep, after: State) -> np.ndarray:
        """By singular values: the iteration takes each to a polynomial of it, and
        leaves the singular vectors.
        """
        import numpy as np

        kept = self.settings.muon_momentum
        moved = (
            step.gradient + kept * (after["muon_m"] - step.gradient)
            if self.settings.muon_nesterov
            else after["muon_m"]
        )
        u, s, v = np.linalg.svd(moved, full_matrices=False)
        s = s / np.maximum(np.sqrt(np.sum(s**2, axis=1, keepdims=True)), LEAST_NORM)
        for _ in range(self.settings.muon_steps):
            s = A * s + B * s**3 + C * s**5
        rows, columns = step.gradient.shape[1:]
        scale = {
            "match_rms_adamw": 0.2 * np.sqrt(max(rows, columns)),
            "original": max(1, rows / columns) ** 0.5,
        }
        direction: np.ndarray = (u * s[:, None]) @ v * scale[self.settings.muon_scale]
        return direction


def orthogonalised(x: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Nearly U·Vᵀ of each matrix U·S·Vᵀ of ``[batch, rows, columns]``, computed in `dtype`:
    its singular values come near 1.
    """
    flipped = x.shape[1] > x.shape[2]
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp(min=LEAST_NORM)).to(dtype)
    x = x.mT if flipped else x
    for _ in range(steps):
        gram = x @ x.mT
        x = x.baddbmm(gram.baddbmm(gram, gram, beta=B, alpha=C), x, beta=A)
    return x.mT if flipped else x
