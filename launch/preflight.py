"""Check the machines of a run before it starts: each machine alone, then process groups and links between
machines.
"""

import os
import sys

# so that a checkout runs without being installed; an installed script has no such folder
if os.path.isdir(os.path.dirname(os.path.realpath(__file__)) + "/../megacore"):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

import megacore.tools.interrupt  # noqa: F401  (first: Ctrl-C during the other imports prints no traceback)

# isort: split
import argparse
import codecs
import json
import socket
from pathlib import Path
from typing import Any

from megacore.config import Config
from megacore.config.schema import resolved
from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError
from megacore.files import read_plain
from megacore.tools.cli import Parser, add_config, add_json, add_overrides, exit_rank_with
from megacore.tools.output_files import check_json, report_unless_json, write_results
from megacore.tools.preflight.facts import Question, facts
from megacore.tools.preflight.host_report import (
    as_json,
    lines,
    settings_lines,
    table,
    together_lines,
    verdict,
)
from megacore.tools.preflight.judge import HostFinding, judge, judge_together
from megacore.tools.preflight.launching import MARK, dry_run, launch_together
from megacore.tools.preflight.patience import say
from megacore.tools.preflight.rank_checks import Meeting, fresh_name, try_links
from megacore.tools.preflight.reach import Hosts
from megacore.tools.relaunch.hosts import SSH, check_ranks, chosen_hosts, read_hostfile
from megacore.tools.settings.launcher_settings import check_launcher
from megacore.tools.settings.load import load, smallest_world

