"""Draws the planner's scoreboard."""

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw_measured(path: Path, points: Mapping[str, Sequence[tuple[float, float, bool]]]) -> None:
    """Predicted over measured seconds, a panel a framework; (measured, predicted, held out)."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    shown = {name: own for name, own in points.items() if own}
    columns = 4
    figure = Figure(figsize=(11, 2.9 * -(-len(shown) // columns)), dpi=110, layout="constrained")
    axes = figure.subplots(-(-len(shown) // columns), columns, squeeze=False)
    for axis in list(axes.flat)[len(shown) :]:
        axis.set_visible(False)
    for axis, (name, own) in zip(axes.flat, shown.items(), strict=False):
        low, high = min(min(m, p) for m, p, _ in own), max(max(m, p) for m, p, _ in own)
        axis.plot([low, high], [low, high], color="0.6", linewidth=0.8)
        for out, colour, label in ((False, "#9ecae1", "fitted"), (True, "#d94801", "held out")):
            own_points = [(m, p) for m, p, held_out in own if held_out is out]
            if own_points:
                axis.scatter(*zip(*own_points, strict=True), s=5, color=colour, label=label, linewidths=0)
        axis.set(xscale="log", yscale="log", title=f"{name}, {len(own)} rows")
        axis.title.set_fontsize(9)
        axis.tick_params(labelsize=7)
        for side in (axis.xaxis, axis.yaxis):  # the labels between powers of ten would overlap
            side.set_minor_formatter(NullFormatter())
    axes[0][0].legend(fontsize=7, loc="upper left")
    figure.supxlabel("measured seconds of a step", fontsize=9)
    figure.supylabel("predicted", fontsize=9)
    figure.savefig(path)


def draw_ablation(path: Path, errors: Mapping[str, Mapping[str, float]]) -> None:
    """Median error with each term left out: a row a term, a column a framework."""
    from matplotlib.figure import Figure

    names, terms = list(errors), list(next(iter(errors.values())))
    figure = Figure(figsize=(8.5, 4.2), dpi=110, layout="constrained")
    axis = figure.subplots()
    values = [[min(0.6, errors[name][term]) for name in names] for term in terms]
    axis.imshow(values, cmap="Oranges", aspect="auto", vmin=0, vmax=0.6)
    for i, term in enumerate(terms):
        for j, name in enumerate(names):
            axis.text(j, i, f"{errors[name][term]:.0%}", ha="center", va="center", fontsize=7)
    axis.set_xticks(range(len(names)), names, fontsize=8, rotation=20)
    axis.set_yticks(range(len(terms)), [f"without {term}" for term in terms], fontsize=8)
    axis.set_title("median error on rows held out", fontsize=9)
    figure.savefig(path)
