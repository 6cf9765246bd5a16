"""How many steps one optimizer needs to the final validation loss of another,
from two sweeps of the same seeds.

Of each sweep the best point counts, with the seeds that have finished; it validates every few steps. For each
seed the first sweep's final loss is looked up in the second's validations, linearly between two of them. Both
runs have the same number of steps, over which
their rates decay: a loss that is reached on the way is reached with a rate that has not decayed yet.
"""

import argparse
import json
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import machine
from megacore.errors import ConfigError
from megacore.files import read_text, write_json
from megacore.tools.cli import Parser, exit_with
from megacore.tools.metrics_file import read_metrics
from megacore.tools.output_files import check_output, replaced
from megacore.tools.planner.plot import check_plot

EXAMPLE = (
    "python -m benchmarks.optimizers runs/adamw_seeds runs/muon_seeds --output optimizers.json "
    "--plot optimizers.png"
)
Curve = list[tuple[int, float]]  # steps, and validation losses behind them


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        "Count the steps that one optimizer needs to reach the final validation loss of another.",
        example=EXAMPLE,
        page="docs/research.md",
    )
    parser.add_argument("first", metavar="FOLDER", help="sweep whose final loss is the goal")
    parser.add_argument("second", metavar="OTHER", help="sweep whose steps are counted")
    parser.add_argument("--output", metavar="FILE.json", help="write the results")
    parser.add_argument("--plot", metavar="FILE.png", help="draw validation losses over steps")
    args = parser.parse_args(argv)
    if args.output is not None:
        check_output("--output", args.output)
    if args.plot is not None:
        check_plot("--plot", args.plot)
    return args


def curves(folder: str) -> dict[int, Curve]:
    """The validations of the trials of a sweep's best point, by seed. Raises `ConfigError`."""
    try:
        results = json.loads(read_text(Path(folder) / "results.json"))
        points = results["points"]
        best = next(
            (point["swept"] for point in points if len(points) == 1 or point["point"] == results["best"]),
            None,
        )
        if best is None:
            raise ConfigError(
                "arguments", f"{folder} has no best point yet", "a sweep whose trials have finished"
            )
        found = {}
        for trial in results["trials"]:
            if trial["status"] == "finished" and all(trial[key] == value for key, value in best.items()):
                path = Path(folder) / "trials" / trial["trial"] / "metrics.jsonl"
                found[trial["seed"]] = [
                    (v.step, v.valid_loss)
                    for v in read_metrics(read_text(path))[1]
                    if v.valid_loss is not None
                ]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            "arguments", f"{folder} is no sweep that has been run: {error}", "a folder of launch/sweep.py"
        ) from None
    return found


def steps_to(loss: float, curve: Curve) -> float | None:
    """The step at which a curve comes down to a loss, linearly between validations; None if it never does."""
    for (before, above), (after, below) in pairwise(curve):
        if below <= loss:
            return after if above <= loss else before + (after - before) * (above - loss) / (above - below)
    return None


def compare(first: dict[int, Curve], second: dict[int, Curve]) -> list[dict[str, Any]]:
    """A row for each seed that both have."""
    return [
        {
            "seed": seed,
            "first_loss": first[seed][-1][1],
            "second_loss": second[seed][-1][1],
            "steps": first[seed][-1][0],
            "steps_to_first_loss": steps_to(first[seed][-1][1], second[seed]),
        }
        for seed in sorted(first.keys() & second.keys())
    ]


def draw(named: dict[str, dict[int, Curve]], path: str) -> None:
    """Medians over seeds, with their range."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for (name, found), colour in zip(named.items(), ("#2f6fab", "#e67e22"), strict=True):
        steps = sorted(set.intersection(*({step for step, _ in curve} for curve in found.values())))
        losses = [[dict(curve)[step] for curve in found.values()] for step in steps]
        axes.plot(steps, [median(own) for own in losses], color=colour, label=f"{name}, {len(found)} seeds")
        axes.fill_between(
            steps,
            [min(own) for own in losses],
            [max(own) for own in losses],
            color=colour,
            alpha=0.2,
            linewidth=0,
        )
    axes.axhline(
        median(curve[-1][1] for curve in next(iter(named.values())).values()),
        color="#333333",
        linewidth=0.8,
        linestyle="--",
    )
    axes.set_xlabel("steps")
    axes.set_ylabel("validation loss, nats a token")
    axes.set_title(
        "validation loss: median and range over seeds; dashed: the first one's final loss",
        loc="left",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path)


def run(argv: list[str]) -> int:
    """Everything that the script does."""
    args = parse(argv)
    first, second = curves(args.first), curves(args.second)
    rows = compare(first, second)
    if not rows:
        raise ConfigError("arguments", "no seed has finished in both sweeps", "sweeps with the same seeds")
    for row in rows:
        print(
            ", ".join(
                f"{name.replace('_', ' ')} {value if value is None else f'{value:.6g}'}"
                for name, value in row.items()
            )
        )
    reached = [row["steps_to_first_loss"] for row in rows if row["steps_to_first_loss"] is not None]
    summary = {name: median(row[name] for row in rows) for name in ("first_loss", "second_loss", "steps")}
    if reached:
        print(
            f"steps to the first one's final loss: median {median(reached):.0f} of {summary['steps']:.0f}, "
            f"{min(reached):.0f} to {max(reached):.0f} over {len(reached)} seeds"
        )
    else:
        print("the second never reaches the first one's final loss", file=sys.stderr)
    if args.output is not None:
        summary |= {"steps_to_first_loss": median(reached) if len(reached) == len(rows) else None}
        found = {
            "first": args.first,
            "second": args.second,
            "seeds": rows,
            "median": summary,
            "machine": machine.describe(),
        }
        write_json("--output", args.output, found)
    if args.plot is not None:
        try:
            with replaced(args.plot) as aside:
                draw({Path(args.first).name: first, Path(args.second).name: second}, aside)
        except OSError as error:
            raise ConfigError(
                "--plot", f"cannot write {args.plot}: {error.strerror}", "a writable path"
            ) from None
    return 0


if __name__ == "__main__":
    exit_with(run)
