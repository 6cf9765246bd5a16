"""SOAP (Vyas et al. 2024, Improving and Stabilizing Shampoo using Adam, algorithm 3): Adam in the
eigenbasis of Shampoo's matrices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from megacore.optimizers.rule import ParameterShard, ReferenceStep, Rule, Shape, State, register
from megacore.section import Epsilon, Fraction, NonNegative, Section

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

# of the mean eigenvalue, added to all: where gradients have no direction, the basis stays; else rounding
# would choose one
SHIFT = 1e-3


class SOAPSettings(Section):
    """The settings of SOAP."""

    soap_beta1: Fraction = Field(0.95, description="soap: decay rate of the first moment")
    soap_beta2: Fraction = Field(
        0.95,
        description="soap: decay rate of the second moment, and of the matrices whose eigenvectors are "
        "the basis",
    )
    soap_eps: Epsilon = Field(1e-8, description="soap: added to the square root of the second moment")
    soap_adamw_lr: NonNegative | None = Field(
        None,
        description="soap: learning rate of AdamW, which updates all parameters that are not hidden "
        "matrices; null: `optim.lr`",
    )


@register
class SOAP(Rule[SOAPSettings]):
    """The first moment over the root of the second, in a basis that follows the eigenvectors
    of the means of G·Gᵀ and Gᵀ·G.

    The basis is renewed in every step by one step of orthogonal iteration, from that of AdamW on. So the
    first step is AdamW's.
    """

    name = "soap"
    settings_type = SOAPSettings
    whole, hidden_only = True, True
    others_lr = "soap_adamw_lr"
    update_size = "one"

    @property
    def rounding(self) -> float:
        return float("inf")  # directions of nearly equal singular values turn with the last bit

    def own_state(self, shape: Shape) -> dict[str, Shape]:
        batch, rows, columns = shape
        left, right = (batch, rows, rows), (batch, columns, columns)
        return {
            "soap_m": shape,
            "soap_v": shape,
            "soap_l": left,
            "soap_r": right,
            "soap_ql": left,
            "soap_qr": right,
        }

    def cost(self, shape: Shape) -> float:
        batch, rows, columns = shape
        return batch * (10.0 * rows * columns * (rows + columns) + 6.0 * (rows**3 + columns**3))

    def direction(self, given: ParameterShard) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        own, g, t, state = self.settings, given.gradient, given.updates, given.state
        left, right = (
            torch.eye(q.shape[1], dtype=g.dtype, device=g.device).where(t <= 1, q)
            for q in (state["soap_ql"], state["soap_qr"])
        )

        def renewed(mean: Tensor, q: Tensor) -> Tensor:
            shift = SHIFT * mean.diagonal(dim1=1, dim2=2).mean(1)
            found, r = torch.linalg.qr(mean @ q + shift[:, None, None] * q)
            return found * torch.where(r.diagonal(dim1=1, dim2=2) < 0, -1.0, 1.0).to(g.dtype).unsqueeze(1)

        def mean(kind: str, new: Tensor) -> Tensor:
            return own.soap_beta2 * state[kind] + (1 - own.soap_beta2) * new

        first = own.soap_beta1 * state["soap_m"] + (1 - own.soap_beta1) * g
        second, of_rows, of_columns = (
            mean("soap_v", (left.mT @ g @ right).square()),
            mean("soap_l", g @ g.mT),
            mean("soap_r", g.mT @ g),
        )
        size = (second / (1 - own.soap_beta2**t)).sqrt() + own.soap_eps
        direction = left @ (left.mT @ first @ right / (1 - own.soap_beta1**t) / size) @ right.mT
        bases = {"soap_ql": renewed(of_rows, left), "soap_qr": renewed(of_columns, right)}
        return direction, {
            "soap_m": first,
            "soap_v": second,
            "soap_l": of_rows,
            "soap_r": of_columns,
            **bases,
        }

    def reference_state(self, step: ReferenceStep) -> State:
        import numpy as np

        own, g, (left, right), before = self.settings, step.gradient, self._bases(step), step.before
        squares = {"soap_v": np.einsum("bik,bij,bjl->bkl", left, g, right) ** 2}
        squares |= {"soap_l": np.stack([x @ x.T for x in g]), "soap_r": np.stack([x.T @ x for x in g])}
        after = {
            kind: own.soap_beta2 * before[kind] + (1 - own.soap_beta2) * new for kind, new in squares.items()
        }
        after["soap_m"] = own.soap_beta1 * before["soap_m"] + (1 - own.soap_beta1) * g
        for side, basis in (("l", left), ("r", right)):
            mean = after[f"soap_{side}"]
            shifted = mean + SHIFT * np.trace(mean, axis1=1, axis2=2)[:, None, None] / mean.shape[1] * np.eye(
                mean.shape[1]
            )
            q, r = np.linalg.qr(shifted @ basis)
            after[f"soap_q{side}"] = q * np.where(np.diagonal(r, axis1=1, axis2=2) < 0, -1, 1)[:, None]
        return after

    def reference_direction(self, step: ReferenceStep, after: State) -> np.ndarray:
        import numpy as np

        own, (left, right) = self.settings, self._bases(step)
        turned = np.einsum("bik,bij,bjl->bkl", left, after["soap_m"], right) / (
            1 - own.soap_beta1**step.number
        )
        scaled = turned / ((after["soap_v"] / (1 - own.soap_beta2**step.number)) ** 0.5 + own.soap_eps)
        direction: np.ndarray = np.einsum("bik,bkl,bjl->bij", left, scaled, right)
        return direction

    def _bases(self, step: ReferenceStep) -> list[np.ndarray]:
        """For the proof: the basis of each side; the unit vectors before the first step."""
        import numpy as np

        found = (step.before["soap_ql"], step.before["soap_qr"])
        return [q if step.number > 1 else np.broadcast_to(np.eye(q.shape[1]), q.shape) for q in found]
