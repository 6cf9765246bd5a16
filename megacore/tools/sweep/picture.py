"""Draws a sweep: loss against what was swept."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from megacore.tools.sweep.results import Point, Results, number_of
from megacore.tools.sweep.trials import said

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#2f6fab", "#e67e22", "#2a9d5c", "#c0392b", "#7d5ba6", "#8a8a8a", "#17a2b8", "#b8860b")
MOST_LINES = 8  # of a second key's values; beyond that a heat map
MOST_TICKS = 12  # that stand at the values themselves
LOG_RATIO = 4.0  # between largest and smallest value, from which an axis may be logarithmic


def draw(results: Results, path: str) -> bool:
    """Writes the picture; whether there was anything to draw. `OSError` says why it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points = [point for point in results.points if any(map(math.isfinite, point.losses))]
    keys = [key for key in results.keys if len({said(point.swept[key]) for point in points}) > 1]
    if not points or not keys:
        return False
    panels = keys if len(keys) > 2 else keys[:1]
    figure = Figure(figsize=(6.5 * len(panels) if len(panels) > 1 else 9, 5.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # no display, no global state
    for axes, key in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True):
        if len(keys) == 2:
            two_keys(axes, results, points, *order(keys, points))
        else:
            line(axes, points, key, COLOURS[0], joined=len(keys) == 1)
        label(axes, results, points)
    figure.suptitle(results.described, x=0.01, ha="left", fontsize=11)
    figure.savefig(path)
    return True


def order(keys: list[str], points: Sequence[Point]) -> tuple[str, str]:
    """The key for the axis, and that for lines: the one with fewer values, or no numbers."""
    counts = {
        key: (all(number_of(point.swept[key]) is not None for point in points), len(values(points, key)))
        for key in keys
    }
    across = max(keys, key=lambda key: counts[key])
    return across, next(key for key in keys if key != across)


def values(points: Sequence[Point], key: str) -> list[Any]:
    """The different values of a key, numbers in order."""
    found = {said(point.swept[key]): point.swept[key] for point in points}
    numbers = [number_of(value) for value in found.values()]
    return (
        sorted(found.values(), key=lambda v: number_of(v) or 0.0)
        if None not in numbers
        else list(found.values())
    )


def two_keys(axes: "Axes", results: Results, points: Sequence[Point], across: str, other: str) -> None:
    """A line for each value of the second key; a heat map if there are too many."""
    lines = values(points, other)
    if len(lines) > MOST_LINES:
        heat_map(axes, points, across, other)
        return
    for number, value in enumerate(lines):
        own = [point for point in points if said(point.swept[other]) == said(value)]
        line(axes, own, across, COLOURS[number], label=f"{other} {said(value)}")
    axes.legend(frameon=False, fontsize=9)


def line(
    axes: "Axes",
    points: Sequence[Point],
    key: str,
    colour: str,
    *,
    label: str | None = None,
    joined: bool = True,
) -> None:
    """Medians over one key, with the range of their seeds, and each seed as a dot."""
    places = positions(points, key)
    own = sorted(((places[said(point.swept[key])], point) for point in points), key=lambda pair: pair[0])
    finite = [(x, [loss for loss in point.losses if math.isfinite(loss)]) for x, point in own]
    middle = [(x, median(losses)) for x, losses in finite if losses]
    axes.plot(
        *zip(*middle, strict=True), color=colour, marker="o", linestyle="-" if joined else "none", label=label
    )
    if any(len(losses) > 1 for _, losses in finite):
        axes.plot(
            [x for x, losses in finite for _ in losses],
            [loss for _, losses in finite for loss in losses],
            ".",
            color=colour,
            alpha=0.5,
        )
        if joined:
            spans = [(x, min(losses), max(losses)) for x, losses in finite if losses]
            places_there, low, high = zip(*spans, strict=True)
            axes.fill_between(places_there, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel(key)
    if all(number_of(point.swept[key]) is not None for point in points):
        if log_spaced(list(places.values())):
            axes.set_xscale("log")
        if len(places) <= MOST_TICKS:
            axes.set_xticks(list(places.values()), [f"{place:g}" for place in places.values()])
            axes.set_xticks([], minor=True)
    else:
        axes.set_xticks(list(places.values()), list(places), rotation=20)


def positions(points: Sequence[Point], key: str) -> dict[str, float]:
    """Where each value of a key stands: a number at itself, others one beside the other."""
    found = values(points, key)
    numbers = [number_of(value) for value in found]
    return {
        said(value): float(number) if None not in numbers and number is not None else float(place)
        for place, (value, number) in enumerate(zip(found, numbers, strict=True))
    }


def log_spaced(numbers: Sequence[float]) -> bool:
    """Whether numbers are spread more evenly by their logarithms."""
    ordered = sorted(set(numbers))
    if len(ordered) < 3 or ordered[0] <= 0 or ordered[-1] / ordered[0] < LOG_RATIO:
        return False

    def unevenness(places: list[float]) -> float:
        gaps = [b - a for a, b in pairwise(places)]
        mean = sum(gaps) / len(gaps)
        return sum((gap / mean - 1) ** 2 for gap in gaps)

    return unevenness([math.log(number) for number in ordered]) <= unevenness(ordered)


def heat_map(axes: "Axes", points: Sequence[Point], across: str, other: str) -> None:
    """Medians over two keys."""
    columns, rows = values(points, across), values(points, other)
    medians = {(said(point.swept[across]), said(point.swept[other])): point.median for point in points}
    cells = [[medians.get((said(column), said(row)), math.nan) for column in columns] for row in rows]
    finite = [[value if math.isfinite(value) else math.nan for value in row] for row in cells]
    image = axes.imshow(finite, aspect="auto", origin="lower", cmap="viridis_r")
    axes.set_xticks(range(len(columns)), [said(value) for value in columns], rotation=45)
    axes.set_yticks(range(len(rows)), [said(value) for value in rows])
    axes.set_xlabel(across)
    axes.set_ylabel(other)
    axes.figure.colorbar(image, ax=axes)


def label(axes: "Axes", results: Results, points: Sequence[Point]) -> None:
    """The loss axis, and in words which point is best."""
    if not axes.images:
        axes.set_ylabel("loss, nats a token")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    if (best := results.best) is not None:
        axes.set_title(f"best: {best.name} ({best.median:.4f})", loc="left", fontsize=9)
