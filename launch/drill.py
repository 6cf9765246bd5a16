"""Trains with a fault and shows when it was noticed, what was lost, and whether the weights
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
from megacore.tools.cli import Parser, exit_rank_with, exit_with
from megacore.tools.settings.load import load, smallest_world

if TYPE_CHECKING:
    from tests.drills.drills import Drill, Outcome
    from tests.drills.faults import Fault

EXAMPLE = (
    "python launch/drill.py --config configs/gpt_tiny.json --fault kill:rank=3,step=7 --fault "
    "nan:rank=0,step=5 parallel.tensor=2"
)
MORE = """Faults: kill, stop, exit, exception, oom, hang, slow, nan, sigterm, disk_full, corrupt (the newest
of two checkpoints); each strikes one rank at the beginning of one step. Every run has 12 steps and a
checkpoint every 4 unless overridden. With --soak, random ranks are killed for so many seconds instead.
Exit status: 0 if all went as it should, 1 if not."""
MOST_RANKS = 1024  # of one machine
SHORT = ["train.steps=12", "checkpoint.every=4", "log.every=1", "log.tensorboard=false"]


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(EXAMPLE, f"{__doc__}\n{MORE}")
    parser.add_argument(
        "--config", required=True, metavar="FILE", help="a JSON file, such as configs/gpt_tiny.json"
    )
    parser.add_argument(
        "--fault", action="append", default=[], metavar="KIND:rank=R,step=N", help="may be given again"
    )
    parser.add_argument(
        "--soak", type=float, metavar="SECONDS", help="kill random ranks for so long, then let the run finish"
    )
    parser.add_argument("--seed", type=int, default=0, help="of --soak")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="ranks of every run (4, or as many as the layout needs)"
    )
    parser.add_argument(
        "--watch", type=float, default=6.0, metavar="SECONDS", help="parallel.hang_seconds of the runs (6)"
    )
    parser.add_argument(
        "--launcher", metavar="COMMAND", help="in place of torchrun; {ranks} and {port} are filled in"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/drill"),
        metavar="FOLDER",
        help="where the runs, their output and drill.json go (runs/drill)",
    )
    parser.add_argument("--verbose", action="store_true", help="also show what the runs say")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="JSON values over the file's"
    )
    args = parser.parse_intermixed_args(argv)
    if args.soak is None and not args.fault:
        raise ConfigError(
            "--fault", "neither a fault nor --soak is given", "such as --fault kill:rank=0,step=7"
        )
    if args.soak is not None and args.fault:
        raise ConfigError("--soak", "kills random ranks, and --fault a certain one", "one of the two")
    for option, bad, right in (
        ("soak", args.soak is not None and not 0 < args.soak < math.inf, "seconds, above 0"),
        ("ranks", args.ranks is not None and not 1 <= args.ranks <= MOST_RANKS, f"1 to {MOST_RANKS}"),
        (
            "output",
            args.output == Path(),
            "a folder of its own: what is in it from earlier drills is deleted",
        ),
        ("watch", not 0 < args.watch < math.inf, "seconds, above 0"),
    ):
        if bad:
            raise ConfigError(f"--{option}", f"{getattr(args, option)} is not usable", right)
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
    overrides = [*SHORT, f"parallel.hang_seconds={args.watch}", *args.overrides]
    ranks = args.ranks if args.ranks is not None else max(4, smallest_world(args.config, overrides))
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
