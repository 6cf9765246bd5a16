"""Supervise a run: start its launcher, and restart it after failures, until the run has finished or is
asked to stop.
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
import re
from itertools import pairwise
from pathlib import Path

from megacore.errors import ConfigError
from megacore.files import check_folder
from megacore.launch.pretrain import DEEPSPEED, with_deepspeed
from megacore.tools.cli import Parser, exit_with
from megacore.tools.relaunch.fleet import PROBE, Fleet
from megacore.tools.relaunch.hosts import filters_in, hostfile_option, load_any
from megacore.tools.relaunch.scaling import add_options, rules_of, size_of, words_of
from megacore.tools.relaunch.supervisor import Supervisor

EXAMPLE = (
    "python launch/supervise.py deepspeed --hostfile hostfile launch/pretrain.py --config configs/gpt_1b.json"
)
NOTES = (
    "Options come before the launcher's command, whose config should set checkpoint.every. SIGTERM, SIGINT, "
    "SIGUSR1 and SIGHUP let the run save and stop; a second one of the first three ends it at once."
)
STATUS = (
    "0 finished, 2 bad config or arguments, 75 stopped on request after saving, any other: that of the last "
    "start"
)


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "Run a launcher's command and restart it after failures, on the machines that are healthy.",
        example=EXAMPLE,
        notes=NOTES,
        status=STATUS,
        page="docs/operations.md",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=3,
        metavar="N",
        help="restarts in a row without progress after which the run is given up; it is given up earlier if "
        "three starts in a row end for the same reason without progress",
    )
    parser.add_argument(
        "--backoff",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="wait before a restart, in seconds; doubled each time without progress",
    )
    parser.add_argument(
        "--stall",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="restart if no new step is logged or saved for this time, in seconds",
    )
    parser.add_argument(
        "--probe",
        default=PROBE,
        metavar="COMMAND",
        help="command that succeeds if a host answers; {host} is replaced",
    )
    parser.add_argument(
        "--spares",
        type=int,
        default=0,
        metavar="N",
        help="hosts of the hostfile that are only used to replace others",
    )
    parser.add_argument(
        "--hosts-command",
        metavar="COMMAND",
        help="command that prints the hosts with their slots, as a hostfile lists them, instead of a "
        "hostfile",
    )
    parser.add_argument(
        "--world",
        metavar="N|MIN:MAX",
        help="number of ranks, or the fewest and the most; waits while there are fewer",
    )
    add_options(parser)
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="the launcher's command (deepspeed, torchrun, mpirun), with launch/pretrain.py and --config",
    )
    parser.add_alias("--ranks", "--world")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the parsed command line. Raises `ConfigError`."""
    args = parser().parse_args(argv)
    args.command = args.command[args.command[:1] == ["--"] :]
    for option, bad, right in (
        ("restarts", args.restarts < 0, "0 or more"),
        ("backoff", not 0 <= args.backoff < math.inf, "seconds, 0 or more"),
        ("spares", args.spares < 0, "0 or more"),
        ("stall", not args.stall > 0, "seconds, above 0"),
    ):
        if bad:
            raise ConfigError(f"--{option}", f"{getattr(args, option)} is not usable", right)
    return args


def config_in(command: list[str]) -> tuple[str, list[str]]:
    """The config file and the overrides in a launcher's command. Raises `ConfigError` without one."""
    for i, word in enumerate(command):
        if word == "--config" and i + 1 < len(command):
            overrides = [word for word in command if re.match(r"\w+\.\w+=", word)]
            parts = [part for word in command for part in word.split("=", 1)]
            files = [file for option, file in pairwise(parts) if option in DEEPSPEED]
            return command[i + 1], [
                *(stated for file in files for stated in with_deepspeed(file)),
                *overrides,
            ]
    raise ConfigError("arguments", "the command has no --config", EXAMPLE)


def fleet_of(args: argparse.Namespace, config: str, overrides: list[str]) -> Fleet | None:
    """The machines, if a hostfile or a command names them.

    Takes the launcher's filters of hosts out of its command. Raises `ConfigError` for an option that needs
    machines, without them.
    """
    option = hostfile_option(args.command)
    size = None if args.world is None else size_of("--world", args.world)
    rules = rules_of(args, size)
    printed_by: tuple[str, ...] = ()
    if args.hosts_command is not None:
        printed_by = words_of(
            "--hosts-command", args.hosts_command, "a command that prints lines such as `node1 slots=8`"
        )
        if option is not None:
            raise ConfigError("--hosts-command", "stands beside --hostfile", "one of the two")
        if Path(args.command[0]).name != "deepspeed":
            raise ConfigError(
                "--hosts-command", f"{args.command[0]} takes no hostfile from it", "the deepspeed launcher"
            )
    elif option is None:
        for name, given in (
            ("spares", args.spares),
            ("world", args.world),
            ("ranks-command", args.ranks_command),
        ):
            if given:
                wrong = "the command has no --hostfile, whose hosts they would be"
                raise ConfigError(f"--{name}", wrong, "the deepspeed launcher's --hostfile")
        return None
    args.command, include, exclude = filters_in(args.command)
    filters = {"include": include, "exclude": exclude}
    file = None if option is None else option[1]
    return Fleet(
        file, config, overrides, args.probe, rules=rules, printed_by=printed_by, spares=args.spares, **filters
    )


def run(argv: list[str]) -> int:
    """Supervises the run, and returns the exit status."""
    args = parse(argv)
    config, overrides = config_in(args.command)
    loaded = load_any(config, overrides)
    folder = loaded.log.dir
    assert folder is not None
    check_folder("log.dir", folder)
    fleet = fleet_of(args, config, overrides)
    options = {
        "restarts": args.restarts,
        "backoff": args.backoff,
        "stall": args.stall,
        "steps": loaded.train.steps,
    }
    return Supervisor(args.command, Path(folder), fleet=fleet, **options).run()


if __name__ == "__main__":
    exit_with(run)
