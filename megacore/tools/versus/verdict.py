"""What runs of two models over the same seeds say: the difference of their losses, and how sure it is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

import numpy as np

SHARE = 0.95  # of the intervals
GRID = 20_001


def t_quantile(share: float, degrees: int) -> float:
    """The number within which, on both sides of 0, Student's t distribution has this share.

    With x = √n · tan θ its density is proportional to cos(θ) to the power n - 1, which is summed here.
    """
    angles = np.linspace(0, math.pi / 2, GRID)
    density = np.cos(angles) ** (degrees - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(degrees) * math.tan(float(np.interp(share * below[-1], below, angles)))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and how far to both sides of it the true one lies with `SHARE`, if values are normally
    distributed (Student 1908). Infinitely far for one value, or where one is not finite.
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return fmean(values), math.inf
    return fmean(values), t_quantile(SHARE, len(values) - 1) * stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class Curve:
    """A run: the tokens that it had read at each logged step, the losses there, and what it is judged by."""

    tokens: list[int]
    losses: list[float]
    final: float
    seconds: float  # of a step, in the median

    def smooth(self, width: int) -> list[float]:
        """At each logged step the mean of the last so many losses."""
        return [fmean(self.losses[max(0, at + 1 - width) : at + 1]) for at in range(len(self.losses))]


@dataclass(frozen=True)
class Verdict:
    """Idea against other, a pair for each seed: both read the same samples in the same order."""

    idea: str
    other: str
    differences: list[float]  # idea's final loss less the other's
    # the part of the other's tokens after which the idea has the other's last training loss
    reached: list[float | None]

    @property
    def mean(self) -> float:
        """Of the differences; below 0 the idea is better."""
        return interval(self.differences)[0]

    @property
    def half(self) -> float:
        """Half the width of their interval."""
        return interval(self.differences)[1]

    @property
    def sure(self) -> bool:
        """Whether the difference is more than noise."""
        return abs(self.mean) > self.half

    def lines(self) -> list[str]:
        """It in words."""
        pairs = len(self.differences)
        if not all(map(math.isfinite, self.differences)):
            return [
                f"A run of {self.idea} or {self.other} diverged, so their losses cannot be compared: try "
                "lower --rates."
            ]
        if pairs < 2:
            return [
                f"{self.idea} - {self.other}: {self.mean:+.4f} nats a token. One seed says nothing about "
                "noise: --seeds 5."
            ]
        range_ = (
            f"{self.mean - self.half:+.4f} to {self.mean + self.half:+.4f} with {SHARE:.0%}, {pairs} pairs"
        )
        said = f"{self.idea} - {self.other}: {self.mean:+.4f} nats a token ({range_})."
        better = "better" if self.mean < 0 else "worse"
        found = [
            said,
            f"So {self.idea} is {better}, by more than noise."
            if self.sure
            else "That is no more than noise.",
        ]
        if self.mean < 0 and self.sure:
            found.append(self.reach())
        return found

    def reach(self) -> str:
        """After how many tokens the idea is where the other ends."""
        there = [part for part in self.reached if part is not None]
        if not there:
            return f"Its training loss reaches {self.other}'s last one in no pair."
        missing = f", not in {len(self.reached) - len(there)} pairs" if len(there) < len(self.reached) else ""
        return (
            f"It reaches {self.other}'s last training loss after {median(there):.0%} of the tokens"
            f" ({min(there):.0%} to {max(there):.0%}{missing})."
        )


def compare(idea: str, other: str, pairs: Sequence[tuple[Curve, Curve]], width: int) -> Verdict:
    """The verdict of pairs of runs, (idea, other). Training losses are means of `width` logged ones."""
    return Verdict(
        idea,
        other,
        [own.final - theirs.final for own, theirs in pairs],
        [reached(*pair, width) for pair in pairs],
    )


def reached(own: Curve, theirs: Curve, width: int) -> float | None:
    """The part of the other's tokens after which a run has the other's last
    training loss; None if it never has.
    """
    goal = theirs.smooth(width)[-1]
    return next(
        (
            t / theirs.tokens[-1]
            for t, loss in zip(own.tokens, own.smooth(width), strict=True)
            if loss <= goal
        ),
        None,
    )
