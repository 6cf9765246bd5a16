"""Draws a simulated schedule as a chart: one row a rank, one box an action, and below
the boxes what the rank holds.

Of a long schedule the chart shows the beginning and the end, large enough to read, and says what it leaves
out between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from megacore.errors import ConfigError
from megacore.pipeline.schedule import COMPUTE, SENDS, Op
from megacore.tools.choices.held import held_over, peak_live
from megacore.tools.output_files import check_output
from megacore.tools.schedules.simulate import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Distinct in greyscale and for the colour-blind.
FACE = {
    Op.FORWARD: "#4e8ac9",
    Op.BACKWARD: "#e6a23c",
    Op.BACKWARD_INPUT: "#e6a23c",
    Op.BACKWARD_WEIGHT: "#6aa84f",
}
NAMES = {Op.BACKWARD_INPUT: "backward, inputs", Op.BACKWARD_WEIGHT: "backward, weights"}
PALER = 0.45  # of the way to white goes the last chunk's colour: white numbers would not be read
HELD = "#8e7cc3"  # what a rank holds
IDLE = "#ededed"
MARGIN = 2.3  # inches beside the rows, for names and peaks
MOST_ARROWS = 60  # more of them hide what they should show
BOX_HEIGHT = 0.6  # of a row, whose rest shows what the rank holds
BOX = 0.2  # inches of the shortest box: room for a number of three digits
MOST_BOXES = 75  # shortest boxes beside each other, beyond which a schedule is cut: what a screen shows
# or as many, if that is more: filling and draining take three each where a backward takes twice a forward
BOXES_A_STAGE = 7
BREAK = 3.0  # shortest boxes: width of the mark where it is


@dataclass(frozen=True)
class Cut:
    """The middle of a schedule, from `start` to `end`, which is not drawn.

    A `gap` in the picture stands for it.
    """

    start: float
    end: float
    gap: float

    def place(self, time: float) -> float:
        """The position of a moment in the picture's time. One that is left out is at the end of the gap."""
        return time if time <= self.start else self.start + self.gap + max(0.0, time - self.end)

    def shows(self, span: Span) -> bool:
        """Whether an action is drawn whole."""
        return span.end <= self.start or span.start >= self.end


def find_cut(end: float, shortest: float, stages: int) -> Cut:
    """Leaves the middle of a schedule of `end` seconds out, if it is long: as much remains on both sides.

    `shortest`: box, in seconds.
    """
    longest, gap = max(MOST_BOXES, BOXES_A_STAGE * stages) * shortest, BREAK * shortest
    if end <= longest:
        return Cut(end, end, 0.0)
    side = (longest - gap) / 2
    return Cut(side, end - side, gap)


def check_plot(option: str, path: str) -> None:
    """Raises `ConfigError`, naming the option, unless the path names an image
    format, in a folder that is there.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    if Path(path).suffix.lower().removeprefix(".") not in FigureCanvasBase.get_supported_filetypes():
        raise ConfigError(
            option,
            f"cannot write {path}: its ending names no image format",
            "a path ending in .png, .svg or .pdf",
        )
    check_output(option, path)


def draw(
    timeline: Timeline, name: str, path: str | Path, unit: str = "s", rows: Sequence[str] | None = None
) -> None:
    """Writes `timeline` of the schedule called `name` to an image file; its times are in `unit` (s, FLOP).

    `rows`: what its rows are called, if they are not the ranks of one plan. `name` is then the whole title.

    The ending of `path` chooses the format; matplotlib raises `ValueError` for one that it does not know, and
    `OSError` says why a path cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    stages, chunks = len(timeline.spans), max(map(len, timeline.plan.placement))
    boxes = [[s for s in row if s.action.op in COMPUTE] for row in timeline.spans]
    microbatches = len({s.action.microbatch for row in boxes for s in row})
    lengths = [s.end - s.start for row in boxes for s in row]
    shortest = median(lengths) if rows else min(lengths)  # measured ones vary
    last = max(row[-1].end for row in boxes)
    cut = find_cut(last, shortest, stages)
    end = cut.place(last)
    # Wide enough for a number in the shortest box, within what a page can show.
    width = min(max(BOX * end / shortest, 8.0), 22.0)
    inches = shortest / end * width  # of the shortest box
    row_height, text_size = (0.55, 9) if stages <= 16 else (0.25, 6)
    figure = Figure(
        figsize=(width + MARGIN, max(row_height * stages, 1.4) + 1.2), dpi=130, layout="constrained"
    )
    FigureCanvasAgg(figure)  # no display, no global state
    axes = figure.add_subplot()
    for stage, row in enumerate(boxes):
        axes.barh(stage, end, height=0.8, color=IDLE, zorder=0)
        for op, chunk in product(FACE, range(chunks)):
            places = [
                (cut.place(s.start), cut.place(s.end))
                for s in row
                if (s.action.op, s.action.chunk) == (op, chunk)
            ]
            extents = [(start, stop - start) for start, stop in places if start < stop]
            colour = shade(FACE[op], chunk, chunks)
            axes.broken_barh(
                extents,
                (stage - 0.4, BOX_HEIGHT),
                color=colour,
                edgecolor="white",
                linewidth=min(0.6, 9 * inches),
            )
    draw_held(axes, timeline, cut)
    whole = [(stage, s) for stage, row in enumerate(boxes) for s in row if cut.shows(s)]
    for op in FACE:
        write_numbers(
            axes, [(stage, s) for stage, s in whole if s.action.op is op], cut, width / end, row_height
        )
    if cut.gap:
        mark_cut(axes, cut, stages, microbatches - len({s.action.microbatch for _, s in whole}))
    else:
        draw_arrows(axes, timeline)

    axes.set_xlim(0, end)
    axes.set_ylim(stages - 0.5, -0.5)
    axes.set_yticks(
        range(stages),
        rows or [f"rank {i}" if chunks > 1 else f"stage {i}" for i in range(stages)],
        fontsize=text_size,
    )
    axes.tick_params(axis="y", length=0)
    mark_time(axes, cut, end, unit)
    axes.spines[:].set_visible(False)
    peaks = axes.twinx()
    peaks.set_ylim(axes.get_ylim())
    peaks.set_yticks(range(stages), [f"{n / chunks:g}" for n in peak_live(timeline.plan)], fontsize=text_size)
    peaks.tick_params(axis="y", length=0)
    peaks.set_ylabel("microbatches held at most", fontsize=9, rotation=270, labelpad=14)
    peaks.spines[:].set_visible(False)
    ranks = (
        f"{stages} ranks of {chunks} chunks (later ones paler)" if chunks > 1 else counted(stages, "stage")
    )
    size = f"{ranks} × {counted(microbatches, 'microbatch')}, bubble {timeline.bubble_rate:.1%}"
    axes.set_title(name if rows else f"{name}: {size}", loc="left", fontsize=12)
    there = {span.action.op for row in boxes for span in row}
    handles = [Patch(color=FACE[op], label=NAMES.get(op, op.value)) for op in FACE if op in there]
    handles += [Patch(color=IDLE, label="idle"), Patch(color=HELD, label="activations held")]
    where = (1, -0.5 / (row_height * stages + 0.3))
    axes.legend(
        handles=handles,
        loc="upper right",
        bbox_to_anchor=where,
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        borderaxespad=0.2,
    )
    figure.savefig(path)


