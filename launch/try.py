"""Is an idea better than a baseline, and is that more than noise?

Trains both over several seeds; then a table and a picture.
"""

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
from megacore.tools.cli import Parser, count, exit_with
from megacore.tools.sweep.before import check_data, places
from megacore.tools.sweep.results import Row
from megacore.tools.versus.comparison import LAST, Comparison
from megacore.tools.versus.contenders import check_alike, matched, opponent, read_contender
from megacore.tools.versus.report import announce, report

EXAMPLE = "python launch/try.py configs/forks/speedrun.py --against gpt --seeds 5"
MORE = """The fork's config stands beside it (speedrun.json), or is given in its place. The baseline gets it
without model.source and
experts: the same data, layout, optimizer and batches. With --match ffn its feed-forward layers are made as
wide as it takes for the same operations a token, so both have the same tokens and the same FLOPs; with steps
it reads more or fewer tokens instead. Every rate multiplies all learning rates of a config, and is tried on
the first seed; each contender then has its best one on all seeds. A pair of one seed reads the same samples
in the same order, so their difference has less noise than their losses.
The same command goes on: runs that are finished are kept, and seeds and rates may be added.

docs/sweeps.md says more.

Exit status: 0 all runs finished, 1 some failed, 2 bad arguments, 75 stopped on request (Ctrl-C)."""
MOST_SEEDS = 100


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(EXAMPLE, f"{__doc__}\n\n{MORE}")
    parser.add_argument("idea", metavar="FORK.py", help="the fork, or a config")
    parser.add_argument(
        "--against", default="gpt", metavar="WHAT", help="gpt (default), another fork, or a config"
    )
    parser.add_argument(
        "--seeds", type=count, default=5, metavar="N", help="pairs of runs (default: %(default)s)"
    )
    parser.add_argument(
        "--rates",
        default="0.5,1,2",
        metavar="R,R",
        help="times the learning rates of the config (default: %(default)s)",
    )
    parser.add_argument(
        "--match",
        choices=("ffn", "steps", "none"),
        default="ffn",
        help="what makes operations equal (default: ffn)",
    )
    parser.add_argument("--folder", metavar="DIR", help="where all of it is kept (default: runs/try_FORK)")
    parser.add_argument(
        "--at-once",
        type=count,
        metavar="N",
        help="runs at a time (default: as many as there are cores or GPUs)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="checks all, says what is compared and what it takes, and stops",
    )
    parser.add_argument(
        "--report", action="store_true", help="only the table and the picture, of what is there"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="JSON values over both configs, such as train.steps=100",
    )
    args = parser.parse_intermixed_args(argv)
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
                "--folder", error.wrong.replace("a run that", "a comparison that"), "its end, or --report"
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
        print("stopped on request; the same command goes on")
        return 75
    return status_of(rows)


def run(argv: list[str]) -> int:
    """Everything that the script does."""
    args = parse(argv)
    rates = rates_of(args.rates)
    idea = read_contender(args.idea, args.overrides)
    other = opponent(idea, args.against, args.overrides)
    check_alike(idea, other, args.match)
    other = matched(idea, other, args.match)
    folder = Path(args.folder or Path("runs") / f"try_{Path(args.idea).stem}")
    comparison = Comparison((idea, other), rates, args.seeds, folder)
    if args.report:
        if not comparison.folder.read().trials:
            raise ConfigError("--report", f"{folder} holds no comparison yet", "first the runs")
        report(comparison)
        return 0
    trials = list(comparison.trials.values())
    check_data(trials)
    if not args.dry_run or folder.exists():
        check_folder("--folder", folder)
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
