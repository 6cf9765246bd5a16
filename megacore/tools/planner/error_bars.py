"""How far measured steps lie from predicted ones, by kind of run: its size, and whether
its pipeline crosses machines.

Of public runs most take about as long as predicted, and some stall: they take `STALL` times as long or more,
which no term explains.
So a prediction has a distribution: the share that stalls, how long those take, and a bar around the others
and one around all. `errors.json` has the measured over the predicted time of each row, by framework, model
and kind
(`python -m benchmarks.planner --output PREFIX` writes it). megacore itself has not been measured on
a GPU: its bars are those of the frameworks that were.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median, quantiles
from typing import Any

FILE = Path(__file__).with_name("errors.json")
SHARE = 0.8  # of the runs lie within a bar
TAIL_STEP = 0.005  # in which tails are counted
STALL = 1.5  # times its prediction, from which a run counts as stalled
# the most devices of each
SIZES = {"on one machine": 8, "on 9 to 64 devices": 64, "on more than 64 devices": 1 << 30}
ACROSS = " with a pipeline across machines"
Kind = tuple[str, bool]  # the size in words, and whether the pipeline crosses machines
KINDS: tuple[Kind, ...] = tuple(
    (size, across) for size in SIZES for across in (False, True) if not across or size != next(iter(SIZES))
)
Ratios = dict[str, dict[str, dict[str, list[float]]]]  # by framework, model, and devices with `ACROSS`
Interval = tuple[float, float]


@dataclass(frozen=True)
class Bar:
    """How the measured steps of a kind of run lie around their predictions, in multiples of these."""

    low: float  # `SHARE` of all lie between these two
    high: float
    runs: int
    kind: str
    usual: Interval  # of those that did not stall
    stalled: float  # the share that did
    stall: float = 0.0  # how long the median one of those took
    where: tuple[str, ...] = ()  # the frameworks whose runs did

    def __str__(self) -> str:
        whole = (
            f"{SHARE:.0%} of {self.runs:,} measured runs ({self.kind}) differ from the prediction by "
            f"{self.low - 1:+.0%} … {self.high - 1:+.0%}"
        )
        if self.stalled < 0.01:
            return whole
        others = f"{SHARE:.0%} of the others by {self.usual[0] - 1:+.0%} … {self.usual[1] - 1:+.0%}"
        slow = (
            f"{self.stalled:.0%}, only runs of {' and '.join(self.where)}, stalled and took {self.stall:.1f} "
            "times the prediction (median)"
        )
        return f"{whole}; {slow}; {others}"

    def around(self, value: float) -> str:
        """The bar of a predicted value."""
        return f"{self.low * value:.4g} to {self.high * value:.4g}"

    def ties(self, seconds: float, others: float) -> bool:
        """Whether each of two predictions lies within the bar of the other, if neither stalls."""
        (low, high), (less, more) = self.usual, sorted((seconds, others))
        return more <= high * less and less >= low * more


def kind_of(devices: int, across: bool) -> Kind:
    """A run's kind. No pipeline crosses machines where there is one."""
    size = next(size for size, most in SIZES.items() if devices <= most)
    return size, across and (size, True) in KINDS


def named(kind: Kind) -> str:
    """A kind in words."""
    size, across = kind
    return size + (
        ACROSS if across else ", none with a pipeline across machines" if (size, True) in KINDS else ""
    )


def key_of(devices: int, across: bool) -> str:
    """Under what the file has runs on so many devices."""
    return f"{devices}{ACROSS if across else ''}"


def interval(ratios: Sequence[float], tail: float = (1 - SHARE) / 2) -> Interval:
    """The bar of these runs: their outer tails lie outside."""
    parts = quantiles(ratios, n=round(1 / TAIL_STEP), method="inclusive")
    at = round(tail / TAIL_STEP)
    return parts[at - 1], parts[-at]


@cache
def recorded() -> dict[str, Any]:
    """What the scoreboard has written."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def of_kind(kind: Kind, ratios: Ratios) -> list[float]:
    """Those of all runs of a kind."""
    own = (runs for models in ratios.values() for by_key in models.values() for runs in by_key.items())
    return [ratio for key, found in own if parsed(key) == kind for ratio in found]


def parsed(key: str) -> Kind:
    """The kind of the runs that the file has under a key."""
    devices, _, rest = key.partition(" ")
    return kind_of(int(devices), bool(rest))


@cache
def bar(devices: int, pipeline: int, host_ranks: int) -> Bar:
    """The bar of a step that is predicted for so many devices, of which a machine has
    `host_ranks`, and as long a pipeline.
    """
    kind = kind_of(devices, pipeline > 1 and devices > host_ranks)
    found, tail = recorded()["measured over predicted"], recorded()["tails"][kind[0]]
    ratios = of_kind(kind, found)
    slow = [ratio for ratio in ratios if ratio >= STALL]
    usual = interval([ratio for ratio in ratios if ratio < STALL], tail)
    where = tuple(
        name for name, own in found.items() if max(of_kind(kind, {name: own}), default=0.0) >= STALL
    )
    return Bar(
        *interval(ratios, tail),
        len(ratios),
        named(kind),
        usual,
        len(slow) / len(ratios),
        median(slow or [0.0]),
        where,
    )
