"""Train with an injected fault, and report when it was noticed, what was lost, and whether the weights
are those of a run without it.
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
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError
from megacore.files import check_folder, write_json
from megacore.tools.cli import Parser, add_config, add_overrides, exit_rank_with, exit_with
from megacore.tools.settings.load import load, smallest_world

if TYPE_CHECKING:
    from tests.drills.drills import Drill, Outcome
    from tests.drills.faults import Fault

EXAMPLE = "python launch/drill.py --config configs/gpt_tiny.json --fault kill:rank=3,step=7 parallel.tensor=2"
NOTES = (
    "Fault kinds: kill, stop, exit, exception, oom, hang, slow, nan, sigterm, disk_full, corrupt (the newest "
    "of two checkpoints). Each strikes one rank at the start of one step. A run has 12 steps and saves a "
    "checkpoint every 4 steps unless overrides change that."
)
MOST_RANKS = 1024  # of one machine
SHORT = ["train.steps=12", "checkpoint.every=4", "log.every=1", "log.tensorboard=false"]


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "Train with injected faults and check that the run recovers with the weights of a run without them.",
        example=EXAMPLE,
        notes=NOTES,
        status="0 recovered as expected, 1 otherwise, 2 wrong arguments",
        page="docs/operations.md",
    )
    add_config(parser)
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="KIND:rank=R,step=N",
        help="fault to inject; may be repeated",
    )
    parser.add_argument(
        "--soak",
        type=float,
        metavar="SECONDS",
        help="instead of --fault: kill random ranks for this time, in seconds, then let the run finish",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed of --soak")
    parser.add_argument(
        "--world",
        type=int,
        metavar="N",
        help="number of ranks of every run (default: 4, or more if the layout needs them)",
    )
    parser.add_argument(
        "--hang-seconds",
        type=float,
        default=6.0,
        metavar="SECONDS",
        help="parallel.hang_seconds of the runs: the time without progress that counts as a hang",
    )
    parser.add_argument(
        "--launcher",
        metavar="COMMAND",
        help="command that starts the ranks; {ranks} and {port} are replaced (default: torchrun)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/drill"),
        metavar="FOLDER",
        help="folder for the runs, their output and drill.json; earlier drills in it are deleted",
    )
    parser.add_argument("--verbose", action="store_true", help="also print the output of the runs")
    add_overrides(parser)
    parser.add_alias("--ranks", "--world")
    parser.add_alias("--watch", "--hang-seconds")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    args = parser().parse_intermixed_args(argv)
    if args.soak is None and not args.fault:
        raise ConfigError(
            "--fault", "neither a fault nor --soak is given", "such as --fault kill:rank=0,step=7"
        )
    if args.soak is not None and args.fault:
        raise ConfigError("--soak", "kills random ranks, and --fault a certain one", "one of the two")
    for option, bad, right in (
        ("soak", args.soak is not None and not 0 < args.soak < math.inf, "seconds, above 0"),
        ("world", args.world is not None and not 1 <= args.world <= MOST_RANKS, f"1 to {MOST_RANKS}"),
        (
            "output",
            args.output == Path(),
            "a folder of its own: what is in it from earlier drills is deleted",
        ),
        ("hang-seconds", not 0 < args.hang_seconds < math.inf, "seconds, above 0"),
    ):
        if bad:
            value = getattr(args, option.replace("-", "_"))
            raise ConfigError(f"--{option}", f"{value} is not usable", right)
    return args


def run(argv: list[str]) -> int:
    """Runs one calm run, and then the drills. Returns the exit status."""
    args = parse(argv)
    try:
        from tests.drills.drills import TORCHRUN, Drill, check_launcher
        from tests.drills.faults import check
        from tests.drills.faults import parse as parse_fault
    except ModuleNotFoundError:
        wrong = "the faults are in tests/drills, which an installed megacore does not have"
        raise ConfigError("drill", wrong, "python launch/drill.py in a checkout") from None

    faults = [parse_fault(text) for text in args.fault]
    overrides = [*SHORT, f"parallel.hang_seconds={args.hang_seconds}", *args.overrides]
    ranks = args.world if args.world is not None else max(4, smallest_world(args.config, overrides))
    config = load(args.config, overrides, ranks).config
    for fault in faults:
        check(fault, config, ranks)
    launcher = TORCHRUN if args.launcher is None else args.launcher
    check_launcher(launcher)
    check_folder("--output", args.output)
    drill = Drill(args.config, overrides, ranks, args.output, launcher, args.verbose)
    if args.soak is not None:
        found = drill.soak(args.soak, args.seed)
        print(json.dumps(found, indent=2))
        return 0 if found["as_expected"] else 1
    outcomes = drilled(drill, faults)
    show(outcomes)
    write_json("--output", args.output / "drill.json", [asdict(outcome) for outcome in outcomes])
    return 0 if all(outcome.as_expected for outcome in outcomes) else 1


def drilled(drill: "Drill", faults: list["Fault"]) -> list["Outcome"]:
    """Runs the drills, and prints each outcome."""
    calm = drill.calm()
    outcomes = []
    for fault in faults:
        outcomes.append(drill.strike(fault, calm))
        print(f"{fault.name}: {outcomes[-1].cause or 'its cause was not named'}", flush=True)
    return outcomes


def show(outcomes: list["Outcome"]) -> None:
    """Prints the report as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "fault", "noticed after", "restarts", "steps lost", "weights of the calm run", "as it should be"
    )
    for each in outcomes:
        noticed = "not" if each.noticed_seconds is None else f"{each.noticed_seconds:.1f} s"
        lost = "never struck" if each.steps_lost is None else str(each.steps_lost)
        same = "yes, bitwise" if each.same_weights else "no"
        table.add_row(
            each.fault, noticed, str(each.restarts), lost, same, "yes" if each.as_expected else "NO"
        )
    Console(highlight=False, width=140).print(table)


def strike(argv: list[str], place: RankInfo) -> int:
    """Runs one rank of a drill: launch/pretrain.py with the fault after --strike."""
    from megacore.launch import pretrain
    from tests.drills.faults import install
    from tests.drills.faults import parse as parse_fault

    at = argv.index("--strike")
    install(parse_fault(argv[at + 1]))
    return pretrain.run(argv[:at] + argv[at + 2 :], place)


if __name__ == "__main__":
    if "--strike" in sys.argv:
        exit_rank_with(strike)
    exit_with(run)
