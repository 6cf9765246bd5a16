"""What all pictures share: a figure as wide as a page of text, colours, and how a panel is labelled.

A page shows a picture about 900 pixels wide. Text of 9 points is 12 pixels there, the least that is easy to
read, so a picture is never wider than `PAGE_INCHES` and its text never smaller than `SMALL`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE_INCHES = 9.0
DOTS_PER_INCH = 110
SMALL, TITLE = 9, 11  # points: of ticks and legends, of a panel's title
COLOURS = ("#2f6fab", "#e67e22", "#2a9d5c", "#c0392b", "#7d5ba6", "#8a8a8a", "#17a2b8", "#b8860b")


def new_figure(height: float, width: float = PAGE_INCHES) -> "Figure":
    """Return an empty figure of these inches that needs no display and changes no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def use_log_scale(axes: "Axes") -> None:
    """Make the vertical axis logarithmic, with plain numbers: 0.5 rather than 5 × 10⁻¹."""
    from matplotlib.ticker import LogFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.7)))
    axes.tick_params(which="minor", labelsize=SMALL)


def label_panel(axes: "Axes", title: str, x_label: str = "", y_label: str = "") -> None:
    """Write a panel's title and axis labels, and draw its grid without a frame."""
    axes.set_title(title, loc="left", fontsize=TITLE)
    axes.set_xlabel(x_label, fontsize=SMALL)
    axes.set_ylabel(y_label, fontsize=SMALL)
    axes.tick_params(labelsize=SMALL)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
