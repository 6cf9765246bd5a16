"""Show what a run reached, or compare runs: where their losses diverge, how their configs differ, and their
speed and memory.
"""

import os
import sys

# so that a checkout runs without being installed; an installed script has no such folder
if os.path.isdir(os.path.dirname(os.path.realpath(__file__)) + "/../megacore"):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

import megacore.tools.interrupt  # noqa: F401  (first: Ctrl-C during the other imports prints no traceback)

# isort: split
import argparse
import json
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from megacore.config import Config
from megacore.errors import ConfigError, shown
from megacore.tools.cli import Parser, add_json, exit_with
from megacore.tools.monitoring.heat_map import draw as draw_heat_map
from megacore.tools.monitoring.heat_map import read_statistics
from megacore.tools.monitoring.run_charts import GIB, draw_run, draw_runs
from megacore.tools.monitoring.run_records import Run, flatten, read_run
from megacore.tools.output_files import check_json, replaced, report_unless_json, write_results
from megacore.tools.planner.plot import check_plot

EXAMPLE = "python launch/compare.py runs/a runs/b --plot compare.png"
NOTES = (
    "A run is its folder, log.dir. One run is summarized, and --plot draws its loss curve. Of several runs, "
    "each is compared with the first one, over the steps that both logged. Times leave out validation and "
    "saving, as in metrics.jsonl."
)


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "Show what a run reached, or compare runs: losses, configs, speed and memory.",
        example=EXAMPLE,
        notes=NOTES,
        status="0 done, 2 wrong arguments or unreadable records",
        page="docs/training.md",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="folder of a run; of several, each is compared with the first",
    )
    parser.add_argument(
        "--plot", metavar="FILE.png", help="draw the loss curve of one run, or several runs compared"
    )
    parser.add_argument(
        "--heat-map",
        metavar="FILE.png",
        help="draw the tensor statistics (log.statistics) and expert loads of each run",
    )
    add_json(parser, "what was compared")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-5,
        metavar="X",
        help="relative difference from which two losses count as different",
    )
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    args = parser().parse_args(argv)
    args.runs = list(dict.fromkeys(folder.rstrip("/") or folder for folder in args.runs))
    if not 0 <= args.tolerance < 1:
        raise ConfigError("--tolerance", f"{args.tolerance} is no relative difference", "0 or more, below 1")
    for option, path in (("--plot", args.plot), ("--heat-map", args.heat_map)):
        if path is not None:
            check_plot(option, path)
    check_json(args.json)
    return args


def parting(first: Run, other: Run, tolerance: float) -> dict[str, Any]:
    """How many logged steps two runs share, and the first of them whose losses differ: in any
    bit, and by more than `tolerance`.
    """
    losses = {line.step: line.loss for line in first.steps}
    shared = [(line.step, losses[line.step], line.loss) for line in other.steps if line.step in losses]
    apart = [(step, difference(a, b)) for step, a, b in shared]
    return {
        "shared_steps": len(shared),
        "first_differing_step": next((step for step, d in apart if d > 0), None),
        "first_step_beyond_tolerance": next((step for step, d in apart if d > tolerance), None),
        "largest_relative_difference": max((d for _, d in apart), default=None),
    }


def difference(a: float | None, b: float | None) -> float:
    """Relative difference of two losses; null, which stands for a loss that is not
    finite, equals null alone.
    """
    if a is None or b is None:
        return 0.0 if a is b else 1.0
    return abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0


def summary(run: Run) -> dict[str, Any]:
    """What a run reached, and how fast it was."""
    last = run.steps[-1]
    losses = [line.valid_loss for line in run.validations if line.valid_loss is not None]
    mfu = [line.mfu for line in run.steps if line.mfu is not None]
    return {
        "step": last.step,
        "tokens": last.tokens,
        "seconds": run.seconds()[-1],
        "loss": last.loss,
        "best_valid_loss": min(losses, default=None),
        "tokens_per_second": median(line.tokens_per_second for line in run.steps),
        "mfu": median(mfu) if mfu else None,
        "memory_bytes": max(line.memory_bytes for line in run.steps),
        "skipped": last.skipped,
    }


