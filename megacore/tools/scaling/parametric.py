"""L = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, approach 3), fitted as Besiroglu et al. 2024 do.

The Huber loss of the residuals of log L is summed over runs, and not averaged: an average makes gradients so
small that a minimiser with a usual tolerance ends too early, which is what went wrong in the first estimates.
log L comes by log-sum-exp. The fit begins from Hoffmann's grid of starts. Logarithms of N and D are counted
from their means, which changes nothing but the speed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from megacore.errors import ConfigError
from megacore.tools.scaling.finished import Run
from megacore.tools.scaling.minimise import Array, Numbers, minimise

DELTA = 1e-3  # of the Huber loss
TOLERANCE = 1e-11  # of a gradient's components, where a fit has converged
ITERATIONS = 3000
BEGUN = 300  # starts of the grid that are begun: those of the least loss
FIRST = 40  # iterations of these, behind which the best go on
BEST = 20
GRID = {
    "e": (-1.0, -0.5, 0.0, 0.5, 1.0),
    "log": (0.0, 5.0, 10.0, 15.0, 20.0, 25.0),
    "exponent": (0.0, 0.5, 1.0, 1.5, 2.0),
}
RESAMPLED_STARTS = 6  # of a resampled fit: the best fits of all runs
LEAST_RUNS = 8
LARGEST = 700.0  # logarithm, of a float
LEAST_DIFFERENT = 3  # sizes, and numbers of tokens
TOGETHER = 0.98  # correlation of log N and log D, from which nobody can tell them apart


@dataclass(frozen=True)
class Law:
    """The constants; A and B by their logarithms, because those of a bad fit are too large for a float."""

    E: float
    log_A: float
    log_B: float
    alpha: float
    beta: float

    @property
    def A(self) -> float:
        """The constant itself."""
        return float(np.exp(min(self.log_A, LARGEST)))

    @property
    def B(self) -> float:
        """The constant itself."""
        return float(np.exp(min(self.log_B, LARGEST)))

    def loss(self, parameters: float, tokens: float) -> float:
        """Of a run."""
        terms = self.log_A - self.alpha * math.log(parameters), self.log_B - self.beta * math.log(tokens)
        return self.E + sum(math.exp(min(term, LARGEST)) for term in terms)

    @property
    def exponent(self) -> float:
        """By which the best number of parameters grows with compute; the tokens' is what it lacks to 1."""
        return self.beta / (self.alpha + self.beta)

    def best_parameters(self, compute: float, factor: float) -> float:
        """N of the least loss where compute = factor · N · D."""
        ratio = math.log(self.alpha / self.beta) + self.log_A - self.log_B
        return math.exp(
            min(LARGEST, ratio / (self.alpha + self.beta) + self.exponent * math.log(compute / factor))
        )


@dataclass(frozen=True)
class Fit:
    """A law, those of resampled runs, and each run's residual of log L."""

    law: Law
    resampled: list[Law]
    residuals: list[float]

    def interval(self, of: str, level: float) -> tuple[float, float]:
        """Between which a constant lies in so many of the resampled fits."""
        return between([getattr(law, of) for law in self.resampled], level)

    def predicted(
        self, parameters: float, tokens: float, level: float, seed: int = 0
    ) -> tuple[float, float, float]:
        """A run's loss, and the interval in which it would lie: of resampled laws,
        each with some run's residual.
        """
        source = np.random.default_rng(seed)
        noise = source.choice(self.residuals, len(self.resampled))
        every = [
            law.loss(parameters, tokens) * float(np.exp(own))
            for law, own in zip(self.resampled, noise, strict=True)
        ]
        return self.law.loss(parameters, tokens), *between(every, level)


def between(values: Sequence[float], level: float) -> tuple[float, float]:
    """The interval that holds so many of the values, with as many on each side; nan without any."""
    if not len(values):
        return float("nan"), float("nan")
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def check(runs: Sequence[Run]) -> None:
    """Raises `ConfigError`, saying what is missing, for runs from which five constants do not follow."""
    if len(runs) < LEAST_RUNS:
        raise ConfigError(
            "arguments", f"{len(runs)} runs do not determine five constants", f"at least {LEAST_RUNS}"
        )
    for what, values in (
        ("sizes", [run.parameters for run in runs]),
        ("numbers of tokens", [run.tokens for run in runs]),
    ):
        if len(set(values)) < LEAST_DIFFERENT:
            wrong = (
                f"the runs have {len(set(values))} different {what}: their part of the loss cannot be "
                "told from the rest"
            )
            raise ConfigError("arguments", wrong, f"at least {LEAST_DIFFERENT}")
    n, d = (np.log([getattr(run, name) for run in runs]) for name in ("parameters", "tokens"))
    if abs(float(np.corrcoef(n, d)[0, 1])) > TOGETHER:
        raise ConfigError(
            "arguments",
            "sizes and tokens grow together: nobody can tell what each does",
            "sizes with several numbers of tokens",
        )


