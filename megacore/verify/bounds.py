"""How much of a difference is rounding: in fp64 next to nothing, in bf16 what arithmetic allows and one process shows."""

import math

from megacore.verify.compare import Difference
from megacore.verify.replay import EXACT

# fp64 rounds to 1e-16; sums over some thousand terms in another order, through a few blocks and three updates, stay well below.
BOUND = 1e-9
# In bf16 a layout may be as wrong as one process in bf16 is, measured against fp64 at the tensor of the same kind that fares worst,
# up to this factor: rounding errors are random, and a layout rounds each partial sum once more. One unit in the last place is
# always allowed.
BF16_FACTOR, BF16_ULP = 3.0, 2.0**-8
# But one process may itself be wrong, so none of this goes beyond what arithmetic says that bf16 can cost. Each rounding errs by up
# to 2^-9 of a number's size, and independent errors add in squares. In a block some ten tensors are rounded forward, and in
# backward their gradients and those of what they were made of.
ROUNDING, ROUNDINGS = 2.0**-9, 30
# What is a sum over tokens in which much cancels (a norm's gradient) is off by several times that: in two hundred healthy models, the
# worst large tensor by 5 times. One of few elements may besides be small as a whole by chance: 16 elements were off by 14 times.
SEVERAL, FEW = 8.0, 8.0
FIGURES = 2.0  # losses and norms are sums over all tokens or elements, in which errors cancel: healthy ones were off by 1 at most


class Bounds:
    """What each difference may be, in a model of `layers`, with the elements of each parameter.

    `cancelled`: by step and parameter, how much larger a first moment would be if the gradients of its steps did not cancel.
    """

    def __init__(self, precision: str, layers: int, sizes: dict[str, int], cancelled: dict[tuple[int, str], float]) -> None:
        self.exact, self.sizes, self.cancelled = precision == "fp64", sizes, cancelled
        self.typical = math.sqrt(ROUNDINGS * (layers + 1)) * ROUNDING  # the relative error of a gradient in bf16
        self.explained: dict[tuple[str, int], float] = {}  # bf16: the largest error of one process, by kind and step

    @property
    def gradient(self) -> float:
        """What a large tensor's gradient may be off by in bf16, whatever one process is."""
        return SEVERAL * self.typical

    def explain(self, differences: list[Difference]) -> None:
        """Takes the differences of one process in bf16 from fp64 for what bf16 costs."""
        for d in differences:
            self.explained[d.kind, d.step] = max(self.explained.get((d.kind, d.step), BF16_ULP), d.relative)

    def of(self, difference: Difference) -> float:
        """The largest difference of this tensor or figure that is rounding."""
        if self.exact:
            return BOUND
        kind = difference.kind
        if kind.startswith("own ") or difference.name.startswith("own "):
            return 0.0 if kind == "own copy" else EXACT
        explained = BF16_FACTOR * self.explained.get((kind, difference.step), BF16_ULP)
        if kind == "figure":
            return min(explained, FIGURES * self.typical)
        cap = self.gradient * (1 + FEW / math.sqrt(self.sizes.get(difference.name, 1)))
        if kind == "adam_m":
            cap *= self.cancelled.get((difference.step, difference.name), 1.0)
        # A second moment is of squares. Vectors of which one is off by a part e of the other form an angle with the cosine 1 − e²/2.
        cap, usual = {"adam_v": (2 * cap, 2 * self.typical), "direction": (cap**2 / 2, self.typical**2 / 2)}.get(kind, (cap, self.typical))
        return min(max(explained, BF16_FACTOR * usual), cap)

    def of_activations(self, worst_of_one_process: float) -> float:
        """The same of activations and their gradients."""
        return BOUND if self.exact else min(BF16_FACTOR * worst_of_one_process, self.gradient)
