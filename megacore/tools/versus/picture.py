"""Draws two models over seeds: their losses, and the difference of pairs, with intervals."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megacore.tools.charts import COLOURS, SMALL, label_panel, new_figure
from megacore.tools.versus.verdict import SHARE, Curve, Verdict, interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IDEA, OTHER, BETWEEN = *COLOURS[:2], "#444444"
MILLION = 1e6
SKIPPED = 0.1  # of the run: its beginning, in which losses fall from the vocabulary's


def draw(verdict: Verdict, pairs: Sequence[tuple[Curve, Curve]], width: int, metric: str, path: str) -> None:
    """Write the picture to `path`. Raises `OSError` if that fails."""
    figure = new_figure(4.4)
    losses, differences = figure.subplots(1, 2)
    smooth = [(own.smooth(width), theirs.smooth(width)) for own, theirs in pairs]
    for which, (name, colour) in enumerate(((verdict.idea, IDEA), (verdict.other, OTHER))):
        band(losses, pairs[0][which].tokens, [pair[which] for pair in smooth], colour, name)
        finals = [pair[which].final for pair in pairs]
        losses.plot(
            [pairs[0][which].tokens[-1] / MILLION] * len(finals), finals, "o", color=colour, ms=4, mfc="white"
        )
    ends = [
        loss
        for own, theirs in smooth
        for curve in (own, theirs)
        for loss in curve[int(SKIPPED * len(curve)) :]
    ]
    finite = [
        loss for loss in (*ends, *(curve.final for pair in pairs for curve in pair)) if math.isfinite(loss)
    ]
    if finite:
        losses.set_ylim(min(finite) - 0.05 * (max(finite) - min(finite)), max(finite))
    label_panel(losses, "training loss, nats a token", "tokens, millions")
    losses.legend(frameon=False, fontsize=SMALL)
    label_panel(differences, "difference, below 0 the first is better", "tokens, millions")
    if pairs[0][0].tokens == pairs[0][1].tokens:
        gaps = [[a - b for a, b in zip(own, theirs, strict=True)] for own, theirs in smooth]
        band(differences, pairs[0][0].tokens, gaps, BETWEEN, f"{verdict.idea} - {verdict.other}")
        differences.axhline(0, color="black", linewidth=0.8)
        tail = [gap for row in gaps for gap in row[int(SKIPPED * len(row)) :] if math.isfinite(gap)]
        if tail:
            differences.set_ylim(min(*tail, 0) * 1.1 - 1e-3, max(*tail, 0) * 1.1 + 1e-3)
    else:
        differences.text(
            0.5, 0.5, "they read different numbers of tokens", ha="center", transform=differences.transAxes
        )
    seeds = f"mean and {SHARE:.0%} interval of {len(pairs)} seeds; circles: {metric}"
    figure.suptitle(f"{verdict.lines()[0]}\n{seeds}", x=0.01, ha="left", fontsize=SMALL)
    figure.savefig(path)


def band(
    axes: "Axes", tokens: Sequence[int], curves: Sequence[Sequence[float]], colour: str, name: str
) -> None:
    """The mean of curves over seeds, with its interval."""
    places = [count / MILLION for count in tokens]
    found = [interval(values) for values in zip(*curves, strict=True)]
    axes.plot(places, [mean for mean, _ in found], color=colour, label=name)
    if len(curves) > 1:
        axes.fill_between(
            places, [m - h for m, h in found], [m + h for m, h in found], color=colour, alpha=0.2, linewidth=0
        )
