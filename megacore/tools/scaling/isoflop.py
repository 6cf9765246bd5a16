"""Runs of equal compute: a parabola of the loss over log N in each group, and power laws through the minima
(Hoffmann et al. 2022, approach 2).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megacore.errors import ConfigError
from megacore.tools.scaling.finished import Run
from megacore.tools.scaling.minimise import Array
from megacore.tools.scaling.parametric import between

WIDTH = 1.1  # between the most and the least compute of a group
LEAST_SIZES = 4  # in a group: a parabola goes through any three
LEAST_GROUPS = 3


@dataclass(frozen=True)
class Group:
    """Runs of equal compute, their parabola over log N, and its minimum."""

    flops: float
    runs: list[Run]
    parabola: tuple[float, float, float]  # of log N: squared, linear, constant
    parameters: float
    tokens: float

    def loss(self, parameters: float) -> float:
        """On the parabola."""
        return float(np.polyval(self.parabola, np.log(parameters)))


@dataclass(frozen=True)
class Power:
    """factor · C^exponent."""

    factor: float
    exponent: float

    def at(self, compute: float) -> float:
        """The value at a compute."""
        return float(self.factor * compute**self.exponent)


@dataclass(frozen=True)
class IsoFlop:
    """The groups, N and D of the least loss as power laws of compute, and those of resampled runs."""

    groups: list[Group]
    parameters: Power
    tokens: Power
    resampled: list[tuple[Power, Power]]

    def interval(self, which: int, level: float) -> tuple[float, float]:
        """Of the exponent of N (0) or D (1)."""
        return between([powers[which].exponent for powers in self.resampled], level)


def grouped(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs by compute, those together that differ by no more than `WIDTH`; only groups of enough sizes."""
    groups: list[list[Run]] = []
    for run in sorted(runs, key=lambda run: run.flops):
        if groups and run.flops <= WIDTH * groups[-1][0].flops:
            groups[-1].append(run)
        else:
            groups.append([run])
    return [group for group in groups if len({run.parameters for run in group}) >= LEAST_SIZES]


def fit(runs: Sequence[Run], samples: int, seed: int = 0) -> IsoFlop:
    """The power laws of these runs, and of as many resampled sets of them.

    Raises `ConfigError`, saying what is missing.
    """
    candidates = grouped(runs)
    groups = [group for own in candidates if (group := parabola(own)) is not None]
    if len(groups) < LEAST_GROUPS:
        flat = len(candidates) - len(groups)
        inside = f"; {flat} more have no minimum between their sizes" if flat else ""
        wrong = (
            f"{len(groups)} groups of equal compute (within {WIDTH - 1:.0%}) have {LEAST_SIZES} sizes "
            f"and a minimum between them{inside}"
        )
        raise ConfigError(
            "arguments", wrong, f"at least {LEAST_GROUPS}, with sizes on both sides of each minimum"
        )
    kept = [group.runs for group in groups]
    source = np.random.default_rng(seed)
    found = []
    for _ in range(samples):
        own = [group for runs in kept if (group := redrawn(runs, source)) is not None]
        if len(own) >= 2:
            found.append(powers(own))
    return IsoFlop(groups, *powers(groups), found)


def redrawn(runs: list[Run], source: np.random.Generator) -> Group | None:
    """The group of as many runs drawn from these; None if they have no minimum."""
    drawn = [runs[i] for i in source.integers(len(runs), size=len(runs))]
    return parabola(drawn, anywhere=True) if len({run.parameters for run in drawn}) >= 3 else None


def parabola(runs: list[Run], *, anywhere: bool = False) -> Group | None:
    """A group's parabola; None if it has no minimum between the smallest and the largest
    size, or with `anywhere` none at all.
    """
    n: Array = np.log([run.parameters for run in runs])
    middle = float(n.mean())
    a, b, c = (float(x) for x in np.polyfit(n - middle, [run.loss for run in runs], 2))
    if a <= 0:
        return None
    at = middle - b / (2 * a)
    if not anywhere and not n.min() <= at <= n.max():
        return None
    at = float(np.clip(at, n.min() - 1, n.max() + 1))
    flops = float(np.exp(np.mean(np.log([run.flops for run in runs]))))
    # Compute a parameter and token, which differs a little from size to size, at the minimum.
    rate = float(
        np.exp(
            np.polyval(
                np.polyfit(n, np.log([run.flops / run.parameters / run.tokens for run in runs]), 1), at
            )
        )
    )
    return Group(
        flops,
        runs,
        (a, b - 2 * a * middle, c - b * middle + a * middle**2),
        float(np.exp(at)),
        flops / rate / float(np.exp(at)),
    )


def powers(groups: Sequence[Group]) -> tuple[Power, Power]:
    """Least squares in logarithms through the minima."""
    compute = np.log([group.flops for group in groups])
    lines = [
        np.polyfit(compute, np.log([getattr(group, name) for group in groups]), 1)
        for name in ("parameters", "tokens")
    ]
    return Power(float(np.exp(lines[0][1])), float(lines[0][0])), Power(
        float(np.exp(lines[1][1])), float(lines[1][0])
    )
