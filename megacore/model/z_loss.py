"""The z-loss: the mean square of the logits' log-sum-exp, times `model.z_loss`, which keeps it near zero
(Chowdhery et al. 2022, PaLM).
"""

from functools import cache

from torch import Tensor

from megacore.config import Config
from megacore.model.context import Context
from megacore.model.flow import CROSS_ENTROPY, Loss
from megacore.model.head import Head

Z_LOSS = "z_loss"


class ZLossHead(Head):
    """A head with both losses, computed and differentiated in one go."""

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, ...]:  # type: ignore[override]
        """The sums of both of all targets."""
        assert context.batch.targets is not None
        known = context.gradients.get(CROSS_ENTROPY.name)
        return self.sums(x, context.batch.targets, known, self.losses[-1].coefficient)


def head_of(config: Config) -> type[Head]:
    """The class of a GPT's head."""
    return Head if config.model.z_loss is None else _head_with(config.model.z_loss)


@cache
def _head_with(coefficient: float) -> type[Head]:
    """A head whose z-loss has this coefficient. Both losses are means over the same targets."""
    loss = Loss(Z_LOSS, over=CROSS_ENTROPY.over, coefficient=coefficient, sp=CROSS_ENTROPY.sp)
    return type("ZLossHead", (ZLossHead,), {"losses": (CROSS_ENTROPY, loss)})
