"""Draw the panels of dashboard.json from what a Prometheus server has scraped, without Grafana."""

import argparse
import json
import math
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

# so that a checkout runs without being installed; an installed script has no such folder
if (Path(__file__).resolve().parents[2] / "megacore").is_dir():
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megacore.errors import ConfigError
from megacore.tools.charts import SMALL, label_panel, new_figure
from megacore.tools.cli import Parser, exit_with
from megacore.tools.planner.plot import check_plot

EXAMPLE = "python launch/monitoring/picture.py --url http://localhost:9090 --output dashboard.png"
DASHBOARD = Path(__file__).parent / "dashboard.json"
POINTS = 400  # of a line
GAP = 10  # seconds without a value, after which a line begins anew; and twice a point's
PANEL_INCHES = 2.6  # height of a row of panels, legends included
SHORT_LEGEND = 8  # letters: four such legends stand next to each other
UNITS = {"s": "seconds", "bytes": "GiB", "percentunit": "%"}
SCALES = {"bytes": 2.0**-30, "percentunit": 100.0}

Lines = list[tuple[str, dict[float, float]]]  # legend, values by time


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "Draw the monitoring dashboard from a Prometheus server, as a picture.",
        example=EXAMPLE,
        status="0 done, 2 wrong arguments or no data",
        page="docs/operations.md",
    )
    parser.add_argument(
        "--url", default="http://localhost:9090", metavar="URL", help="address of the Prometheus server"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=30.0,
        metavar="N",
        help="length of the time that is drawn, in minutes",
    )
    parser.add_argument(
        "--until",
        type=float,
        metavar="SECONDS",
        help="end of the time that is drawn, in seconds since 1970 (default: now)",
    )
    parser.add_argument("--output", required=True, metavar="FILE.png", help="picture to write")
    parser.add_alias("--out", "--output")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the parsed command line. Raises `ConfigError`."""
    return parser().parse_args(argv)


def asked(url: str, expression: str, start: float, end: float) -> list[dict[str, Any]]:
    """The series that Prometheus finds for an expression. Raises `ConfigError` if it does not answer."""
    query = {"query": expression, "start": start, "end": end, "step": max(1.0, (end - start) / POINTS)}
    try:
        with urllib.request.urlopen(
            f"{url}/api/v1/query_range?{urllib.parse.urlencode(query)}", timeout=30
        ) as answer:
            return json.load(answer)["data"]["result"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            "--url", f"no Prometheus answers at {url}: {error}", "its address, such as http://localhost:9090"
        ) from None


def lines_of(panel: dict[str, Any], url: str, start: float, end: float) -> Lines:
    """The lines of a panel."""
    found = []
    for target in panel["targets"]:
        for series in asked(url, target["expr"], start, end):
            legend = target["legendFormat"]
            for label, value in series["metric"].items():
                legend = legend.replace(f"{{{{{label}}}}}", value)
            values = {float(at): float(value) for at, value in series["values"]}
            if any(map(math.isfinite, values.values())):
                found.append((legend, values))
    return found


def right_of(panel: dict[str, Any]) -> set[str]:
    """The legends of the lines that have an axis of their own, at the right."""
    right = {"id": "custom.axisPlacement", "value": "right"}
    return {
        override["matcher"]["options"]
        for override in panel["fieldConfig"]["overrides"]
        if right in override["properties"]
    }


def draw(panels: Sequence[tuple[dict[str, Any], Lines]], start: float, end: float, out: str) -> None:
    """Draw the panels, two in a row."""
    rows = -(-len(panels) // 2)
    figure = new_figure(PANEL_INCHES * rows)
    grid = figure.subplots(rows, 2, squeeze=False).flat
    for axes, (panel, lines) in zip(grid, panels, strict=False):
        draw_panel(axes, panel, lines, start, end)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    began = datetime.fromtimestamp(start, UTC)
    figure.supxlabel(f"minutes since {began:%Y-%m-%d %H:%M:%S} UTC", fontsize=SMALL)
    try:
        figure.savefig(out)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "--output", f"cannot write {out}: {error}", "a writable path that ends in .png"
        ) from None


def draw_panel(axes: Any, panel: dict[str, Any], lines: Lines, start: float, end: float) -> None:
    """Draw the lines of one panel over minutes, and its legend below."""
    defaults = panel["fieldConfig"]["defaults"]
    scale = SCALES.get(defaults["unit"], 1.0)
    times = with_gaps(sorted({time for _, values in lines for time in values}), start, end)
    minutes = [(time - start) / 60 for time in times]
    curves = [(legend, [scale * values.get(time, math.nan) for time in times]) for legend, values in lines]

    right: Any = None
    right_legends = right_of(panel)
    if "stacking" in defaults["custom"]:
        heights = [values for _, values in curves]
        axes.stackplot(minutes, heights, labels=[legend for legend, _ in curves], alpha=0.7)
    else:
        for number, (legend, values) in enumerate(curves):
            colour = f"C{number}"
            if legend in right_legends:
                right = right or axes.twinx()
                right.set_ylabel(legend, fontsize=SMALL)
            axes.plot([], color=colour, label=legend)  # the legend is that of the left axis
            (right if legend in right_legends else axes).plot(minutes, values, linewidth=1.2, color=colour)

    label_panel(axes, panel["title"], y_label=UNITS.get(defaults["unit"], ""))
    axes.set_xlim(0, (end - start) / 60)
    shown = [value for _, values in lines for value in values.values() if math.isfinite(value)]
    if not any(shown):
        axes.set_ylim(-0.05, 1)  # matplotlib would choose -0.055 to 0.055, also for counts
    if right is not None:
        axes.spines["right"].set_visible(True)
        right.spines["top"].set_visible(False)
        right.tick_params(labelsize=SMALL)
    # Below the panel, because next to it legends would take a third of the width.
    columns = 4 if all(len(legend) <= SHORT_LEGEND for legend, _ in curves) else 2
    axes.legend(
        fontsize=SMALL, frameon=False, ncols=columns, loc="upper left", bbox_to_anchor=(-0.05, -0.16),
        columnspacing=1.0, handlelength=1.2, borderaxespad=0,
    )  # fmt: skip


def with_gaps(times: list[float], start: float, end: float) -> list[float]:
    """Add a moment without values after each of `times` that a pause follows, so that lines end there."""
    longest = max(GAP, 2 * (end - start) / POINTS)
    pauses = [time + 1 for time, following in pairwise(times) if following - time > longest]
    return sorted({*times, *pauses})


def run(argv: list[str]) -> None:
    """Everything that the script does; raises `UserError`."""
    args = parse(argv)
    check_plot("--output", args.output)
    end = args.until if args.until is not None else time.time()
    start = end - 60 * args.minutes
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    found = [(panel, lines_of(panel, args.url.rstrip("/"), start, end)) for panel in panels]
    if not any(lines for _, lines in found):
        raise ConfigError(
            "--url",
            f"{args.url} has no metrics of these {args.minutes:g} minutes",
            "a time in which it scraped a run",
        )
    draw([(panel, lines) for panel, lines in found if lines], start, end, args.output)
    empty = [panel["title"] for panel, lines in found if not lines]
    print(f"drawn in {args.output}" + (f"; without data, and left out: {', '.join(empty)}" if empty else ""))


if __name__ == "__main__":
    exit_with(run)
