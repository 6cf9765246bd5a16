"""The benchmarks' charts, drawn without a display."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.tools.charts import COLOURS as KINDS
from megacore.tools.charts import SMALL, TITLE, label_panel, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# One colour a part of a step: work in blues and greens, waiting in reds and greys.
COLOURS = {
    "compute": "#2f6fab",
    "optimizer": "#7fb3d5",
    "data": "#8fbf8f",
    "router": "#8e44ad",
    "permute": "#f0b27a",
    "exchange": "#c0392b",
    "experts": "#1f4e79",
    "shared": "#2f6fab",
    "feed-forward": "#16a085",
    "attention": "#8fbf8f",
    "communication": "#e67e22",
    "rest": "#dddddd",
    "tp": "#c0392b",
    "cp": "#9b59b6",
    "dp": "#e67e22",
    "pp": "#f1c40f",
    "tied": "#d98880",
    "loss": "#edbb99",
    "norm": "#f5b7b1",
    "bubble": "#b0b0b0",
    "other": "#dddddd",
}
COLUMNS = 3  # panels next to each other


def stacked_bars(path: Path, bars: Mapping[str, Mapping[str, float]], unit: str, title: str) -> None:
    """A horizontal bar for each name, stacked of its parts; parts that are nowhere visible are left out."""
    figure, axes = _figure(1.4 + 0.6 * len(bars))
    names, parts = list(bars), list(next(iter(bars.values()), {}))
    left = [0.0] * len(names)
    for part in parts:
        widths = [bars[name][part] for name in names]
        if max(widths) >= 0.1:
            axes.barh(names, widths, left=left, label=part, color=COLOURS.get(part), height=0.7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_title(title, loc="left", fontsize=TITLE)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=SMALL)
    figure.savefig(path)


def ratio_bars(path: Path, groups: Mapping[str, Mapping[str, Mapping[str, float]]], title: str) -> None:
    """Draw a panel for each group, with a horizontal bar for each kind of each name, and a line at 1."""
    columns = min(COLUMNS, len(groups)) or 1
    lines = -(-len(groups) // columns) or 1
    kinds = list(
        dict.fromkeys(kind for bars in groups.values() for values in bars.values() for kind in values)
    )
    height = 0.8 / max(1, len(kinds))
    rows = max((len(bars) for bars in groups.values()), default=0)
    figure = new_figure((0.7 + 0.22 * len(kinds) * rows) * lines + 1.0)
    grid = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes, (group, bars) in zip(grid, groups.items(), strict=False):
        for place, kind in enumerate(kinds):
            values = {row: bars[name][kind] for row, name in enumerate(bars) if kind in bars[name]}
            positions = [row + (place - (len(kinds) - 1) / 2) * height for row in values]
            drawn = axes.barh(
                positions, list(values.values()), height, label=kind, color=KINDS[place % len(KINDS)]
            )
            axes.bar_label(drawn, fmt="{:.2f}", fontsize=SMALL, padding=2)
        axes.axvline(1.0, color="#333333", linewidth=0.8, linestyle="--")
        axes.set_yticks(range(len(bars)), list(bars))
        axes.margins(x=0.2)
        axes.invert_yaxis()
        label_panel(axes, group)
        axes.grid(visible=False)
    for axes in grid[len(groups) :]:
        axes.set_visible(False)
    shown = {
        label: bar for axes in grid for bar, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        list(shown.values()), list(shown), loc="outside lower right", ncols=2, frameon=False, fontsize=SMALL
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=TITLE)
    figure.savefig(path)


def lines_over_sizes(
    path: Path, lines: Mapping[str, Sequence[tuple[float, float]]], unit: str, title: str
) -> None:
    """Points (bytes, value) joined to lines by name, both axes logarithmic."""
    figure, axes = _figure(4.5)
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker=".", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes of a message")
    axes.set_ylabel(unit)
    axes.set_title(title, loc="left", fontsize=TITLE)
    figure.legend(loc="outside right upper", frameon=False, fontsize=SMALL)
    figure.savefig(path)


def _figure(height: float) -> "tuple[Figure, Axes]":
    figure = new_figure(height)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