def differing(runs: list[Run]) -> dict[str, list[Any]]:
    """The config keys whose values are not the same in all runs, with each run's value; where a
    run writes to is left out. A key that a run's record lacks, because it was written before
    there was the key, has its default.
    """
    defaults = flatten(Config().model_dump(mode="json", by_alias=True))
    keys = sorted({key for run in runs for key in run.config} - {"log.dir"})
    values = {key: [run.config.get(key, defaults.get(key)) for run in runs] for key in keys}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def show(runs: list[Run], found: dict[str, Any]) -> None:
    """Prints the tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(
        highlight=False, markup=False, width=None if sys.stdout.isatty() else 60 + 24 * len(runs)
    )
    results = Table("", *(shown(run.name) for run in runs), box=None)
    rows = {
        "steps": "{step:,}",
        "tokens": "{tokens:,}",
        "seconds": "{seconds:,.1f}",
        "loss": "{loss}",
        "best validation loss": "{best_valid_loss}",
        "tokens/s, median": "{tokens_per_second:,.0f}",
        "MFU, median": "{mfu}",
        "peak memory, GiB": "{gibibytes:.2f}",
        "skipped": "{skipped}",
    }
    for label, form in rows.items():
        cells = []
        for run in runs:
            values = dict(found["runs"][run.name])
            values |= {
                name: "–" if values[name] is None else f"{values[name]:.4f}"
                for name in ("loss", "best_valid_loss", "mfu")
            }
            cells.append(form.format(**values, gibibytes=values["memory_bytes"] / GIB))
        results.add_row(label, *cells)
    console.print(results)
    if len(runs) == 1:
        return
    console.print()
    for run in runs[1:]:
        console.print(sentence(runs[0], run, found["parting"][run.name], found["tolerance"]), soft_wrap=True)
    console.print()
    if not found["config"]:
        console.print("The configs are equal.")
        return
    settings = Table("config", *(shown(run.name) for run in runs), box=None)
    for key, values in found["config"].items():
        settings.add_row(shown(key), *(json.dumps(value) for value in values))
    console.print(settings)


def sentence(first: Run, other: Run, found: dict[str, Any], tolerance: float) -> str:
    """Where two runs part, in words."""
    names, shared = f"{shown(first.name)} and {shown(other.name)}", found["shared_steps"]
    if not shared:
        return f"{names} logged no step in common"
    if found["first_differing_step"] is None:
        return f"{names}: equal in every bit of the loss, in all {shared} steps that both logged"
    beyond = found["first_step_beyond_tolerance"]
    more = (
        f"never by more than {tolerance:g}"
        if beyond is None
        else f"by more than {tolerance:g} from step {beyond}"
    )
    most = found["largest_relative_difference"]
    return (
        f"{names}: losses differ from step {found['first_differing_step']}, {more} (at most "
        f"{most:.1e}, {shared} steps in common)"
    )


def write(option: str, path: str, drawn: Callable[[str], None]) -> None:
    """Write a picture, and print where it is."""
    try:
        with replaced(path) as aside:
            drawn(aside)
    except OSError as error:
        raise ConfigError(option, f"cannot write {path}: {error.strerror}", "a writable path") from error
    print(f"the picture is in {path}")


def run(argv: list[str]) -> int:
    """Everything that the script does."""
    args = parse(argv)
    runs = [read_run(folder) for folder in args.runs]
    statistics = None if args.heat_map is None else {run.name: read_statistics(run.name) for run in runs}
    found = {
        "tolerance": args.tolerance,
        "runs": {run.name: summary(run) for run in runs},
        "parting": {run.name: parting(runs[0], run, args.tolerance) for run in runs[1:]},
        "config": differing(runs),
    }
    with report_unless_json(args.json):
        show(runs, found)
        if args.plot is not None:
            draw = partial(draw_run, runs[0]) if len(runs) == 1 else partial(draw_runs, runs)
            write("--plot", args.plot, draw)
        if statistics is not None:
            write("--heat-map", args.heat_map, partial(draw_heat_map, statistics))
    write_results(args.json, found)
    return 0


if __name__ == "__main__":
    exit_with(run)