def shade(colour: str, chunk: int, chunks: int) -> tuple[float, ...]:
    """A colour, paler for later chunks."""
    from matplotlib.colors import to_rgb

    paler = PALER * chunk / max(1, chunks - 1)
    return tuple(part + (1 - part) * paler for part in to_rgb(colour))


def draw_held(axes: "Axes", timeline: Timeline, cut: Cut) -> None:
    """Draws below each rank's boxes how many forwards it holds over time; the highest
    is the most that any rank holds.
    """
    most = max(peak_live(timeline.plan))
    for rank, (row, held) in enumerate(
        zip(timeline.spans, held_over(timeline.plan, [1.0] * timeline.plan.stages), strict=True)
    ):
        spans = [span for span in row if span.action.op in COMPUTE]
        times = [cut.place(span.start if span.action.op is Op.FORWARD else span.end) for span in spans]
        bottom, height = rank + 0.4, 0.78 - BOX_HEIGHT
        tops = [bottom - height * live / most for _, live in held]
        axes.fill_between(times, bottom, tops, step="post", color=HELD, linewidth=0)


def counted(number: int, what: str) -> str:
    """1 stage, 128 microbatches."""
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('ch') else 's'}"


def mark_cut(axes: "Axes", cut: Cut, stages: int, more: int) -> None:
    """Draws a white band with dots where time is left out, and writes how many microbatches
    have no whole box in the picture.
    """
    middle = cut.start + cut.gap / 2
    axes.barh((stages - 1) / 2, cut.gap, left=cut.start, height=stages, color="white", zorder=3)
    for stage in range(stages):
        axes.text(middle, stage, "\u22ef", ha="center", va="center", fontsize=12, zorder=4)
    if more == 0:
        return  # every microbatch has a whole box on one of the sides
    below = axes.get_xaxis_transform()
    axes.annotate(
        f"{more} more", (middle, 0), (0, -7), below, "offset points", ha="center", va="top", fontsize=9
    )


def mark_time(axes: "Axes", cut: Cut, end: float, unit: str) -> None:
    """Names times below the rows, on both sides of a cut. `end`: of the picture."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.set_xlabel("time" if unit == "s" else "time, counted in a rank's operations")
    step = float(MaxNLocator(8).tick_values(0, end)[1])
    times = [i * step for i in range(int((end + cut.end - cut.start - cut.gap) / step) + 1)]
    shown = (
        [time for time in times if not cut.start - step / 2 < time < cut.end + step / 2] if cut.gap else times
    )
    axes.set_xticks([cut.place(time) for time in shown], [EngFormatter(unit)(time) for time in shown])


def write_numbers(
    axes: "Axes", boxes: list[tuple[int, Span]], cut: Cut, inches_per_time: float, row_height: float
) -> None:
    """Writes microbatches' numbers in boxes of one kind, in one size, if the narrowest box has room."""
    digits = max((len(str(span.action.microbatch)) for _, span in boxes), default=1)
    narrowest = min((span.end - span.start for _, span in boxes), default=0.0) * inches_per_time
    # a digit is about 0.6 of its size wide
    points = min(10.0, 72 * 0.8 * BOX_HEIGHT * row_height, 72 * narrowest / (0.75 * digits))
    if points >= 5:
        for stage, span in boxes:
            middle = (cut.place(span.start) + cut.place(span.end)) / 2
            axes.text(
                middle,
                stage - 0.4 + BOX_HEIGHT / 2,
                str(span.action.microbatch),
                ha="center",
                va="center",
                fontsize=points,
            )


def draw_arrows(axes: "Axes", timeline: Timeline) -> None:
    """Draws transfers as arrows from sender to receiver, if they are few enough to follow."""
    flights = [(stage, s) for stage, row in enumerate(timeline.spans) for s in row if s.action.op in SENDS]
    if len(flights) <= MOST_ARROWS:
        for stage, span in flights:
            side = 0.4 if span.action.peer > stage else -0.4
            style = {"arrowstyle": "->", "color": "#555555", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0}
            axes.annotate(
                "",
                xy=(span.end, span.action.peer - side),
                xytext=(span.start, stage + side),
                arrowprops=style,
            )
