"""Draws a law: runs of equal compute, what is best for each compute, and how well the law fits."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megacore.tools.charts import SMALL, new_figure
from megacore.tools.scaling.finished import Run
from megacore.tools.scaling.isoflop import IsoFlop
from megacore.tools.scaling.parametric import Fit, between

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN = "#2f6fab", "#e67e22", "#2a9d5c"


def draw(
    runs: Sequence[Run],
    held_out: Sequence[Run],
    fit: Fit | None,
    iso: IsoFlop | None,
    level: float,
    path: str,
) -> None:
    """Draw the picture. Raises `OSError` if it cannot be written."""
    figure = new_figure(7.6)
    curves, best, fitted, empty = figure.subplots(2, 2).flat
    empty.set_axis_off()
    draw_runs(curves, runs, iso, fit)
    draw_best(best, runs, fit, iso, level)
    if fit is not None:
        draw_fit(fitted, runs, held_out, fit, level)
    else:
        fitted.set_axis_off()
    for axes in (curves, best, fitted):
        axes.grid(alpha=0.25, which="both")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def draw_runs(axes: "Axes", runs: Sequence[Run], iso: IsoFlop | None, fit: Fit | None) -> None:
    """Loss over size, for each group of equal compute its parabola and minimum; the law dashed."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    flops = [run.flops for run in runs]
    norm, colours = LogNorm(min(flops), max(flops) * 1.5), colormaps["viridis"]  # the map's end is too pale
    axes.scatter(
        [run.parameters for run in runs],
        [run.loss for run in runs],
        c=[colours(norm(c)) for c in flops],
        s=28,
        zorder=3,
    )
    for group in iso.groups if iso is not None else ():
        colour = colours(norm(group.flops))
        sizes = np.geomspace(
            min(run.parameters for run in group.runs), max(run.parameters for run in group.runs), 60
        )
        axes.plot(sizes, [group.loss(n) for n in sizes], color=colour, label=f"{group.flops:.2g} FLOPs")
        axes.plot(
            group.parameters,
            group.loss(group.parameters),
            "*",
            color=colour,
            markersize=14,
            markeredgecolor="black",
            zorder=4,
        )
        if fit is not None:
            rate = group.flops / group.parameters / group.tokens
            axes.plot(
                sizes,
                [fit.law.loss(n, group.flops / rate / n) for n in sizes],
                "--",
                color=colour,
                linewidth=1,
                alpha=0.8,
            )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("parameters N, without embeddings")
    axes.set_ylabel("final loss, nats a token")
    axes.set_title("runs of equal compute\n(solid: parabolas, dashed: the law)", loc="left", fontsize=SMALL)
    if iso is not None:
        axes.legend(frameon=False, fontsize=SMALL)


def draw_best(axes: "Axes", runs: Sequence[Run], fit: Fit | None, iso: IsoFlop | None, level: float) -> None:
    """The best size for each compute, by both fits, with the law's interval."""
    flops = np.array([run.flops for run in runs])
    line = np.geomspace(flops.min() / 2, flops.max() * 10, 60)
    factor = float(np.median([run.flops / run.parameters / run.tokens for run in runs]))
    axes.scatter(flops, [run.parameters for run in runs], s=10, color="#bbbbbb", label="runs")
    if fit is not None:
        axes.plot(
            line,
            [fit.law.best_parameters(c, factor) for c in line],
            color=BLUE,
            label=f"law: C^{fit.law.exponent:.2f}",
        )
        if fit.resampled:
            spans = [
                between(
                    [law.best_parameters(c, factor) for law in fit.resampled if law.alpha > 0 < law.beta],
                    level,
                )
                for c in line
            ]
            axes.fill_between(
                line,
                [low for low, _ in spans],
                [high for _, high in spans],
                color=BLUE,
                alpha=0.15,
                linewidth=0,
            )
    if iso is not None:
        axes.plot(
            line,
            [iso.parameters.at(c) for c in line],
            color=ORANGE,
            label=f"parabolas: C^{iso.parameters.exponent:.2f}",
        )
        axes.plot(
            [g.flops for g in iso.groups],
            [g.parameters for g in iso.groups],
            "*",
            color=ORANGE,
            markersize=12,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    sizes = [run.parameters for run in runs]
    axes.set_ylim(min(sizes) / 4, max(sizes) * 4)
    axes.set_xlabel("compute C, FLOPs")
    axes.set_ylabel("parameters N")
    axes.set_title(
        f"the best size for a compute\n(shaded: {level:.0%} of resampled fits)", loc="left", fontsize=SMALL
    )
    axes.legend(frameon=False, fontsize=SMALL)


def draw_fit(axes: "Axes", runs: Sequence[Run], held_out: Sequence[Run], fit: Fit, level: float) -> None:
    """Measured losses over the law's, and runs that were not in the fit with their interval."""
    law = [fit.law.loss(run.parameters, run.tokens) for run in runs]
    axes.scatter(law, [run.loss for run in runs], s=22, color=BLUE, label="in the fit")
    ends = [min(law), max(law)]
    for run in held_out:
        value, low, high = fit.predicted(run.parameters, run.tokens, level)
        axes.errorbar(
            value,
            run.loss,
            xerr=[[max(0.0, value - low)], [max(0.0, high - value)]],
            fmt="D",
            color=ORANGE,
            capsize=3,
            label="not in the fit" if run is held_out[0] else None,
        )
        ends = [min(ends[0], value, run.loss), max(ends[1], value, run.loss)]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.set_xlabel("loss by the law")
    axes.set_ylabel("loss measured")
    rms = float(np.sqrt(np.mean(np.square(fit.residuals))))
    axes.set_title(
        f"L = {fit.law.E:.3g} + A/N^{fit.law.alpha:.3g} + B/D^{fit.law.beta:.3g}, within {rms:.2%}",
        loc="left",
        fontsize=SMALL,
    )
    axes.legend(frameon=False, fontsize=SMALL)
