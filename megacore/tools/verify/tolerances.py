"""Bounds on differences that rounding explains: in fp64 almost none, or what the model's own condition
explains; in bf16 what one process shows and arithmetic allows.
"""

import math

from megacore.tools.verify.compare import ORDER, ROUTING, Difference
from megacore.tools.verify.replay import EXACT

# fp64 rounds to 1e-16. Some thousand terms summed in another order, through a few blocks and three updates,
# stay well below this.
BOUND = 1e-9
# A model may magnify rounding to more than that. Its condition is measured: by how much every tensor changes
# if each first weight moves by one unit in the last place. A layout rounds at every sum, not only at the
# weights, and its error is not spread alike, so it may be this many times as far off. The tensors of healthy
# models were 0.2 to 5 times as far off.
CONDITION_FACTOR = 32.0
# No condition explains more: a proof that lets through larger differences proves little.
LARGEST_BOUND = 1e-7
# In bf16 a layout's error may be this factor times the error of one process in bf16, measured against fp64 on
# the worst tensor of the same kind: rounding errors are random, and a layout rounds each partial sum once
# more. One unit in the last place is always allowed.
BF16_FACTOR, BF16_ULP = 3.0, 2.0**-8
# But one process may itself be wrong, so no bound exceeds what bf16 can cost by arithmetic. A rounding errs
# by up to 2^-8 of a number's size, half the spacing of numbers just above a power of two, and in the mean
# square by 2^-9. The squares of independent errors add. A block rounds about ten tensors forward, and in
# backward the gradients of these and of their inputs.
ROUNDING, ROUNDINGS = 2.0**-9, 30
# A sum over tokens with much cancellation (a norm's gradient) errs by several times that: 5 times in the
# worst large tensor of two hundred healthy models. A tensor of few elements may also be small by chance: 16
# elements erred by 14 times.
SEVERAL, FEW = 8.0, 8.0
# losses and norms are sums over all tokens or elements, in which errors cancel: healthy ones erred by 1 at
# most
FIGURES = 2.0
# Where gradients travel in bf16, a replay in fp64 rounds the same numbers as the run, but for the last bits
# of their fp32 sums. These, 2^-21 of a number at most, decide the rounding of one in 2^12, which then errs by
# a unit in bf16's last place, 2^-7 at most.
FLIP, FLIPPED = 2.0**-7, 2.0**-12
# SOAP's bases are eigenvectors, which rounding turns freely where eigenvalues are nearly equal. They are
# proved in fp64, and the verdict of a proof in bf16 says that they are not.
BASES = ("soap_ql", "soap_qr")


class Bounds:
    """The bound of each difference, in a model of `layers`, with `sizes` elements in each parameter.

    `rounds`: gradients travel in bf16.
    `cancelled`: by step and parameter, the factor by which a first moment would be larger if the gradients of
    its steps did not cancel.
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
        # the relative error of a gradient in bf16
        self.typical = math.sqrt(ROUNDINGS * (layers + 1)) * ROUNDING
        # bf16: the largest error of one process, by kind and step
        self.explained: dict[tuple[str, int], float] = {}
        # fp64: the largest change by one unit in the last place of the first weights, by the moment of a run;
        # None if it is not measured
        self.changes: dict[tuple[int, int], float] | None = None

    @property
    def gradient(self) -> float:
        """The bound of a large tensor's gradient in bf16, however wrong one process is."""
        return SEVERAL * self.typical

    def explain(self, differences: list[Difference]) -> None:
        """Takes the differences between one process in bf16 and fp64 as the cost of bf16."""
        for d in differences:
            self.explained[d.kind, d.step] = max(self.explained.get((d.kind, d.step), BF16_ULP), d.relative)

    def take_condition(self, differences: list[Difference]) -> None:
        """Takes the differences between the reference and a reference whose first weights are moved by one
        unit in the last place as the model's condition.
        """
        self.changes = {}
        for d in differences:
            if d.step and math.isfinite(d.relative):
                self.changes[d.moment] = max(self.changes.get(d.moment, 0.0), d.relative)

    def change(self, difference: Difference) -> float:
        """How far one unit in the last place of the first weights moves what a run computes up to this tensor
        or figure; 0 if it is not measured.

        What comes before counts too, because later tensors are computed from it. A figure is one number and
        may change little by chance, so all tensors of its step count.
        """
        last = (difference.step, len(ORDER)) if difference.kind == "figure" else difference.moment
        changes = (self.changes or {}).items()
        return max((change for moment, change in changes if moment <= last), default=0.0)

    def is_rounding(self, difference: Difference) -> bool:
        """In fp64: whether the model's condition explains the difference, however large it is."""
        return difference.relative <= max(BOUND, CONDITION_FACTOR * self.change(difference))

    def of(self, difference: Difference) -> float:
        """The largest difference of this tensor or figure that passes as rounding."""
        if self.exact:
            return min(max(BOUND, CONDITION_FACTOR * self.change(difference)), LARGEST_BOUND)
        kind = difference.kind
        # nothing is computed from first weights yet, which are rounded in the reference too
        if difference.step == 0:
            return EXACT
        if kind.startswith("own ") or difference.name.startswith("own "):
            if kind == "own gradient" and self.rounds:
                return FLIP * math.sqrt(FLIPPED + FEW / self.sizes[difference.name])
            return 0.0 if kind == "own copy" else EXACT
        if kind in BASES:
            return math.inf
        explained = BF16_FACTOR * self.explained.get((kind, difference.step), BF16_ULP)
        if kind == "figure":
            return min(explained, FIGURES * self.typical)
        if kind == ROUTING:  # a score errs by as much as the logit that it is made of, which is a few at most
            return min(max(explained, self.typical), self.gradient)
        cap = self.gradient * (1 + FEW / math.sqrt(self.sizes.get(difference.name, 1)))
        if kind == "adam_m":
            cap *= self.cancelled.get((difference.step, difference.name), 1.0)
        # A second moment has squares. If a vector differs from another by a part e of it, their angle has the
        # cosine 1 − e²/2.
        cap, usual = {
            "adam_v": (2 * cap, 2 * self.typical),
            "direction": (cap**2 / 2, self.typical**2 / 2),
        }.get(kind, (cap, self.typical))
        return min(max(explained, BF16_FACTOR * usual), cap)

    def of_activations(self, worst_of_one_process: float) -> float:
        """The bound of activations and their gradients, by the largest error of one process in bf16, or in
        fp64 the largest change by one unit in the last place of the first weights.
        """
        if self.exact:
            return max(BOUND, CONDITION_FACTOR * worst_of_one_process)
        return min(BF16_FACTOR * worst_of_one_process, self.gradient)
