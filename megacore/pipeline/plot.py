"""Draws a simulated schedule as a chart: one row a stage, one box a forward or backward."""

from pathlib import Path
from typing import TYPE_CHECKING

from megacore.pipeline.schedule import Op
from megacore.pipeline.simulate import COMPUTE, SENDS, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FACE = {Op.FORWARD: "#4e8ac9", Op.BACKWARD: "#e6a23c"}  # told apart in greyscale and by the colour-blind
IDLE = "#ededed"
MARGIN = 2.3  # inches beside the rows, for names and peaks
MOST_ARROWS = 60  # more of them hide what they should show


def draw(timeline: Timeline, name: str, path: str | Path, unit: str = "s") -> None:
    """Writes `timeline` of the schedule called `name` to an image file; its times are in `unit` (s, FLOP).

    The ending of `path` chooses the format; matplotlib raises `ValueError` for one that it does not know, and
    `OSError` says why a path cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import EngFormatter

    stages = len(timeline.spans)
    boxes = [[s for s in row if s.action.op in COMPUTE] for row in timeline.spans]
    microbatches = len({s.action.microbatch for row in boxes for s in row})
    end = max(row[-1].end for row in boxes)
    shortest = min(s.end - s.start for row in boxes for s in row)
    # Wide enough for a number in the shortest box, within what a screen or a page can show.
    width = min(max(0.2 * end / shortest, 8.0), 22.0)
    inches = shortest / end * width  # of the shortest box
    row_height, text_size = (0.55, 9) if stages <= 16 else (0.25, 6)
    figure = Figure(figsize=(width + MARGIN, max(row_height * stages, 1.4) + 1.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)  # no display, no global state
    axes = figure.add_subplot()
    for stage, row in enumerate(boxes):
        axes.barh(stage, end, height=0.8, color=IDLE, zorder=0)
        for op, colour in FACE.items():
            extents = [(s.start, s.end - s.start) for s in row if s.action.op is op]
            axes.broken_barh(extents, (stage - 0.4, 0.8), color=colour, edgecolor="white", linewidth=min(0.6, 9 * inches))
    for op in FACE:
        write_numbers(axes, [(stage, s) for stage, row in enumerate(boxes) for s in row if s.action.op is op], width / end, row_height)
    draw_arrows(axes, timeline)

    axes.set_xlim(0, end)
    axes.set_ylim(stages - 0.5, -0.5)
    axes.set_yticks(range(stages), [f"stage {i}" for i in range(stages)], fontsize=text_size)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time" if unit == "s" else "time, counted in a rank's operations")
    axes.xaxis.set_major_formatter(EngFormatter(unit))
    axes.spines[:].set_visible(False)
    peaks = axes.twinx()
    peaks.set_ylim(axes.get_ylim())
    peaks.set_yticks(range(stages), [str(n) for n in timeline.peak_live], fontsize=text_size)
    peaks.tick_params(axis="y", length=0)
    peaks.set_ylabel("peak live microbatches", fontsize=9, rotation=270, labelpad=14)
    peaks.spines[:].set_visible(False)
    axes.set_title(
        f"{name}: {stages} stages × {microbatches} microbatches, bubble {timeline.bubble_rate:.1%}",
        loc="left",
        fontsize=12,
    )
    handles = [Patch(color=FACE[op], label=op.value) for op in FACE] + [Patch(color=IDLE, label="idle")]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize=9, borderaxespad=0.2)
    figure.savefig(path)


def write_numbers(axes: "Axes", boxes: list[tuple[int, Span]], inches_per_time: float, row_height: float) -> None:
    """The microbatches' numbers in boxes of one kind, in one size, if the narrowest box has room for them."""
    digits = max((len(str(span.action.microbatch)) for _, span in boxes), default=1)
    narrowest = min((span.end - span.start for _, span in boxes), default=0.0) * inches_per_time
    points = min(10.0, 72 * 0.7 * row_height, 72 * narrowest / (0.75 * digits))  # a digit is about 0.6 of its size wide
    if points >= 5:
        for stage, span in boxes:
            axes.text((span.start + span.end) / 2, stage, str(span.action.microbatch), ha="center", va="center", fontsize=points)


def draw_arrows(axes: "Axes", timeline: Timeline) -> None:
    """Transfers as arrows from sender to receiver, where they take time and are few enough to follow."""
    flights = [(stage, s) for stage, row in enumerate(timeline.spans) for s in row if s.action.op in SENDS and s.end > s.start]
    if len(flights) <= MOST_ARROWS:
        for stage, span in flights:
            side = 0.4 if span.action.peer > stage else -0.4
            style = {"arrowstyle": "->", "color": "#555555", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", xy=(span.end, span.action.peer - side), xytext=(span.start, stage + side), arrowprops=style)
