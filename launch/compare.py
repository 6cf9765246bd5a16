"""Compares runs: where their losses part, what their configs differ in, and loss, speed, gradient
norm and memory in one figure.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from megacore.config import Config
from megacore.errors import ConfigError, LogError, shown
from megacore.files import read_text, write_json
from megacore.records import Count, Record, complaint
from megacore.tools.cli import Parser, exit_with
from megacore.tools.metrics_file import Training, Validation, read_metrics
from megacore.tools.monitoring.heat_map import draw as draw_heat_map
from megacore.tools.monitoring.heat_map import read_statistics
from megacore.tools.output_files import check_output, replaced
from megacore.tools.planner.plot import check_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXAMPLE = "python launch/compare.py runs/a runs/b --plot compare.png"
MORE = """A run is its folder, log.dir. Each run is compared with the first one, over the steps that both
logged: where their losses differ in any bit, and where by more than --tolerance. Time leaves out validation
and saving, as metrics.jsonl does.
Exit status: 0 done, 2 bad arguments or records."""
COLOURS = ("#2f6fab", "#e67e22", "#2a9d5c", "#c0392b", "#7d5ba6", "#8a8a8a", "#17a2b8", "#b8860b")
DASHES = ("-", "--", ":", "-.")  # behind the last colour they change


class Every(Record):
    """Of the section `log` what is read."""

    every: Count = 1


class Written(Record):
    """Of a config.json what is read; the rest is shown."""

    log: Every = Every()


@dataclass(frozen=True)
class Run:
    """A run's records: its flat config, and its lines of training and of
    validation in the order of their steps.
    """

    name: str
    every: int  # steps between records
    config: dict[str, Any]
    steps: list[Training]
    validations: list[Validation]

    def seconds(self) -> list[float]:
        """Time spent in training steps up to each logged step.

        A run that went on from another folder's checkpoint did not do the steps before it: its first record
        stands for the steps since the logged one before.
        """
        done, out = 0.0, []
        before = max(0, self.steps[0].step - self.every)
        for line in self.steps:
            done += (line.step - before) * line.step_seconds
            before = line.step
            out.append(done)
        return out


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(EXAMPLE, f"{__doc__}\n\n{MORE}")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs, two or more")
    parser.add_argument("--plot", metavar="FILE.png", help="draws the figure")
    parser.add_argument(
        "--heat-map", metavar="FILE.png", help="draws log.statistics and loads of experts; also of one run"
    )
    parser.add_argument("--json", metavar="FILE", help="also writes what is found to a file")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-5,
        metavar="X",
        help="relative difference of losses that counts (1e-5)",
    )
    args = parser.parse_args(argv)
    args.runs = list(dict.fromkeys(folder.rstrip("/") or folder for folder in args.runs))
    if len(args.runs) < 2 and args.heat_map is None:
        raise ConfigError("arguments", "one run cannot be compared", "two runs or more")
    if not 0 <= args.tolerance < 1:
        raise ConfigError("--tolerance", f"{args.tolerance} is no relative difference", "0 or more, below 1")
    for option, path in (("--plot", args.plot), ("--heat-map", args.heat_map)):
        if path is not None:
            check_plot(option, path)
    if args.json is not None:
        check_output("--json", args.json)
    return args


def read(folder: str) -> Run:
    """A run's records. Raises `LogError`. A last line that is being written is left out."""
    texts = {}
    for name in ("config.json", "metrics.jsonl"):
        path = Path(folder) / name
        try:
            texts[name] = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "no text"
            raise LogError(str(path), f"cannot be read: {why}", "the folder of a run, its log.dir") from None
    try:
        every = Written.model_validate_json(texts["config.json"]).log.every
    except ValidationError as error:
        raise LogError(
            str(Path(folder) / "config.json"), f"is no config: {complaint(error)}", "as the run wrote it"
        ) from None
    try:
        steps, validations = read_metrics(texts["metrics.jsonl"])
    except ValueError as error:
        raise LogError(f"{folder}/metrics.jsonl", str(error), "as the run wrote it") from None
    if not steps:
        raise LogError(
            f"{folder}/metrics.jsonl", "holds no logged step yet", "a run that has logged one (log.every)"
        )
    return Run(folder, every, flat(json.loads(texts["config.json"])), steps, validations)