EXAMPLES = (
    "python launch/preflight.py --hostfile hostfile --config configs/gpt_7b.json",
    "srun python launch/preflight.py --config configs/gpt_7b.json",
)
NOTES = (
    "With --hostfile every host is reached over ssh, as by the deepspeed launcher. Without it, the ranks "
    "that a launcher started check their machines, and a single process checks this machine."
)


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "Check the machines of a run before it starts: GPUs, disks, software, process groups and links.",
        example=EXAMPLES,
        notes=NOTES,
        status="0 all hosts pass, 1 some hosts should be left out, 2 wrong config, hostfile or arguments",
        page="docs/operations.md",
        ranks=True,
    )
    add_config(parser)
    parser.add_argument(
        "--hostfile", metavar="FILE", help="hosts of the run, in lines such as `node1 slots=8`"
    )
    parser.add_argument(
        "--exclude",
        default="",
        metavar="HOSTS",
        help="hosts of the hostfile to leave out, as for deepspeed: node1@node2",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=29500,
        metavar="N",
        help="port where the ranks will meet, the launcher's --master_port",
    )
    parser.add_argument(
        "--ssh",
        default=SSH,
        metavar="COMMAND",
        help="command that runs a command line on a host; {host} is replaced",
    )
    add_json(parser, "everything that was found")
    parser.add_argument(
        "--dry-run", action="store_true", help="start nothing; print what a launch would run on each host"
    )
    # ranks that preflight itself has started
    parser.add_argument("--together", action="store_true", help=argparse.SUPPRESS)
    add_overrides(parser)
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the parsed command line. Raises `ConfigError`."""
    args = parser().parse_intermixed_args(argv)
    check_json(args.json)
    if not 0 < args.port < 65536:
        raise ConfigError("--port", f"{args.port} is no port", "from 1 to 65535")
    if args.dry_run and args.hostfile is None:
        raise ConfigError(
            "--dry-run",
            "there is no --hostfile",
            "the hosts of the launch; other launchers tell their own commands",
        )
    if args.dry_run and args.json is not None:
        raise ConfigError("--json", "--dry-run finds nothing that could be written", "one of the two")
    if args.exclude and args.hostfile is None:
        raise ConfigError("--exclude", "there is no --hostfile", "both, or neither")
    return args


def run(argv: list[str], place: RankInfo) -> int:
    """Everything that the script does; returns the exit status."""
    args = parse(argv)
    if args.together:
        result = try_links(args.config, args.overrides, place)
        if place.rank == 0:
            print(MARK + json.dumps(result), flush=True)
        return 0
    if args.hostfile is None:
        return among_ranks(args, place) if place.world_size > 1 else alone(args)
    return over_ssh(args)


def over_ssh(args: argparse.Namespace) -> int:
    """Looks at the hosts of a hostfile."""
    slots = chosen_hosts(read_hostfile(Path(args.hostfile)), "", args.exclude)
    if read_plain(args.hostfile).startswith(codecs.BOM_UTF8):
        print(
            f"warning: {args.hostfile} begins with a byte order mark, which the deepspeed launcher takes for "
            "a part of the first host's name (the file without it)",
            file=sys.stderr,
        )
    check_ranks(slots, args.config, args.overrides)
    world = sum(slots.values())
    config = load(args.config, args.overrides, world).config
    if args.dry_run:
        for line in dry_run(
            slots, args.hostfile, args.exclude, args.port, ["--config", args.config, *args.overrides]
        ):
            print(line)
        return 0
    question = Question(args.config, args.overrides, world, next(iter(slots)), args.port, fresh_name())
    asked = Hosts(slots, args.ssh)
    hosts = asked.ask(question, resolved(config.log.dir), say)
    findings = judge(hosts, slots, need_sharing=saves(config))
    bad = {finding.host for finding in findings if finding.fatal}
    well = {host: count for host, count in slots.items() if host not in bad}
    result: dict[str, Any] | str = ""
    if sum(well.values()) > 1:
        result = launch_together(well, args.config, args.overrides, args.port, not bad, say)
    return tell(args, hosts, findings, result, list(well))


def among_ranks(args: argparse.Namespace, place: RankInfo) -> int:
    """Looks at the machines on which a launcher has started ranks."""
    config = load(args.config, args.overrides, place.world_size).config
    check_launcher(config)
    folder = Path(resolved(config.log.dir))
    # Port 0: where ranks meet, they have met already.
    question = Question(args.config, args.overrides, place.world_size, place.master_address, 0, fresh_name())
    meeting = Meeting(place)
    hosts, slots = meeting.ask(question, folder)
    findings = judge(hosts, slots, need_sharing=saves(config)) if place.rank == 0 else []
    bad = any(finding.fatal for finding in findings)
    result: dict[str, Any] | str = "groups and links are tried once every machine is well"
    if meeting.agree(not bad, folder, question.name):
        result = try_links(args.config, args.overrides, place)
    return tell(args, hosts, findings, result, list(hosts)) if place.rank == 0 else 0


def alone(args: argparse.Namespace) -> int:
    """Looks at this machine."""
    world, host = smallest_world(args.config, args.overrides), socket.gethostname()
    config = load(args.config, args.overrides, world).config
    folder = Path(resolved(config.log.dir)) / (name := fresh_name())
    about = facts(Question(args.config, args.overrides, world, "localhost", args.port, name), host, 1)
    if folder.is_dir():
        folder.rmdir()
    hosts = {host: about | {"ahead": 0.0}}
    return tell(args, hosts, judge(hosts, {host: 1}, need_sharing=False), "", [host])


def saves(config: Config) -> bool:
    """Whether a run saves checkpoints, which all ranks write into one folder."""
    return bool(config.checkpoint.every or config.checkpoint.last)


def tell(
    args: argparse.Namespace,
    hosts: dict[str, dict[str, Any]],
    findings: list[HostFinding],
    result: dict[str, Any] | str,
    names: list[str],
) -> int:
    """Prints what was found; returns the exit status.

    `result`: of all machines together, called `names`, or why there is none.
    """
    findings = [*findings, *(judge_together(result, names) if isinstance(result, dict) else [])]
    unwell = isinstance(result, str) and result and not any(finding.fatal for finding in findings)
    findings += [HostFinding("all hosts together", "links", str(result))] if unwell else []
    from rich.console import Console

    with report_unless_json(args.json):
        console = Console(
            highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200
        )
        console.print(table(hosts, findings))
        more = together_lines(result, names) if isinstance(result, dict) else []
        for line in (*lines(findings), *more, *settings_lines(hosts), verdict(hosts, findings, args.exclude)):
            console.print(line)
    write_results(args.json, as_json(hosts, findings, args.exclude, result))
    return int(any(finding.fatal for finding in findings))


if __name__ == "__main__":
    exit_rank_with(run)
