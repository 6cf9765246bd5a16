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
INCHES, MOST = 0.13, 400  # of a row; of so many rows at most: more are thinner

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
    """Writes the picture; `OSError` says why it cannot be written.

    A kind has the same colours in all runs.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure

    kinds = [kind for kind in KINDS if any(any(found[kind].values()) for found in runs.values())]
    rows = max(len(next(iter(found[kind].values()), {})) for found in runs.values() for kind in kinds)
    figure = Figure(
        figsize=(4 * len(kinds), len(runs) * (1.2 + min(max(8, rows), MOST) * INCHES)),
        dpi=110,
        layout="constrained",
    )
    FigureCanvasAgg(figure)  # no display, no global state
    panels = figure.subplots(len(runs), len(kinds), squeeze=False)
    for column, kind in enumerate(kinds):
        every = [
            x
            for found in runs.values()
            for figures in found[kind].values()
            for x in figures.values()
            if np.isfinite(x)
        ]
        above = [x for x in every if x > 0] or [1.0]
        norm: Normalize = (
            Normalize(min(every), max(every)) if kind in OWN_ROWS else LogNorm(min(above), max(above))
        )
        for row, (name, found) in enumerate(runs.items()):
            axes = panels[row, column]
            if not any(found[kind].values()):
                axes.set_axis_off()  # another run has figures of this kind
                continue
            image = show(axes, found[kind], norm)
            axes.set_title(
                f"{KINDS[kind]}\n{name}" if len(runs) > 1 else KINDS[kind], loc="left", fontsize=10
            )
        figure.colorbar(image, ax=panels[:, column], shrink=0.8)
    figure.savefig(path)


def show(axes: "Axes", steps: Steps, norm: "Normalize") -> "QuadMesh":
    """One panel: a row a layer, a column a step that was measured."""
    layers, numbers = (
        list(dict.fromkeys(layer for figures in steps.values() for layer in figures)),
        sorted(steps),
    )
    values = np.array([[steps[step].get(layer, np.nan) for step in numbers] for layer in layers])
    gap = numbers[-1] - numbers[-2] if len(numbers) > 1 else 1
    edges = [*(step - gap / 2 for step in numbers), numbers[-1] + gap / 2]
    image = axes.pcolormesh(edges, np.arange(len(layers) + 1) - 0.5, values, norm=norm, cmap="viridis")
    ticks = range(0, len(layers), -(-len(layers) // MOST))  # names that there is room for
    axes.set_yticks(ticks, [layers[i] for i in ticks])
    axes.set_ylim(len(layers) - 0.5, -0.5)
    axes.set_xlabel("step", fontsize=8)
    axes.tick_params(labelsize=7, length=0)
    return image
