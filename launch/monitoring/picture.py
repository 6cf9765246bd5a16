"""Draws the panels of dashboard.json from what a Prometheus has scraped: a picture for a
report, or where there is no Grafana.
"""

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
from megacore.tools.cli import Parser, exit_with
from megacore.tools.planner.plot import check_plot

EXAMPLE = "python launch/monitoring/picture.py --url http://localhost:9090 --minutes 30 --out dashboard.png"
DASHBOARD = Path(__file__).parent / "dashboard.json"
POINTS = 400  # of a line
GAP = 10  # seconds without a value, after which a line begins anew; and twice a point's
UNITS = {"s": "seconds", "bytes": "GiB", "percentunit": "%"}
SCALES = {"bytes": 2.0**-30, "percentunit": 100.0}

Lines = list[tuple[str, dict[float, float]]]  # legend, values by time


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(EXAMPLE, __doc__ or "")
    parser.add_argument(
        "--url", default="http://localhost:9090", metavar="URL", help="of Prometheus (%(default)s)"
    )
    parser.add_argument(
        "--minutes", type=float, default=30.0, metavar="N", help="up to --until (%(default)g)"
    )
    parser.add_argument("--until", type=float, metavar="SECONDS", help="since 1970; default: now")
    parser.add_argument("--out", required=True, metavar="FILE.png", help="the picture")
    return parser.parse_args(argv)


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
    """Draws panels, two in a row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(13, 2.5 * rows), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (panel, lines) in zip(figure.subplots(rows, 2, squeeze=False).flat, panels, strict=False):
        defaults = panel["fieldConfig"]["defaults"]
        scale = SCALES.get(defaults["unit"], 1.0)
        times = sorted({at for _, values in lines for at in values})
        times = sorted(
            {
                *times,
                *(
                    at + 1
                    for at, after in pairwise(times)
                    if after - at > max(GAP, 2 * (end - start) / POINTS)
                ),
            }
        )  # where nothing is known lines end
        minutes = [(at - start) / 60 for at in times]
        rows_of = [(legend, [scale * values.get(at, math.nan) for at in times]) for legend, values in lines]
        right: Any = None
        apart = right_of(panel)
        if "stacking" in defaults["custom"]:
            axes.stackplot(
                minutes,
                [values for _, values in rows_of],
                labels=[legend for legend, _ in rows_of],
                alpha=0.7,
            )
        else:
            for number, (legend, values) in enumerate(rows_of):
                if legend in apart:
                    right = right or axes.twinx()
                    right.set_ylabel(legend, fontsize=8)
                # for the legend, which is that of the left axis
                axes.plot([], color=f"C{number}", label=legend)
                (right if legend in apart else axes).plot(minutes, values, linewidth=1.2, color=f"C{number}")
        axes.set_title(panel["title"], fontsize=10, loc="left")
        axes.set_ylabel(UNITS.get(defaults["unit"], ""), fontsize=8)
        axes.set_xlim(0, (end - start) / 60)
        for side in filter(None, (axes, right)):
            side.tick_params(labelsize=8)
            side.spines["top"].set_visible(False)
        axes.spines["right"].set_visible(right is not None)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.2 if right else 1.0, 1.0))
    figure.supxlabel(f"minutes since {datetime.fromtimestamp(start, UTC):%Y-%m-%d %H:%M:%S} UTC", fontsize=9)
    try:
        figure.savefig(out)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "--out", f"cannot write {out}: {error}", "a writable path that ends in .png"
        ) from None


def run(argv: list[str]) -> None:
    """Everything that the script does; raises `UserError`."""
    args = parse(argv)
    check_plot("--out", args.out)
    end = args.until if args.until is not None else time.time()
    start = end - 60 * args.minutes
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    found = [(panel, lines_of(panel, args.url.rstrip("/"), start, end)) for panel in panels]
    if not any(lines for _, lines in found):
        raise ConfigError(
            "--url",
            f"{args.url} has no figures of these {args.minutes:g} minutes",
            "a time in which it scraped a run",
        )
    draw([(panel, lines) for panel, lines in found if lines], start, end, args.out)
    empty = [panel["title"] for panel, lines in found if not lines]
    print(f"drawn in {args.out}" + (f"; without data, and left out: {', '.join(empty)}" if empty else ""))


if __name__ == "__main__":
    exit_with(run)
