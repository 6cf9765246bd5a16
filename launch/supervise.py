"""Keeps a run going: starts its launcher, and restarts it when it fails, until the run has finished or is asked to stop."""

import argparse
import math
import re
import sys
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that a checkout runs without being installed

from launch.pretrain import DEEPSPEED, with_deepspeed
from megacore.errors import ConfigError
from megacore.files import check_folder
from megacore.tools.cli import Parser, exit_with
from megacore.tools.relaunch.hosts import PROBE, Fleet, filters_in, hostfile_option, load_any
from megacore.tools.relaunch.supervisor import Supervisor

EXAMPLE = "python launch/supervise.py deepspeed --hostfile hostfile launch/pretrain.py --config configs/gpt_1b.json"
MORE = """Options come before the launcher's command (deepspeed, torchrun, mpirun, …). Set checkpoint.every in it.
With a hostfile, machines that do not answer are left out, and where it changes the run goes on with the others: the same
global batch, laid out anew. SIGTERM, SIGINT, SIGUSR1 and SIGHUP (a closed terminal) let the run save and stop; a second one,
but of SIGHUP, ends it at once.
Where the supervisor is killed itself, its run saves and stops.
Exit status: 0 finished, 2 bad config, 75 stopped on request after saving, else that of the last start."""


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(EXAMPLE, f"{__doc__}\n{MORE}")
    parser.add_argument(
        "--restarts", type=int, default=3, metavar="N", help="gives up after so many restarts in a row without progress (3)"
    )
    parser.add_argument(
        "--backoff", type=float, default=5.0, metavar="SECONDS", help="wait before a restart, doubled each time without progress (5)"
    )
    parser.add_argument(
        "--stall", type=float, default=1800.0, metavar="SECONDS", help="restart if no new step is logged or saved for so long (1800)"
    )
    parser.add_argument("--probe", default=PROBE, metavar="COMMAND", help=f"succeeds if {{host}} answers ({PROBE})")
    parser.add_argument(
        "--spares", type=int, default=0, metavar="N", help="hosts of the hostfile that are only used in the place of others (0)"
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the launcher's command, with launch/pretrain.py and --config"
    )
    args = parser.parse_args(argv)
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
            return command[i + 1], [*(stated for file in files for stated in with_deepspeed(file)), *overrides]
    raise ConfigError("arguments", "the command has no --config", EXAMPLE)


def run(argv: list[str]) -> int:
    """Supervises the run, and returns the exit status."""
    args = parse(argv)
    config, overrides = config_in(args.command)
    loaded = load_any(config, overrides)
    folder = loaded.log.dir
    assert folder is not None
    option = hostfile_option(args.command)
    fleet = None
    if option is None and args.spares:
        raise ConfigError("--spares", "the command has no --hostfile, whose hosts they would be", "the deepspeed launcher's --hostfile")
    if option is not None:
        args.command, include, exclude = filters_in(args.command)
        fleet = Fleet(option[1], config, overrides, args.probe, spares=args.spares, include=include, exclude=exclude)
    check_folder("log.dir", folder)
    options = {"restarts": args.restarts, "backoff": args.backoff, "stall": args.stall, "steps": loaded.train.steps}
    return Supervisor(args.command, Path(folder), fleet=fleet, **options).run()


if __name__ == "__main__":
    exit_with(run)
