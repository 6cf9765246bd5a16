"""Pictures of runs' metrics: one run's loss curve, and several runs compared."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megacore.errors import DataError
from megacore.tools.charts import COLOURS, SMALL, TITLE, label_panel, new_figure, use_log_scale
from megacore.tools.metrics_file import Training, Validation
from megacore.tools.monitoring.run_records import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRAINING, VALIDATION, GREY = COLOURS[0], COLOURS[1], "#8a8a8a"
DASHES = ("-", "--", ":", "-.")  # they change after the last colour
GIB = 2**30
MOST_LABELS = 12  # of validation losses in a picture


def draw_run(run: Run, path: str) -> None:
    """Draw one run's losses over its steps, large, and its gradient norm, rate and speed below.

    Raises `OSError` if the picture cannot be written.
    """
    from matplotlib.ticker import EngFormatter

    figure = new_figure(6.0)
    figure.suptitle(run_title(run), x=0.01, ha="left", fontsize=TITLE)
    grid = figure.add_gridspec(2, 3, height_ratios=(2.1, 1))
    losses = figure.add_subplot(grid[0, :])
    norm, rate, speed = (figure.add_subplot(grid[1, column]) for column in range(3))
    draw_losses(losses, run)

    steps = [line.step for line in run.steps]
    lines: dict[str, Any] = {"color": TRAINING, "linewidth": 1.2, "marker": "o" if len(steps) == 1 else ""}
    norm.plot(steps, values_of(run.steps, "grad_norm"), **lines)
    use_log_scale(norm)
    label_panel(norm, "gradient norm", "step")
    rate.plot(steps, values_of(run.steps, "lr"), **lines)
    label_panel(rate, "learning rate", "step")
    speed.plot(steps, values_of(run.steps, "tokens_per_second"), **lines)
    speed.set_ylim(0)
    speed.yaxis.set_major_formatter(EngFormatter(sep=""))
    label_panel(speed, "tokens a second", "step")
    figure.savefig(path)


def run_title(run: Run) -> str:
    """Return what a run did, in one line."""
    from matplotlib.ticker import EngFormatter

    last = run.steps[-1]
    memory = max(line.memory_bytes for line in run.steps) / GIB
    return (
        f"{run.name}: {last.step:,} steps, {EngFormatter(places=1)(last.tokens)} tokens, "
        f"{run.seconds()[-1]:,.0f} s, {memory:.2f} GiB on the fullest rank"
    )


def draw_losses(axes: "Axes", run: Run) -> None:
    """Draw training and validation loss, and where it is known the loss of token frequencies alone."""
    steps = [line.step for line in run.steps]
    losses = values_of(run.steps, "loss")
    # One logged step has no line, so it gets a dot.
    axes.plot(steps, losses, color=TRAINING, marker="o" if len(steps) == 1 else "", label="training")
    axes.annotate(
        f"{losses[-1]:.2f}", (steps[-1], losses[-1]), (8, 0), textcoords="offset points", va="center",
        color=TRAINING,
    )  # fmt: skip

    if run.validations:
        valid_steps = [line.step for line in run.validations]
        valid_losses = values_of(run.validations, "valid_loss")
        axes.plot(
            valid_steps, valid_losses, color=VALIDATION, marker="o", linestyle="none", label="validation"
        )
        # More labels would overlap; the last validation always has one.
        interval = -(-len(valid_steps) // MOST_LABELS)
        labelled = list(zip(valid_steps, valid_losses, strict=True))[::-1][::interval]
        for step, value in labelled:
            axes.annotate(
                f"{value:.2f}", (step, value), (0, 9), textcoords="offset points", ha="center",
                color=VALIDATION,
            )  # fmt: skip

    frequencies = unigram_loss(run)
    if frequencies is not None:
        axes.axhline(
            frequencies, color=GREY, linestyle="--", linewidth=1.2,
            label=f"a model that only knows how frequent each token is: {frequencies:.2f}",
        )  # fmt: skip
    label_panel(axes, "loss", "step", "nats a token")
    axes.set_xlim(0, steps[-1] * 1.05)
    axes.legend(frameon=False, loc="upper right", fontsize=SMALL)


def unigram_loss(run: Run) -> float | None:
    """Return the validation loss of token frequencies alone.

    None unless the run's validation corpus is one prepared corpus that is still there.
    """
    prefix = run.config.get("data.valid")
    if not isinstance(prefix, str) or not os.path.exists(f"{prefix}.json"):
        return None
    from megacore.tools.corpora import Sidecar  # imports torch, which nothing else here needs

    try:
        sidecar = Sidecar.load(prefix)
    except DataError:
        return None  # a picture of a run does not depend on what became of its corpus
    return None if sidecar is None else sidecar.unigram_entropy


def draw_runs(runs: Sequence[Run], path: str) -> None:
    """Draw losses, speed, gradient norm and memory of several runs.

    Raises `OSError` if the picture cannot be written.
    """
    from matplotlib.ticker import EngFormatter

    bars_inches = 1.2 + 0.3 * len(runs)
    figure = new_figure(6.4 + bars_inches)
    panels = figure.subplots(3, 2, height_ratios=(3.2, 3.2, bars_inches)).flat
    loss, over_time, speed, norm, memory, legend = panels
    for number, run in enumerate(runs):
        colour = COLOURS[number % len(COLOURS)]
        style: dict[str, Any] = {
            "color": colour,
            "linestyle": DASHES[number // len(COLOURS) % len(DASHES)],
            "label": run.name,
            "marker": "o" if len(run.steps) == 1 else "",
            # The first line is wide, so that it is seen under one that is equal.
            "linewidth": 3.5 if number == 0 else 1.3,
        }
        tokens = [line.tokens for line in run.steps]
        loss.plot(tokens, values_of(run.steps, "loss"), **style)
        over_time.plot(run.seconds(), values_of(run.steps, "loss"), **style)
        speed.plot(tokens, values_of(run.steps, "tokens_per_second"), **style)
        norm.plot(tokens, values_of(run.steps, "grad_norm"), **style)
        peak = max(line.memory_bytes for line in run.steps) / GIB
        bar = memory.barh(number, peak, color=colour)
        memory.bar_label(bar, fmt="{:.2f}", padding=3, fontsize=SMALL)

        tokens_per_step = run.steps[-1].tokens / run.steps[-1].step
        valid_tokens = [line.step * tokens_per_step for line in run.validations]
        loss.plot(
            valid_tokens, values_of(run.validations, "valid_loss"), marker="o", linestyle="none", color=colour
        )

    label_panel(loss, "loss (dots: validation)", "tokens", "nats a token")
    label_panel(over_time, "loss over training time", "seconds", "nats a token")
    label_panel(speed, "tokens a second", "tokens")
    label_panel(norm, "gradient norm", "tokens")
    label_panel(memory, "peak memory of the fullest rank", "GiB")
    speed.set_ylim(0)
    use_log_scale(norm)
    memory.set_yticks([])
    memory.invert_yaxis()
    memory.margins(x=0.15)
    for axes in (loss, speed, norm):
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    speed.yaxis.set_major_formatter(EngFormatter(sep=""))

    # The last place of the grid is the legend's.
    handles, names = loss.get_legend_handles_labels()
    legend.legend(handles, names, loc="upper left", frameon=False, fontsize=SMALL + 1)
    legend.set_axis_off()
    figure.savefig(path)


def values_of(lines: Sequence[Training | Validation], key: str) -> list[float]:
    """Return one metric of every line; NaN, which leaves a gap, where it is not finite."""
    values = [getattr(line, key) for line in lines]
    return [float("nan") if value is None else value for value in values]
