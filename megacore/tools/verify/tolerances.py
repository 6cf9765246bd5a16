"""Bounds on differences that rounding explains: almost none in fp64; in bf16 what one process shows and arithmetic allows."""

import math

from megacore.tools.verify.compare import ROUTING, Difference
from megacore.tools.verify.replay import EXACT

# fp64 rounds to 1e-16. Some thousand terms summed in another order, through a few blocks and three updates, stay well below this.
BOUND = 1e-9
# In bf16 a layout's error may be this factor times the error of one process in bf16, measured against fp64 on the worst tensor of
# the same kind: rounding errors are random, and a layout rounds each partial sum once more. One unit in the last place is always
# allowed.
BF16_FACTOR, BF16_ULP = 3.0, 2.0**-8
# But one process may itself be wrong, so no bound exceeds what bf16 can cost by arithmetic. A rounding errs by up to 2^-8 of a
# number's size, half the spacing of numbers just above a power of two, and in the mean square by 2^-9. The squares of independent
# errors add. A block rounds about ten tensors forward, and in backward the gradients of these and of their inputs.
ROUNDING, ROUNDINGS = 2.0**-9, 30
# A sum over tokens with much cancellation (a norm's gradient) errs by several times that: 5 times in the worst large tensor of two
# hundred healthy models. A tensor of few elements may also be small by chance: 16 elements erred by 14 times.
SEVERAL, FEW = 8.0, 8.0
FIGURES = 2.0  # losses and norms are sums over all tokens or elements, in which errors cancel: healthy ones erred by 1 at most
# Where gradients travel in bf16, a replay in fp64 rounds the same numbers as the run, but for the last bits of their fp32 sums. These,
# 2^-21 of a number at most, decide the rounding of one in 2^12, which then errs by a unit in bf16's last place, 2^-7 at most.
FLIP, FLIPPED = 2.0**-7, 2.0**-12


class Bounds:
    """The bound of each difference, in a model of `layers`, with `sizes` elements in each parameter.

    `rounds`: gradients travel in bf16.
    `cancelled`: by step and parameter, the factor by which a first moment would be larger if the gradients of its steps did not cancel.
    """

    def __init__(
        self,
        precision: str,
        layers: int,
        sizes: dict[str, int],
        cancelled: dict[tuple[int, str], float],
        *,
        rounds: bool = False,
    ) -> None:
        self.rounds = rounds
        self.exact, self.sizes, self.cancelled = precision == "fp64", sizes, cancelled
        self.typical = (
            math.sqrt(ROUNDINGS * (layers + 1)) * ROUNDING
        )  # the relative error of a gradient in bf16
        self.explained: dict[
            tuple[str, int], float
        ] = {}  # bf16: the largest error of one process, by kind and step

    @property
    def gradient(self) -> float:
        """The bound of a large tensor's gradient in bf16, however wrong one process is."""
        return SEVERAL * self.typical

    def explain(self, differences: list[Difference]) -> None:
        """Takes the differences between one process in bf16 and fp64 as the cost of bf16."""
        for d in differences:
            self.explained[d.kind, d.step] = max(self.explained.get((d.kind, d.step), BF16_ULP), d.relative)

    def of(self, difference: Difference) -> float:
        """The largest difference of this tensor or figure that rounding explains."""
        if self.exact:
            return BOUND
        kind = difference.kind
        if (
            difference.step == 0
        ):  # nothing is computed from first weights yet, which are rounded in the reference too
            return EXACT
        if kind.startswith("own ") or difference.name.startswith("own "):
            if kind == "own gradient" and self.rounds:
                return FLIP * math.sqrt(FLIPPED + FEW / self.sizes[difference.name])
            return 0.0 if kind == "own copy" else EXACT
        explained = BF16_FACTOR * self.explained.get((kind, difference.step), BF16_ULP)
        if kind == "figure":
            return min(explained, FIGURES * self.typical)
        if kind == ROUTING:  # a score errs by as much as the logit that it is made of, which is a few at most
            return min(max(explained, self.typical), self.gradient)
        cap = self.gradient * (1 + FEW / math.sqrt(self.sizes.get(difference.name, 1)))
        if kind == "adam_m":
            cap *= self.cancelled.get((difference.step, difference.name), 1.0)
        # A second moment has squares. If a vector differs from another by a part e of it, their angle has the cosine 1 − e²/2.
        cap, usual = {
            "adam_v": (2 * cap, 2 * self.typical),
            "direction": (cap**2 / 2, self.typical**2 / 2),
        }.get(kind, (cap, self.typical))
        return min(max(explained, BF16_FACTOR * usual), cap)

    def of_activations(self, worst_of_one_process: float) -> float:
        """The bound of activations and their gradients."""
        return BOUND if self.exact else min(BF16_FACTOR * worst_of_one_process, self.gradient)
