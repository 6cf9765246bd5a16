"""The coordinate check for a reader: a table of slopes, a verdict, and a picture."""

import math
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from megacore.errors import ConfigError
from megacore.tools.verify.coordinates import KINDS, LOGITS, MUP, STANDARD, Check

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLES = {STANDARD: "standard", MUP: "muP"}
MARKERS = "o+x*"  # of the first layout, and of others, whose marks stand on its own


def show(check: Check, steps: int) -> None:
    """Prints the table and the verdict."""
    table = Table(
        title=f"slopes over width {check.widths[0]}–{check.widths[-1]}, after step {steps}",
        title_justify="left",
    )
    table.add_column("layer")
    table.add_column("size of")
    for layout in check.layouts:
        for parametrization in (STANDARD, MUP):
            table.add_column(f"{layout} {TITLES[parametrization]}", justify="right")
    for kind, layer in sorted(check.curves, key=lambda curve: list(KINDS).index(curve[0])):
        row = [layer, KINDS[kind]]
        for layout in check.layouts:
            mark = " !" if check.beyond(layout, (kind, layer)) else ""
            row += [
                said(check.slope(layout, STANDARD, (kind, layer))),
                said(check.slope(layout, MUP, (kind, layer))) + mark,
            ]
        table.add_row(*row)
    Console(width=max(80, 34 + 16 * 2 * len(check.layouts)), highlight=False).print(table)
    print(verdict(check))


def said(slope: float) -> str:
    """A slope, with its sign."""
    return f"{slope:+.2f}" if math.isfinite(slope) else "diverged"


def verdict(check: Check) -> str:
    """One line."""
    if faults := check.faults():
        return (
            f"NOT width-independent: {faults[0]}{f', and {len(faults) - 1} more' if len(faults) > 1 else ''}"
        )
    counted = [(layout, curve) for layout in check.layouts for curve in check.curves if check.counts(curve)]
    most = {
        kind: max((abs(check.slope(layout, kind, curve)), curve[1]) for layout, curve in counted)
        for kind in (STANDARD, MUP)
    }
    (standard, where), (mup, _) = most[STANDARD], most[MUP]
    compared = f", alike in {', '.join(check.layouts)}" if len(check.layouts) > 1 else ""
    return (
        f"muP holds: slopes of at most {mup:.2f} (limit {check.limit:g}){compared}; standard has "
        f"{standard:.2f} ({where})"
    )


def plot(check: Check, path: str, steps: int) -> None:
    """Writes the picture: sizes over width for every layer, standard beside muP."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # no display, no global state
    grid = figure.subplots(len(KINDS), 2, sharex=True, sharey="row")
    for row, kind in zip(grid, KINDS, strict=True):
        for axes, parametrization in zip(row, (STANDARD, MUP), strict=True):
            panel(axes, check, kind, parametrization)
        row[0].set_ylabel(f"{KINDS[kind]}, root mean square")
        row[1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel("width (hidden_size)")
    others = f" (marks of {', '.join(check.layouts[1:])} stand on them)" if len(check.layouts) > 1 else ""
    figure.suptitle(
        f"after step {steps}, in layout {check.layouts[0]}{others}", x=0.01, ha="left", fontsize=11
    )
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            "--plot", f"cannot write {path}: {reason}", "a picture's path, such as coordinates.png"
        ) from None


def panel(axes: "Axes", check: Check, kind: str, parametrization: str) -> None:
    """One kind of size, with one parametrization."""
    from matplotlib import colormaps

    layers = [layer for own, layer in check.curves if own == kind]
    colours, inner = colormaps["viridis"], sum(layer != LOGITS for layer in layers)
    for number, layer in enumerate(layers):
        colour = "#c0392b" if layer == LOGITS else colours(0.9 * number / max(1, inner - 1))
        for place, layout in enumerate(check.layouts):
            sizes = check.over_widths(layout, parametrization, (kind, layer))
            slope = check.slope(layout, parametrization, (kind, layer))
            label = f"{layer} ({said(slope)})" if place == 0 else None
            (line,) = axes.plot(check.widths, sizes, color=colour, label=label)
            line.set(
                linestyle="-" if place == 0 else "none",
                marker=MARKERS[min(place, 3)],
                markersize=5 if place == 0 else 9,
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(check.widths, [str(width) for width in check.widths])
    axes.grid(alpha=0.3)
    axes.set_title(TITLES[parametrization], fontsize=11)