def fit(runs: Sequence[Run], samples: int, seed: int = 0) -> Fit:
    """The law of these runs, and of as many resampled sets of them.

    Raises `ConfigError` for runs that do not determine it.
    """
    check(runs)
    n, d, loss = (np.log([getattr(run, name) for run in runs]) for name in ("parameters", "tokens", "loss"))
    means = float(n.mean()), float(d.mean())
    problem = Problem(n - means[0], d - means[1], loss)
    starts, once = problem.starts(means), np.ones((1, len(runs)))
    order = np.argsort(problem.evaluate(starts, once)[0], kind="stable")[:BEGUN]
    points, values = problem.solve(starts[order], once, FIRST)
    order = np.argsort(values, kind="stable")[:BEST]
    points, values = problem.solve(points[order], once, ITERATIONS)
    order = np.argsort(values, kind="stable")
    best = law_of(points[order[0]], means)
    if not (best.alpha > 0 and best.beta > 0):
        name = "N" if best.alpha <= 0 else "D"
        raise ConfigError(
            "arguments",
            f"the loss does not fall with {name} in these runs: they determine no law",
            "runs over a wider range",
        )
    laws = []
    if samples:
        weights = resampled(runs, samples, seed)
        each = points[order[:RESAMPLED_STARTS]]
        many = np.tile(each, (samples, 1))
        points, values = problem.solve(many, np.repeat(weights, len(each), axis=0), ITERATIONS)
        winners = values.reshape(samples, -1).argmin(axis=1) + np.arange(samples) * len(each)
        laws = [law_of(point, means) for point in points[winners]]
    return Fit(best, laws, [float(np.log(run.loss / best.loss(run.parameters, run.tokens))) for run in runs])


def resampled(runs: Sequence[Run], samples: int, seed: int) -> Array:
    """How often each run is in each resampled set, [samples, runs]; only sets that still determine a law."""
    source = np.random.default_rng(seed)
    found: list[Array] = []
    while len(found) < samples:
        counts = source.multinomial(len(runs), [1 / len(runs)] * len(runs))
        own = [run for run, count in zip(runs, counts, strict=True) if count]
        if (
            min(len({run.parameters for run in own}), len({run.tokens for run in own})) >= LEAST_DIFFERENT
            and len(own) >= 5
        ):
            found.append(counts.astype(np.float64))
    return np.array(found)


class Problem:
    """The sum of the Huber losses.

    A point is (log A, log B, log E, alpha, beta), A and B at the runs' mean log N and log D.
    """

    def __init__(self, n: Array, d: Array, loss: Array) -> None:
        self.n, self.d, self.loss = n, d, loss

    def starts(self, means: tuple[float, float]) -> Array:
        """Hoffmann's grid."""
        every = product(GRID["log"], GRID["log"], GRID["e"], GRID["exponent"], GRID["exponent"])
        return np.array(
            [(a - alpha * means[0], b - beta * means[1], e, alpha, beta) for a, b, e, alpha, beta in every]
        )

    def solve(self, starts: Array, weights: Array, iterations: int) -> tuple[Array, Array]:
        """Minima from these starts. `weights`: of the runs, a row for each start or one for all."""

        def objective(points: Array, numbers: Numbers) -> tuple[Array, Array]:
            return self.evaluate(points, weights if len(weights) == 1 else weights[numbers])

        return minimise(objective, starts, TOLERANCE, iterations)

    def evaluate(self, points: Array, weights: Array) -> tuple[Array, Array]:
        """Values and gradients at points [n, 5]."""
        a, b, e, alpha, beta = (points[:, i, None] for i in range(5))
        # [3, points, runs]
        terms = np.stack(
            [a - alpha * self.n, b - beta * self.d, np.broadcast_to(e, (len(points), len(self.n)))]
        )
        most = terms.max(axis=0)
        shares = np.exp(terms - most)
        total = shares.sum(axis=0)
        residual = most + np.log(total) - self.loss
        size = np.abs(residual)
        huber = np.where(size <= DELTA, residual**2 / 2, DELTA * (size - DELTA / 2))
        slope = weights * np.clip(residual, -DELTA, DELTA) * (shares / total)  # [3, points, runs]
        sums = slope.sum(axis=2)
        by_exponent = -(slope[0] * self.n).sum(axis=1), -(slope[1] * self.d).sum(axis=1)
        return (weights * huber).sum(axis=1), np.stack([*sums, *by_exponent], axis=1)


def law_of(point: Array, means: tuple[float, float]) -> Law:
    """The constants of a point."""
    a, b, e, alpha, beta = (float(value) for value in point)
    return Law(math.exp(min(e, LARGEST)), a + alpha * means[0], b + beta * means[1], alpha, beta)
