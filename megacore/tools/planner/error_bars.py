"""How far measured steps lie from predicted ones, by size of run: what of the public table nothing was fitted to.

`errors.json` has the measured over the predicted time of each row that was held out, by framework, model and devices
(`python -m benchmarks.planner DATA.csv --output PREFIX` writes it). A bar is computed from them. megacore itself has not been measured
on a GPU: its bars are those of the frameworks that were.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import quantiles

FILE = Path(__file__).with_name("errors.json")
SHARE = 0.8  # of the runs lie within a bar, as many below it as above
SIZES = {"on one machine": 8, "on 9 to 64 devices": 64, "on more than 64 devices": 1 << 30}  # the most devices of each
Ratios = dict[str, dict[str, dict[str, list[float]]]]  # by framework, model and devices


@dataclass(frozen=True)
class Bar:
    """Between which multiples of its prediction a step lies, for `SHARE` of the measured runs of that size."""

    low: float
    high: float
    runs: int
    size: str

    def __str__(self) -> str:
        return f"{SHARE:.0%} of {self.runs:,} measured runs {self.size} lie within {self.low - 1:+.0%} … {self.high - 1:+.0%}"

    def around(self, value: float) -> str:
        """The bar of a predicted value."""
        return f"{self.low * value:.4g} to {self.high * value:.4g}"

    def ties(self, seconds: float, others: float) -> bool:
        """Whether each of two predictions lies within the bar of the other."""
        less, more = sorted((seconds, others))
        return more <= self.high * less and less >= self.low * more


def size_of(devices: int) -> str:
    """The size of a run, in words."""
    return next(size for size, most in SIZES.items() if devices <= most)


def interval(ratios: list[float]) -> tuple[float, float]:
    """The bar of these runs: their outer tenths lie outside."""
    tenths = quantiles(ratios, n=round(2 / (1 - SHARE)), method="inclusive")
    return tenths[0], tenths[-1]


@cache
def recorded() -> Ratios:
    """What the scoreboard has written."""
    return json.loads(FILE.read_text(encoding="utf-8"))["measured over predicted"]


def of_size(size: str, ratios: Ratios) -> list[float]:
    """Those of all runs of a size."""
    own = (runs for models in ratios.values() for by_devices in models.values() for runs in by_devices.items())
    return [ratio for devices, found in own if size_of(int(devices)) == size for ratio in found]


def bar(devices: int) -> Bar:
    """The bar of a step that is predicted for so many devices."""
    size = size_of(devices)
    found = of_size(size, recorded())
    return Bar(*interval(found), len(found), size)