def flat(value: dict[str, Any], section: str = "") -> dict[str, Any]:
    """A config's values by ``section.key``."""
    out: dict[str, Any] = {}
    for key, inner in value.items():
        out |= flat(inner, f"{section}{key}.") if isinstance(inner, dict) else {section + key: inner}
    return out


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
    defaults = flat(Config().model_dump(mode="json", by_alias=True))
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
        "peak memory, GB": "{gigabytes:.2f}",
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
            cells.append(form.format(**values, gigabytes=values["memory_bytes"] / 1e9))
        results.add_row(label, *cells)
    console.print(results)
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


def draw(runs: list[Run], path: str) -> None:
    """Writes the figure; `OSError` says why it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(13, 7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # no display, no global state
    panels = figure.subplots(2, 3)
    loss, over_time, speed, norm, memory, names = panels.flat
    for number, run in enumerate(runs):
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
        style: dict[str, Any] = {"color": colour, "linestyle": dash, "label": run.name}
        tokens, seconds = [line.tokens for line in run.steps], run.seconds()
        # an equal run lies on the first
        style |= {"marker": "o" if len(tokens) == 1 else "", "linewidth": 3.5 if number == 0 else 1.3}
        loss.plot(tokens, column(run.steps, "loss"), **style)
        a_step = run.steps[-1].tokens / run.steps[-1].step
        valid = [line.step * a_step for line in run.validations]
        loss.plot(valid, column(run.validations, "valid_loss"), marker="o", linestyle="none", color=colour)
        over_time.plot(seconds, column(run.steps, "loss"), **style)
        speed.plot(tokens, column(run.steps, "tokens_per_second"), **style)
        norm.plot(tokens, column(run.steps, "grad_norm"), **style)
        memory.barh(number, max(column(run.steps, "memory_bytes")), color=colour)
        names.plot([], [], **style)
    title(loss, "loss over tokens (dots: validation)", "tokens")
    title(over_time, "loss over training time", "")
    title(speed, "tokens a second", "tokens")
    speed.set_ylim(0)
    title(norm, "gradient norm", "tokens")
    norm.set_yscale("log")
    title(memory, "peak memory of the fullest rank", "")
    memory.set_yticks([])
    memory.invert_yaxis()
    for axes, unit in ((loss, ""), (over_time, "s"), (speed, ""), (norm, ""), (memory, "B")):
        axes.xaxis.set_major_formatter(EngFormatter(unit))
    speed.yaxis.set_major_formatter(EngFormatter())
    names.legend(loc="upper left", frameon=False)
    names.set_axis_off()
    figure.savefig(path)


def write(option: str, path: str, drawn: Callable[[str], None]) -> None:
    """Writes a picture, and says where it is."""
    try:
        with replaced(path) as aside:
            drawn(aside)
    except OSError as error:
        raise ConfigError(option, f"cannot write {path}: {error.strerror}", "a writable path") from error
    print(f"the figure is in {path}")


def column(lines: Sequence[Training | Validation], key: str) -> list[float]:
    """One figure of every line; what is not finite leaves a gap."""
    return [float("nan") if (value := getattr(line, key)) is None else value for line in lines]


def title(axes: "Axes", text: str, unit: str) -> None:
    """A panel's title and what its x axis counts."""
    axes.set_title(text, loc="left", fontsize=11)
    axes.set_xlabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def run(argv: list[str]) -> int:
    """Everything that the script does."""
    args = parse(argv)
    runs = [read(folder) for folder in args.runs]
    statistics = None if args.heat_map is None else {run.name: read_statistics(run.name) for run in runs}
    found = {
        "tolerance": args.tolerance,
        "runs": {run.name: summary(run) for run in runs},
        "parting": {run.name: parting(runs[0], run, args.tolerance) for run in runs[1:]},
        "config": differing(runs),
    }
    show(runs, found)
    if args.json is not None:
        write_json("--json", args.json, found)
    if args.plot is not None:
        write("--plot", args.plot, partial(draw, runs))
    if statistics is not None:
        write("--heat-map", args.heat_map, partial(draw_heat_map, statistics))
    return 0


if __name__ == "__main__":
    exit_with(run)
