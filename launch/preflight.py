"""Looks at the machines of a run before it starts: each by itself first, then the groups and links between them."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that a checkout runs without being installed

from megacore.cli import Parser, exit_with
from megacore.config import Config, load
from megacore.config.schema import resolved
from megacore.errors import ConfigError
from megacore.preflight.facts import Question
from megacore.preflight.judge import Finding, judge
from megacore.preflight.reach import SSH, Hosts, fresh_name
from megacore.preflight.report import as_json, lines, settings_lines, table, verdict
from megacore.survive.hosts import check_ranks, chosen_hosts, read_hostfile

EXAMPLE = "python launch/preflight.py --hostfile hostfile --config configs/gpt_7b.json"
MORE = """Exit status: 0 all hosts pass, 1 some should be left out, 2 bad config, hostfile or arguments."""


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(EXAMPLE, f"{__doc__}\n{MORE}")
    parser.add_argument("--hostfile", required=True, metavar="FILE", help="lines such as `node1 slots=8`")
    parser.add_argument("--config", required=True, metavar="FILE", help="the run's config")
    parser.add_argument("--exclude", default="", metavar="HOSTS", help="hosts to leave out, as for deepspeed: node1@node2")
    parser.add_argument("--port", type=int, default=29500, metavar="N", help="where ranks will meet, the launcher's --master_port (29500)")
    parser.add_argument("--ssh", default=SSH, metavar="COMMAND", help=f"runs a command line on {{host}} ({SSH})")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of a table")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="as for pretrain.py")
    args = parser.parse_intermixed_args(argv)
    if not 0 < args.port < 65536:
        raise ConfigError("--port", f"{args.port} is no port", "from 1 to 65535")
    return args


def run(argv: list[str]) -> int:
    """Everything that the script does; returns the exit status."""
    args = parse(argv)
    slots = chosen_hosts(read_hostfile(Path(args.hostfile)), "", args.exclude)
    check_ranks(slots, args.config, args.overrides)
    world = sum(slots.values())
    config = load(args.config, args.overrides, world).config
    question = Question(args.config, args.overrides, world, next(iter(slots)), args.port, fresh_name())
    hosts = Hosts(slots, args.ssh).ask(question, resolved(config.log.dir), say)
    findings = judge(hosts, slots, need_sharing=saves(config))
    show(hosts, findings, args)
    return int(any(finding.fatal for finding in findings))


def saves(config: Config) -> bool:
    """Whether a run saves checkpoints, which all ranks write into one folder."""
    return bool(config.checkpoint.every or config.checkpoint.last)


def show(hosts: dict[str, dict[str, Any]], findings: list[Finding], args: argparse.Namespace) -> None:
    """Prints what was found."""
    if args.json:
        print(json.dumps(as_json(hosts, findings, args.exclude), indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)
    console.print(table(hosts, findings))
    for line in (*lines(findings), *settings_lines(hosts), verdict(hosts, findings, args.exclude)):
        console.print(line)


def say(line: str) -> None:
    """Writes what is being done to stderr."""
    print(f"preflight: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    exit_with(run)
