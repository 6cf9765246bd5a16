"""Compare an idea with a baseline over several seeds, and report whether the difference is noise."""

import os
import sys

# so that a checkout runs without being installed; an installed script has no such folder
if os.path.isdir(os.path.dirname(os.path.realpath(__file__)) + "/../megacore"):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

import megacore.tools.interrupt  # noqa: F401  (first: Ctrl-C during the other imports prints no traceback)

# isort: split
import argparse
import math
from pathlib import Path

from megacore.distributed.processes import available_cores
from megacore.errors import ConfigError
from megacore.files import check_folder
from megacore.tools.cli import Parser, add_overrides, count, exit_with
from megacore.tools.sweep.before import check_data, places
from megacore.tools.sweep.results import Row
from megacore.tools.versus.comparison import LAST, Comparison
from megacore.tools.versus.contenders import check_alike, matched, opponent, read_contender
from megacore.tools.versus.report import announce, report

EXAMPLE = "python launch/try.py configs/forks/speedrun.py --baseline gpt --seeds 5"
NOTES = (
    "The config is next to the model's file (speedrun.json); the baseline gpt gets it without model.source "
    "and experts. Each learning rate is tried on the first seed, and both models use their best one on all "
    "seeds. Running the same command again keeps finished runs; seeds and rates may be added."
)
MOST_SEEDS = 100


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "Compare an idea with a baseline over several seeds, and report whether the difference is noise.",
        example=EXAMPLE,
        notes=NOTES,
        status="0 all runs finished, 1 some failed, 2 wrong arguments, 75 stopped on request (Ctrl-C)",
        page="docs/research.md",
    )
    parser.add_argument("idea", metavar="FILE", help="custom model (.py) or config (.json) to try")
    parser.add_argument(
        "--baseline",
        default="gpt",
        metavar="FILE",
        help="what to compare with: gpt, a custom model or a config",
    )
    parser.add_argument(
        "--seeds", type=count, default=5, metavar="N", help="number of seeds, each a pair of runs"
    )
    parser.add_argument(
        "--rates",
        default="0.5,1,2",
        metavar="X,X",
        help="factors of the config's learning rates to try",
    )
    parser.add_argument(
        "--match",
        choices=("ffn", "steps", "none"),
        default="ffn",
        help="how the baseline gets the same FLOPs: by its feed-forward size, or by its steps",
    )
    parser.add_argument(
        "--output", metavar="FOLDER", help="folder for all runs and results (default: runs/try_NAME)"
    )
    parser.add_argument(
        "--at-once",
        type=count,
        metavar="N",
        help="runs at a time (default: as many as this machine has cores or GPUs for)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="start nothing; check everything and print what is compared and how long it will take",
    )
    parser.add_argument(
        "--report", action="store_true", help="start nothing; print table and picture of the runs so far"
    )
    add_overrides(parser, "values that replace those of both configs, such as train.steps=100")
    parser.add_alias("--against", "--baseline")
    parser.add_alias("--folder", "--output")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the parsed command line. Raises `ConfigError`."""
    args = parser().parse_intermixed_args(argv)
    if args.seeds > MOST_SEEDS:
        raise ConfigError("--seeds", f"{args.seeds} are more than anybody needs", f"at most {MOST_SEEDS}")
    if args.report and args.dry_run:
        raise ConfigError("--report", "stands beside --dry-run", "one of the two")
    return args


def rates_of(text: str) -> list[float]:
    """The factors, ascending. Raises `ConfigError`."""
    try:
        rates = sorted({float(part) for part in text.split(",")})
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise ConfigError("--rates", f"{text!r} is no list of factors", "numbers above 0, such as 0.5,1,2")
    return rates


def status_of(rows: list[Row]) -> int:
    """The exit status; names the runs that failed."""
    failed = [row.trial.name for row in rows if row.status.startswith("failed")]
    if failed:
        print(
            f"{len(failed)} runs failed: {', '.join(failed[:10])}{' …' if len(failed) > 10 else ''}",
            file=sys.stderr,
        )
    return 1 if failed else 0


def train(comparison: Comparison, at_once: int, gpus: list[str]) -> int:
    """Runs what is missing: first all rates on one seed, then the best of each on the others.

    Returns the exit status.
    """
    from megacore.tools.folder_lock import FolderLock
    from megacore.tools.sweep.local import Local, Stopping

    with Stopping() as stop:
        lock = FolderLock(comparison.folder.path, patience=1.0)
        try:
            lock.take()
        except ConfigError as error:
            raise ConfigError(
                "--output", error.wrong.replace("a run that", "a comparison that"), "its end, or --report"
            ) from None
        comparison.open()  # once more: another one may have ended meanwhile
        comparison.folder.write()
        for rows_of in (comparison.first, comparison.asked):
            missing = [row.trial for row in rows_of() if not row.finished]
            if missing and not stop.requested:
                Local(comparison.folder, at_once, gpus, LAST).run(missing, stop)
        stopped = stop.requested
    rows = comparison.asked()
    if stopped and not all(row.finished for row in rows):
        print("stopped on request; the same command resumes")
        return 75
    return status_of(rows)


def run(argv: list[str]) -> int:
    """Everything that the script does."""
    args = parse(argv)
    rates = rates_of(args.rates)
    idea = read_contender(args.idea, args.overrides)
    other = opponent(idea, args.baseline, args.overrides)
    check_alike(idea, other, args.match)
    other = matched(idea, other, args.match)
    folder = Path(args.output or Path("runs") / f"try_{Path(args.idea).stem}")
    comparison = Comparison((idea, other), rates, args.seeds, folder)
    if args.report:
        if not comparison.folder.read().trials:
            raise ConfigError("--report", f"{folder} holds no comparison yet", "first the runs")
        report(comparison)
        return 0
    trials = list(comparison.trials.values())
    check_data(trials)
    if not args.dry_run or folder.exists():
        check_folder("--output", folder)
    at_once, gpus, gpu = places(args.at_once, trials)

    from megacore.tools.sweep import price

    announce(comparison, args.match)
    threads = max(1, available_cores() // (at_once * max(trial.ranks for trial in trials)))
    price.show(comparison.asked(), price.machine_of(None, None, trials, threads, gpu), at_once, None)
    if args.dry_run:
        return 0
    status = train(comparison, at_once, gpus)
    print()
    report(comparison)
    return status


if __name__ == "__main__":
    exit_with(run)
