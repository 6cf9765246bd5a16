"""Draws what `log.statistics` has measured, and loads of experts: a panel for each run and
kind of figure, layers over steps.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megacore.errors import LogError
from megacore.files import open_plain
from megacore.tools.charts import SMALL, TITLE, new_figure
from megacore.tools.metrics_file import recorded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.colors import Normalize

KINDS = {
    "weight_rms": "RMS of weights",
    "gradient_rms": "RMS of gradients",
    "update_rms": "RMS of updates",
    "activation_rms": "RMS of activations",
    "largest_logit": "largest logit of attention",
    "expert_load": "load of experts, 1 is the mean",
}
# kinds whose rows are not those of activations; their colours are linear
OWN_ROWS = ("largest_logit", "expert_load")
COLUMNS = 2  # of panels: more of them would leave no space for layers' names at the width of a page
ROW_INCHES = 0.16  # of a layer: space for its name
MOST_ROWS = 400  # of a panel; more are thinner, and only some have their names
TITLE_INCHES = 0.8  # of a panel: title and steps
MOST_INCHES = 400.0  # of the picture, within what an image file can hold

Steps = dict[int, dict[str, float]]  # figures by step, and by layer


def read_statistics(folder: str) -> dict[str, Steps]:
    """By kind, the figures of layers that a run has recorded. Raises `LogError` if it has none."""
    found: dict[str, Steps] = {kind: {} for kind in KINDS}
    path = Path(folder) / "metrics.jsonl"
    with open_plain(path) as file:
        for step, line in recorded(file):
            for name, figure in json.loads(line).items():
                kind, _, what = name.partition("/")
                if kind in KINDS:
                    named = (
                        {f"{what}.{i}": one for i, one in enumerate(figure)}
                        if isinstance(figure, list)
                        else {what: figure}
                    )
                    found[kind].setdefault(step, {}).update(
                        (name, one) for name, one in named.items() if isinstance(one, int | float)
                    )
    if not any(found.values()):
        raise LogError(
            str(path), "holds no statistics", 'a run with log.statistics={"every": 100}, or one with experts'
        )
    layers = [what for figures in found["activation_rms"].values() for what in figures]
    ends = dict.fromkeys(
        [*layers, *(what for what in next(iter(found["weight_rms"].values()), ()) if "." not in what)]
    )
    for kind, steps in found.items():
        if kind not in OWN_ROWS:
            found[kind] = {
                step: {what: figure for what, figure in figures.items() if what in ends}
                for step, figures in steps.items()
            }
    return found


def draw(runs: Mapping[str, dict[str, Steps]], path: str) -> None:
    """Draw a panel for each kind and run, the runs of a kind in the same colours.

    Raises `OSError` if the picture cannot be written.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import NullFormatter

    panels = [
        (kind, name, figures[kind])
        for kind in KINDS
        for name, figures in runs.items()
        if any(figures[kind].values())
    ]
    # A row of the grid is as high as the larger of its panels needs.
    lines = [panels[start : start + COLUMNS] for start in range(0, len(panels), COLUMNS)]
    heights = [max(panel_inches(steps) for _, _, steps in line) for line in lines]
    scale = min(1.0, MOST_INCHES / sum(heights))
    heights = [scale * height for height in heights]

    figure = new_figure(sum(heights))
    grid = figure.add_gridspec(len(lines), COLUMNS, height_ratios=heights)
    norms = {kind: colour_norm(kind, runs) for kind in KINDS}
    for number, (kind, name, steps) in enumerate(panels):
        row, column = divmod(number, COLUMNS)
        axes = figure.add_subplot(grid[row, column])
        image = show(axes, steps, norms[kind], named=int((heights[row] - TITLE_INCHES * scale) / ROW_INCHES))
        title = f"{KINDS[kind]}\n{name}" if len(runs) > 1 else KINDS[kind]
        axes.set_title(title, loc="left", fontsize=TITLE)
        colours = figure.colorbar(image, ax=axes, aspect=25)
        colours.ax.tick_params(labelsize=SMALL, which="both")
        low, high = image.get_clim()
        if isinstance(image.norm, LogNorm) and high >= 10 * low:
            colours.minorformatter = NullFormatter()  # powers of ten are enough, and do not overlap
    figure.savefig(path)


def panel_inches(steps: Steps) -> float:
    """Return how high a panel is in which each layer's name can be read."""
    layers = len({layer for figures in steps.values() for layer in figures})
    return TITLE_INCHES + min(max(8, layers), MOST_ROWS) * ROW_INCHES


def colour_norm(kind: str, runs: Mapping[str, dict[str, Steps]]) -> "Normalize":
    """Return the scale of a kind's colours, which all runs share."""
    from matplotlib.colors import LogNorm, Normalize

    values = [
        value
        for figures in runs.values()
        for layers in figures[kind].values()
        for value in layers.values()
        if np.isfinite(value)
    ]
    if kind in OWN_ROWS:
        return Normalize(min(values, default=0.0), max(values, default=1.0))
    positive = [value for value in values if value > 0] or [1.0]
    return LogNorm(min(positive), max(positive))


def show(axes: "Axes", steps: Steps, norm: "Normalize", named: int) -> "QuadMesh":
    """Draw one panel: a row a layer, a column a measured step, and the names of `named` layers at most."""
    from matplotlib.ticker import MaxNLocator

    layers = list(dict.fromkeys(layer for figures in steps.values() for layer in figures))
    numbers = sorted(steps)
    values = np.array([[steps[step].get(layer, np.nan) for step in numbers] for layer in layers])
    gap = numbers[-1] - numbers[-2] if len(numbers) > 1 else 1
    edges = [*(step - gap / 2 for step in numbers), numbers[-1] + gap / 2]
    image = axes.pcolormesh(edges, np.arange(len(layers) + 1) - 0.5, values, norm=norm, cmap="viridis")
    ticks = range(0, len(layers), -(-len(layers) // max(1, named)))
    axes.set_yticks(ticks, [layers[i] for i in ticks])
    axes.set_ylim(len(layers) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("step", fontsize=SMALL)
    axes.tick_params(labelsize=SMALL, length=0)
    return image
