"""Draws a simulated schedule as a chart: one row a stage, one box a forward or backward.

A long schedule repeats itself. The chart leaves repetitions out, and says so, so that both ends stay large enough to read.
"""

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.errors import ConfigError
from megacore.files import check_output
from megacore.plan.schedule import Op
from megacore.plan.simulate import COMPUTE, SENDS, Span, Timeline, peak_live

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FACE = {Op.FORWARD: "#4e8ac9", Op.BACKWARD: "#e6a23c"}  # distinct in greyscale and for the colour-blind
IDLE = "#ededed"
MARGIN = 2.3  # inches beside the rows, for names and peaks
MOST_ARROWS = 60  # more of them hide what they should show
BOX = 0.2  # inches of the shortest box: room for a number of three digits
MOST_BOXES = 75  # shortest boxes beside each other, beyond which a schedule is cut: what a screen shows
BREAK = 3.0  # shortest boxes: width of the mark where it is
EDGE = 2  # periods that stay on each side of a cut
ALIKE = 1e-3  # of a period: those that differ by less are equal


@dataclass(frozen=True)
class Cut:
    """A stretch of time that is not drawn, in which every stage repeats its rhythm, for `fewest` to `most` microbatches."""

    start: float
    end: float
    fewest: int
    most: int


class Scale:
    """Maps the time of a schedule to the time of its picture, where a `gap` stands for each cut."""

    def __init__(self, cuts: list[Cut], gap: float) -> None:
        self.cuts, self.gap = cuts, gap

    def __call__(self, time: float) -> float:
        """The position of a moment. One that is cut out is at the middle of the gap."""
        shift = 0.0
        for cut in self.cuts:
            if time >= cut.end:
                shift += self.gap - (cut.end - cut.start)
            elif time > cut.start:
                return cut.start + shift + self.gap / 2
        return time + shift

    def shows(self, span: Span) -> bool:
        """Whether an action is drawn whole."""
        return not any(span.start < cut.end and cut.start < span.end for cut in self.cuts)

    def visible(self, start: float, end: float) -> tuple[float, float] | None:
        """The drawn part of a span of time, in the picture's time; None if there is none. It never reaches across a cut, because the
        time between two cuts is longer than any box."""
        for cut in self.cuts:
            if cut.start <= start < cut.end:
                start = cut.end
            if cut.start < end <= cut.end:
                end = cut.start
        return (self(start), self(end)) if start < end else None


def check_plot(option: str, path: str) -> None:
    """Raises `ConfigError`, naming the option, unless the path names an image format, in a folder that is there."""
    from matplotlib.backend_bases import FigureCanvasBase

    if Path(path).suffix.lower().removeprefix(".") not in FigureCanvasBase.get_supported_filetypes():
        raise ConfigError(option, f"cannot write {path}: its ending names no image format", "a path ending in .png, .svg or .pdf")
    check_output(option, path)


def draw(timeline: Timeline, name: str, path: str | Path, unit: str = "s") -> None:
    """Writes `timeline` of the schedule called `name` to an image file; its times are in `unit` (s, FLOP).

    The ending of `path` chooses the format; matplotlib raises `ValueError` for one that it does not know, and
    `OSError` says why a path cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    stages = len(timeline.spans)
    boxes = [[s for s in row if s.action.op in COMPUTE] for row in timeline.spans]
    microbatches = len({s.action.microbatch for row in boxes for s in row})
    shortest = min(s.end - s.start for row in boxes for s in row)
    scale = Scale(find_cuts(timeline, MOST_BOXES * shortest, BREAK * shortest), BREAK * shortest)
    end = scale(max(row[-1].end for row in boxes))
    # Wide enough for a number in the shortest box, within what a page can show.
    width = min(max(BOX * end / shortest, 8.0), 22.0)
    inches = shortest / end * width  # of the shortest box
    row_height, text_size = (0.55, 9) if stages <= 16 else (0.25, 6)
    figure = Figure(figsize=(width + MARGIN, max(row_height * stages, 1.4) + 1.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)  # no display, no global state
    axes = figure.add_subplot()
    for stage, row in enumerate(boxes):
        axes.barh(stage, end, height=0.8, color=IDLE, zorder=0)
        for op, colour in FACE.items():
            shown = [part for s in row if s.action.op is op and (part := scale.visible(s.start, s.end))]
            extents = [(start, stop - start) for start, stop in shown]
            axes.broken_barh(extents, (stage - 0.4, 0.8), color=colour, edgecolor="white", linewidth=min(0.6, 9 * inches))
    for op in FACE:
        write_numbers(
            axes, [(stage, s) for stage, row in enumerate(boxes) for s in row if s.action.op is op], scale, width / end, row_height
        )
    if not scale.cuts:
        draw_arrows(axes, timeline)
    mark_cuts(axes, scale, stages)

    axes.set_xlim(0, end)
    axes.set_ylim(stages - 0.5, -0.5)
    axes.set_yticks(range(stages), [f"stage {i}" for i in range(stages)], fontsize=text_size)
    axes.tick_params(axis="y", length=0)
    mark_time(axes, scale, end, unit)
    axes.spines[:].set_visible(False)
    peaks = axes.twinx()
    peaks.set_ylim(axes.get_ylim())
    peaks.set_yticks(range(stages), [str(n) for n in peak_live(timeline.plan)], fontsize=text_size)
    peaks.tick_params(axis="y", length=0)
    peaks.set_ylabel("peak live microbatches", fontsize=9, rotation=270, labelpad=14)
    peaks.spines[:].set_visible(False)
    axes.set_title(
        f"{name}: {counted(stages, 'stage')} × {counted(microbatches, 'microbatch')}, bubble {timeline.bubble_rate:.1%}",
        loc="left",
        fontsize=12,
    )
    handles = [Patch(color=FACE[op], label=op.value) for op in FACE] + [Patch(color=IDLE, label="idle")]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize=9, borderaxespad=0.2)
    figure.savefig(path)


def counted(number: int, what: str) -> str:
    """1 stage, 128 microbatches."""
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('ch') else 's'}"


def find_cuts(timeline: Timeline, longest: float, gap: float) -> list[Cut]:
    """Chooses cuts so that the schedule takes `longest`, with `gap` for each cut, or as near to it as possible: some periods stay
    before and after each cut."""
    end = max(span.end for row in timeline.spans for span in row if span.action.op in COMPUTE)
    if end <= longest:
        return []
    stretches = [(start, stop, periods) for start, stop, periods in steady(timeline) if stop - start > 2 * EDGE * max(periods) + 2 * gap]
    spare = [floor((stop - start) / max(periods) - 2 * EDGE) * max(periods) for start, stop, periods in stretches]
    wanted = min(1.0, (end + gap * len(spare) - longest) / sum(spare)) if spare else 0.0
    cuts = []
    for (start, stop, periods), most in zip(stretches, spare, strict=True):
        length = min(ceil(wanted * most / max(periods)) * max(periods), most)
        first = start + (stop - start - length) / 2
        cuts.append(Cut(first, first + length, round(length / max(periods)), round(length / min(periods))))
    return cuts


def steady(timeline: Timeline) -> list[tuple[float, float, list[float]]]:
    """Finds the stretches of time (start, end) in which every active stage repeats itself, one microbatch later, in a steady rhythm.
    Returns them with the rhythms' periods, of which most schedules have one."""
    series: dict[tuple[int, Op, int], list[Span]] = defaultdict(list)
    for stage, row in enumerate(timeline.spans):
        for span in row:
            if span.action.op in COMPUTE:
                series[stage, span.action.op, span.action.chunk].append(span)
    starts = [[span.start for span in spans] for spans in series.values()]
    changes = {moment for spans in series.values() for moment in (spans[0].start, spans[-1].start, spans[-1].end)}
    for times in starts:
        changes |= {b for a, b, c in zip(times, times[1:], times[2:], strict=False) if abs((c - b) - (b - a)) > ALIKE * (b - a)}
    found = []
    for start, stop in pairwise(sorted(changes)):
        # In a steady rhythm two neighbours give the period.
        around = [(times, bisect_right(times, start)) for times in starts]
        periods = [times[i] - times[i - 1] for times, i in around if 0 < i < len(times)]
        if periods:
            found.append((start, stop, periods))
    return found


