"""A user's own file (`model.source`) whose layers declare what self-checks must know: a gradient that is not
that of forward, a tensor without a gradient, a loss that is not additive, another result in training.
"""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from megacore.config import Config
from megacore.model.block import Block
from megacore.model.context import Context
from megacore.model.flow import HIDDEN, Flow, Loss
from megacore.model.gpt import gpt
from megacore.model.layers import Layers, LayerSpec


class Rounded(Block):
    """A block whose result is rounded to 1/64, with a straight-through gradient."""

    surrogate_gradient = True

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """See `Block`."""
        y = super().forward(x, context)
        return y + ((64 * y).round() / 64 - y).detach()


class Handing(Block):
    """A block that also hands on its input, to be read without a gradient."""

    writes: ClassVar[Mapping[str, Flow]] = {"hidden": HIDDEN, "seen": Flow(gradient=False)}

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """See `Block`."""
        return super().forward(x, context), x


class Reading(Block):
    """A block with a loss over the whole microbatch, which multiplies by what another block handed on."""

    reads = ("hidden", "seen")
    losses = (Loss("spread", coefficient=0.1, additive=False),)
    differs_in_training = True

    def forward(self, x: Tensor, seen: Tensor, context: Context) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """See `Block`."""
        y = super().forward(x * (1 + seen.tanh()), context)
        return y * (1.1 if self.training else 1.0), y.var()


KINDS = (Rounded, Handing, Reading)


def layers(config: Config) -> Layers:
    """A GPT's, with one block of each kind before its head."""
    first, *blocks, last = gpt(config)
    own = [LayerSpec(f"blocks.{i}", kind, (i,)) for i, kind in enumerate(KINDS, len(blocks) - len(KINDS))]
    return [first, *blocks[: -len(KINDS)], *own, last]
