"""Fit a scaling law to finished runs, and write the config that a compute budget should be spent on."""

import os
import sys

# so that a checkout runs without being installed; an installed script has no such folder
if os.path.isdir(os.path.dirname(os.path.realpath(__file__)) + "/../megacore"):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

import megacore.tools.interrupt  # noqa: F401  (first: Ctrl-C during the other imports prints no traceback)

# isort: split
import argparse
import json
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

from megacore.errors import ConfigError
from megacore.files import write_json
from megacore.tools.cli import Parser, add_json, count, exit_with
from megacore.tools.output_files import (
    check_json,
    check_output,
    replaced,
    report_unless_json,
    write_results,
)
from megacore.tools.planner.plot import check_plot
from megacore.tools.scaling import isoflop, parametric
from megacore.tools.scaling.finished import Run, folders, read_runs, undecayed
from megacore.tools.scaling.isoflop import IsoFlop
from megacore.tools.scaling.parametric import Fit

EXAMPLES = (
    "python launch/scaling.py runs/law --plot law.png",
    "python launch/scaling.py runs/law --budget 1e19 --output optimal.json --gpu h100 --world 8 "
    "train.global_batch_size=64",
)
NOTES = (
    "Two fits: L = E + A/N^alpha + B/D^beta, and parabolas through runs of equal compute; intervals are "
    "those of resampled runs. N counts parameters without embedding tables (the LM head counts, also a tied "
    "one), D tokens read, C model FLOPs with attention over all pairs of tokens."
)
SETTING = re.compile(r"\w+\.\w+=")
T = TypeVar("T")


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "Fit a scaling law to finished runs, and find the best model for a compute budget.",
        example=EXAMPLES,
        notes=NOTES,
        page="docs/research.md",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="folders of finished runs or of a sweep, all on the same text; section.key=value sets a value "
        "of the config that --output writes",
    )
    parser.add_argument(
        "--held-out",
        nargs="+",
        default=[],
        metavar="RUN",
        help="runs that are left out of the fit, and whose losses it predicts",
    )
    parser.add_argument(
        "--loss", choices=("valid", "train"), help="final loss to fit (default: valid, if all runs have it)"
    )
    parser.add_argument(
        "--last", type=count, default=5, metavar="N", help="logged steps whose mean is the final train loss"
    )
    parser.add_argument(
        "--least-ratio",
        type=float,
        default=0.0,
        metavar="X",
        help="leave out runs with fewer tokens per parameter than this",
    )
    parser.add_argument(
        "--resamples", type=count, default=1000, metavar="N", help="resampled fits, for the intervals"
    )
    parser.add_argument(
        "--level", type=float, default=0.95, metavar="P", help="probability that the intervals cover"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw the runs, the best sizes and the fit")
    add_json(parser, "the fits")
    parser.add_argument(
        "--budget", type=float, metavar="FLOPS", help="find the best model for this number of model FLOPs"
    )
    parser.add_argument(
        "--device-hours",
        type=float,
        metavar="N",
        help="find the best model for this number of GPU hours, with --gpu and --world",
    )
    parser.add_argument("--output", metavar="FILE.json", help="write the config of the best model")
    parser.add_argument(
        "--gpu", metavar="NAME", help="plan the best model for this GPU, as launch/plan.py does"
    )
    parser.add_argument(
        "--cluster", metavar="NAME", default="dgx_h100", help="links of the GPUs, as for launch/plan.py"
    )
    parser.add_argument("--world", type=count, metavar="N", help="number of GPUs that the plan is for")
    parser.add_argument("--price", type=float, metavar="PRICE", help="price of one GPU for one hour")
    parser.add_argument(
        "--head-size",
        type=count,
        metavar="N",
        help="head size of the best model (default: that of the largest run)",
    )
    parser.add_argument(
        "--aspect",
        type=float,
        metavar="X",
        help="hidden size of the best model, divided by its layers (default: that of the largest run)",
    )
    parser.add_alias("--device", "--gpu")
    parser.add_alias("--samples", "--resamples")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the parsed command line. Raises `ConfigError`."""
    args = parser().parse_intermixed_args(argv)
    args.overrides = [word for word in args.runs if SETTING.match(word)]
    args.runs = [word for word in args.runs if not SETTING.match(word)]
    if not args.runs:
        raise ConfigError("arguments", "no run is named", "folders of finished runs, or of a sweep")
    check(args)
    return args


def check(args: argparse.Namespace) -> None:
    """Raises `ConfigError` for options that do not go together."""
    for name in ("budget", "device_hours", "aspect"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')}", f"{value} is not usable", "a number above 0")
    if args.price is not None and not 0 <= args.price < math.inf:
        raise ConfigError("--price", f"{args.price} is not usable", "0 or more")
    if not 0 <= args.least_ratio < math.inf:
        raise ConfigError(
            "--least-ratio", f"{args.least_ratio} is no number of tokens", "0 or more, such as 2"
        )
    if not 0 < args.level < 1:
        raise ConfigError("--level", f"{args.level} is no part of the fits", "between 0 and 1, such as 0.95")
    if args.budget is not None and args.device_hours is not None:
        raise ConfigError("--device-hours", "stands beside --budget", "one of the two")
    wanted = args.budget is not None or args.device_hours is not None
    for name in ("output", "gpu", "world", "head_size", "aspect", "price"):
        if getattr(args, name) is not None and not wanted:
            raise ConfigError(
                f"--{name.replace('_', '-')}",
                "there is no budget to spend",
                "also --budget or --device-hours",
            )
    if args.overrides and not wanted:
        raise ConfigError(
            args.overrides[0],
            "a setting of the best model, and there is no budget",
            "also --budget or --device-hours",
        )
    if args.device_hours is not None and None in (args.gpu, args.world):
        raise ConfigError(
            "--device-hours", "what they compute depends on the device", "also --gpu and --world"
        )
    if (args.gpu is None) != (args.world is None):
        raise ConfigError(
            "--gpu" if args.gpu is None else "--world", "a plan needs both", "--gpu and --world"
        )
    if args.plot is not None:
        check_plot("--plot", args.plot)
    check_json(args.json)
    if args.output is not None:
        check_output("--output", args.output)


def attempt(fit: Callable[[], T]) -> tuple[T | None, ConfigError | None]:
    """A fit, or why there is none."""
    try:
        return fit(), None
    except ConfigError as error:
        return None, error


def show(
    runs: list[Run], held_out: list[Run], fit: Fit | None, iso: IsoFlop | None, args: argparse.Namespace
) -> dict[str, Any]:
    """Prints both fits, and returns what is printed."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 120)
    low, high = (f(run.flops for run in runs) for f in (min, max))
    console.print(
        f"{len(runs)} runs, {low:.3g} to {high:.3g} FLOPs; intervals hold {args.level:.0%} of "
        f"{args.resamples} resampled fits"
    )
    found: dict[str, Any] = {
        "level": args.level,
        "samples": args.resamples,
        "runs": [row(run) for run in runs],
    }
    table = Table("", "value", "from", "to", box=None)
    if fit is not None:
        law = fit.law
        console.print("\nlaw: L = E + A/N^alpha + B/D^beta")
        found["law"] = {"residual_rms": rms(fit.residuals)}
        for name in ("E", "A", "B", "alpha", "beta", "exponent"):
            value, interval = getattr(law, name), fit.interval(name, args.level)
            label = "N_best ~ C^" if name == "exponent" else name
            table.add_row(label, f"{value:.4g}", f"{interval[0]:.4g}", f"{interval[1]:.4g}")
            found["law"][name] = {"value": value, "interval": interval}
        console.print(table)
        console.print(f"residuals: {rms(fit.residuals):.2%} of the loss (root of the mean square)")
    if iso is not None:
        console.print(f"\nparabolas through {len(iso.groups)} groups of equal compute")
        table = Table("FLOPs", "runs", "best N", "best D", "D / N", "loss", box=None)
        for group in iso.groups:
            cells = (
                f"{value:.3g}" for value in (group.parameters, group.tokens, group.tokens / group.parameters)
            )
            table.add_row(
                f"{group.flops:.3g}", str(len(group.runs)), *cells, f"{group.loss(group.parameters):.4f}"
            )
        console.print(table)
        found["isoflop"] = {
            "groups": [
                {"flops": g.flops, "runs": len(g.runs), "parameters": g.parameters, "tokens": g.tokens}
                for g in iso.groups
            ]
        }
        for which, name in enumerate(("parameters", "tokens")):
            power, interval = getattr(iso, name), iso.interval(which, args.level)
            console.print(
                f"best {'ND'[which]} ~ C^{power.exponent:.3f}, from {interval[0]:.3f} to {interval[1]:.3f}"
            )
            found["isoflop"][name] = {
                "exponent": power.exponent,
                "factor": power.factor,
                "interval": interval,
            }
    if held_out and fit is not None:
        console.print()
        found["held_out"] = []
        for run in held_out:
            value, low, high = fit.predicted(run.parameters, run.tokens, args.level)
            verdict = "inside" if low <= run.loss <= high else "OUTSIDE"
            off = run.loss / value - 1
            words = (
                f"predicted {value:.4f}, from {low:.4f} to {high:.4f}; measured {run.loss:.4f} "
                f"({off:+.2%}), {verdict} the interval"
            )
            console.print(
                f"not in the fit: {run.name}, {run.flops / max(r.flops for r in runs):.2g} × the largest "
                f"compute: {words}",
                soft_wrap=True,
            )
            found["held_out"].append(
                row(run) | {"predicted": value, "interval": (low, high), "inside": verdict == "inside"}
            )
    return found


def row(run: Run) -> dict[str, Any]:
    """A run as JSON."""
    return {
        "name": run.name,
        "parameters": run.parameters,
        "tokens": run.tokens,
        "flops": run.flops,
        "loss": run.loss,
    }


def rms(values: list[float]) -> float:
    """The root of the mean square."""
    return math.sqrt(sum(value * value for value in values) / len(values))


def spend(runs: list[Run], fit: Fit, args: argparse.Namespace) -> dict[str, Any]:
    """Finds the best model for the budget, writes its config and prints its plan."""
    from megacore.tools.planner.devices import read_cluster, read_device
    from megacore.tools.planner.run_cost import cost_lines
    from megacore.tools.scaling import budget

    largest = max(runs, key=lambda run: run.parameters)
    family = budget.Family(largest.config, args.overrides, args.head_size, args.aspect)
    found = None
    if args.gpu is not None:
        device, cluster = read_device(args.gpu), read_cluster(args.cluster)
        if device.memory_gib is None:
            raise ConfigError("--gpu", f"the memory of {device.name} is not known", "a file that states it")
        memory = device.memory_gib

        def lay_out(optimal: budget.Optimal) -> Any:
            return budget.laid_out(optimal, args.world, device, cluster, memory)

    if args.device_hours is not None:
        optimal, found = budget.for_hours(family, fit.law, args.device_hours, device, lay_out)
    else:
        optimal = family.best(fit.law, args.budget)
        found = lay_out(optimal) if args.gpu is not None else None
    model, train = optimal.config.model, optimal.config.train
    value, low, high = fit.predicted(optimal.parameters, optimal.tokens, args.level)
    print(
        f"\nbest model for {optimal.flops:.4g} FLOPs: {model.num_layers} layers of {model.hidden_size}, "
        f"{model.num_heads} heads: "
        f"N = {optimal.parameters:,}, D = {optimal.tokens:,.0f} tokens "
        f"({optimal.tokens / optimal.parameters:.3g} a parameter), "
        f"{train.steps:,} steps"
    )
    beyond = optimal.flops / max(run.flops for run in runs)
    print(
        f"predicted loss {value:.4f}, from {low:.4f} to {high:.4f}"
        + (f"; {beyond:.3g} × the largest run's compute" if beyond > 1 else "")
    )
    print(f"the rate, optim.lr {optimal.config.optim.lr:g}, is the largest run's: the law says nothing of it")
    if found is not None:
        speed = (
            f"{found.seconds:.4g} s a step, {found.tokens_per_second:,.0f} tokens/s, MFU "
            f"{found.mfu:.1%}, {found.needs_gib:,.1f} GiB"
        )
        print(f"on {args.world} × {args.gpu} over {args.cluster}: {found.describe()}: {speed}")
        print(
            *cost_lines(
                found.config,
                found.seconds,
                optimal.tokens,
                cluster.node_ranks,
                args.price,
                device.power_watts,
            ),
            sep="\n",
        )
        optimal = optimal.laid_out(found.overrides())
    if args.output is not None:
        write_json("--output", args.output, optimal.sections)
        print(f"the config is in {args.output}")
    interval = (low, high)
    return {
        "flops": optimal.flops,
        "parameters": optimal.parameters,
        "tokens": optimal.tokens,
        "loss": value,
        "interval": interval,
    }


def run(argv: list[str]) -> int:
    """Everything that the script does."""
    args = parse(argv)
    every = read_runs([*args.runs, *args.held_out], args.loss, args.last)
    apart = set(map(str, folders(args.held_out)))
    runs, held_out = [r for r in every if r.name not in apart], [r for r in every if r.name in apart]
    few = [r for r in runs if r.tokens < args.least_ratio * r.parameters]
    runs = [r for r in runs if r not in few]
    with report_unless_json(args.json):
        results = fit_and_report(runs, few, held_out, every, args)
    write_results(args.json, json.loads(json.dumps(results).replace("NaN", "null")))
    return 0


def fit_and_report(
    runs: list[Run], few: list[Run], held_out: list[Run], every: list[Run], args: argparse.Namespace
) -> dict[str, Any]:
    """Fit both laws, print and draw them, and return what `--json` writes.

    `few` are runs that are left out, of fewer tokens than `--least-ratio` asks for, and `every` all of them.
    """
    if few:
        print(f"left out, of fewer than {args.least_ratio:g} tokens a parameter: {len(few)} runs")
    for name in undecayed(every):
        print(
            f"warning: {name} ended before its rate had decayed: its loss is higher than such a run's "
            "should be",
            file=sys.stderr,
        )
    fit, no_law = attempt(lambda: parametric.fit(runs, args.resamples))
    iso, no_parabolas = attempt(lambda: isoflop.fit(runs, args.resamples))
    if fit is None and (iso is None or held_out or args.budget is not None or args.device_hours is not None):
        assert no_law is not None
        raise no_law
    found = show(runs, held_out, fit, iso, args)
    for what, error in (("law", no_law), ("parabolas", no_parabolas)):
        if error is not None:
            print(f"\nno {what}: {error.wrong} ({error.right})")
    if fit is not None and (args.budget is not None or args.device_hours is not None):
        found["optimal"] = spend(runs, fit, args)
    if args.plot is not None:
        from megacore.tools.scaling.picture import draw

        try:
            with replaced(args.plot) as aside:
                draw(runs, held_out, fit, iso, args.level, aside)
        except OSError as error:
            raise ConfigError(
                "--plot", f"cannot write {args.plot}: {error.strerror}", "a writable path"
            ) from None
        print(f"\nthe picture is in {args.plot}")
    return found


if __name__ == "__main__":
    exit_with(run)