def mark_cuts(axes: "Axes", scale: Scale, stages: int) -> None:
    """Draws a white band with dots where time is left out, and writes how many microbatches are missing."""
    for cut in scale.cuts:
        middle = scale((cut.start + cut.end) / 2)
        axes.barh((stages - 1) / 2, scale.gap, left=middle - scale.gap / 2, height=stages, color="white", zorder=3)
        for stage in range(stages):
            axes.text(middle, stage, "\u22ef", ha="center", va="center", fontsize=12, zorder=4)
        more = f"{cut.most} more" if cut.fewest == cut.most else f"{cut.fewest} to {cut.most} more"
        below = axes.get_xaxis_transform()
        axes.annotate(more, (middle, 0), (0, -7), below, "offset points", ha="center", va="top", fontsize=9)


def mark_time(axes: "Axes", scale: Scale, end: float, unit: str) -> None:
    """Names times below the rows, left and right of cuts too."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.set_xlabel("time" if unit == "s" else "time, counted in a rank's operations")
    axes.xaxis.set_major_formatter(EngFormatter(unit))
    if scale.cuts:
        step = float(MaxNLocator(8).tick_values(0, end)[1])
        last = end + sum(cut.end - cut.start - scale.gap for cut in scale.cuts)
        times = [i * step for i in range(int(last / step) + 1)]
        shown = [time for time in times if not any(cut.start - step / 2 < time < cut.end + step / 2 for cut in scale.cuts)]
        axes.set_xticks([scale(time) for time in shown], [EngFormatter(unit)(time) for time in shown])


def write_numbers(axes: "Axes", boxes: list[tuple[int, Span]], scale: Scale, inches_per_time: float, row_height: float) -> None:
    """Writes microbatches' numbers in boxes of one kind, in one size, if the narrowest box has room. Boxes that are cut get none."""
    digits = max((len(str(span.action.microbatch)) for _, span in boxes), default=1)
    narrowest = min((span.end - span.start for _, span in boxes), default=0.0) * inches_per_time
    points = min(10.0, 72 * 0.7 * row_height, 72 * narrowest / (0.75 * digits))  # a digit is about 0.6 of its size wide
    if points >= 5:
        for stage, span in boxes:
            if scale.shows(span):
                axes.text(scale((span.start + span.end) / 2), stage, str(span.action.microbatch), ha="center", va="center", fontsize=points)


def draw_arrows(axes: "Axes", timeline: Timeline) -> None:
    """Draws transfers as arrows from sender to receiver, if they take time and are few enough to follow."""
    flights = [(stage, s) for stage, row in enumerate(timeline.spans) for s in row if s.action.op in SENDS and s.end > s.start]
    if len(flights) <= MOST_ARROWS:
        for stage, span in flights:
            side = 0.4 if span.action.peer > stage else -0.4
            style = {"arrowstyle": "->", "color": "#555555", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", xy=(span.end, span.action.peer - side), xytext=(span.start, stage + side), arrowprops=style)
