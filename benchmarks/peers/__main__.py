"""megacore's speed beside that of other libraries: the same model, batch and layout, in interleaved
rounds, each in its own processes.

Every layout is run twice: with each contender as its users get it, and with the process settings that
megacore gives itself on a CPU (freed memory is kept, oneDNN multiplies fp32). Threads are the same in both.
Both ratios are reported, and a process whose settings turn out otherwise is out.

Every library runs in an environment of its own, made here when it is first needed (see
benchmarks/peers/environments.py). In each round every contender of a layout takes one step, in alternating
order, so that whatever else the machine does meets all of them; a ratio is taken within each round, and
medians count. A library that cannot run is listed with its reason.

Results are written behind every race; the same command goes on with what an interrupted one left, until it is
complete.
"""

import argparse
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import machine
from benchmarks.peers.contenders import (
    LAYOUTS,
    NEEDED_BEFORE,
    PEERS,
    config_of,
    contenders,
    settings_here,
    threads_of,
)
from benchmarks.peers.environments import REQUIREMENTS
from benchmarks.peers.process import SETTINGS, expected
from benchmarks.peers.report import summary, table, write
from benchmarks.rounds import ROOT, race
from megacore.distributed.cpu import WIDENED
from megacore.errors import ConfigError
from megacore.tools.cli import Parser, add_overrides, count, exit_with
from megacore.tools.output_files import check_output
from megacore.tools.verify.layouts import parse as parse_layout

EXAMPLE = "python -m benchmarks.peers --quick"
CONFIG = str(ROOT / "benchmarks" / "speed.json")


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        "Compare megacore's speed with other libraries: same model, batch and layout, in turns.",
        example=EXAMPLE,
        notes="Running the same command again continues an interrupted measurement. Libraries that are not "
        "installed get environments in ~/.cache/megacore-peers.",
        page="benchmarks/README.md",
    )
    parser.add_argument(
        "--config",
        default=CONFIG,
        metavar="FILE",
        help="config of a GPT-2 model (default: benchmarks/speed.json)",
    )
    parser.add_argument("--quick", action="store_true", help="measure 3 rounds instead of 7")
    parser.add_argument("--rounds", type=count, metavar="N", help="measured rounds (default: 7)")
    parser.add_argument(
        "--layouts", default=",".join(LAYOUTS), metavar="LAYOUT,LAYOUT", help="layouts to measure"
    )
    parser.add_argument(
        "--precisions",
        metavar="NAME,NAME",
        help="precisions to measure (default: fp32,bf16; fp32 where a CPU has no bf16 units)",
    )
    parser.add_argument(
        "--peers",
        default=",".join(PEERS),
        metavar="NAME,NAME",
        help=f"libraries to measure, of {', '.join(PEERS)} (default: all)",
    )
    parser.add_argument(
        "--settings",
        default=",".join(SETTINGS),
        metavar="NAME,NAME",
        help="process settings of the other libraries",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="longest time for a step, and for a start, in seconds",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE.json",
        help="results to write, with .md and .png next to it (default: benchmarks/results/peers_DATE.json)",
    )
    parser.add_argument(
        "--before", type=Path, metavar="CHECKOUT", help="also measure another checkout of megacore"
    )
    add_overrides(parser)
    parser.add_alias("--limit", "--timeout")
    args = parser.parse_intermixed_args(argv)
    args.command = shlex.join(["python", "-m", "benchmarks.peers", *argv])
    args.rounds = args.rounds or (3 if args.quick else 7)
    args.output = (
        args.output or ROOT / "benchmarks" / "results" / f"peers_{machine.describe()['date'][:10]}.json"
    )
    check_output("--output", str(args.output))
    if args.before is not None and not (args.before / NEEDED_BEFORE).is_file():
        raise ConfigError("--before", f"{args.before} has no {NEEDED_BEFORE}", "a checkout of megacore")
    args.layouts, args.peers, args.settings = (
        text.split(",") for text in (args.layouts, args.peers, args.settings)
    )
    if unknown := set(args.settings) - set(SETTINGS):
        raise ConfigError("--settings", f"{', '.join(sorted(unknown))} is unknown", " or ".join(SETTINGS))
    for name in args.layouts:
        parse_layout(name)
    if unknown := set(args.peers) - set(PEERS):
        raise ConfigError("--peers", f"{', '.join(sorted(unknown))} is unknown", ", ".join(PEERS))
    emulated = not torch.cuda.is_available() and torch.bfloat16 in WIDENED
    args.precisions = (
        args.precisions.split(",") if args.precisions else ["fp32"] if emulated else ["fp32", "bf16"]
    )
    return args


def begin(args: argparse.Namespace, output: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """A new report, or an interrupted one of the same setting."""
    setting = config_of(args, tuple(args.overrides), 1).model_dump(
        mode="json", by_alias=True, include={"model", "train", "optim"}
    )
    fresh = machine.describe() | {
        "command": args.command,
        "peers": {name: " ".join(REQUIREMENTS[PEERS[name].environment]) for name in args.peers},
        "setting": setting,
        "settings": {kind: SETTINGS[kind] for kind in settings_here() if kind in args.settings},
        "rounds": args.rounds,
        "differs": {name: PEERS[name].differs for name in args.peers},
        **({} if args.before is None else {"before": machine.commit(args.before)}),
        "complete": False,
        "results": {},
    }
    if output.is_file():
        before = json.loads(output.read_text(encoding="utf-8"))
        same = all(
            before.get(key) == fresh.get(key)
            for key in ("peers", "before", "setting", "settings", "rounds", "machine")
        )
        if same and not before["complete"]:
            say(f"going on with {output}: {', '.join(before['results']) or 'nothing yet'} done")
            return before
    return fresh


def main(argv: list[str]) -> None:
    """Runs what is not done yet, and writes it down."""
    args = parse(argv)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    output = args.output
    report = begin(args, output, console.print)
    for layout in args.layouts:
        states = None if torch.cuda.is_available() else expected(threads_of(layout))
        for precision in args.precisions:
            done = report["results"].setdefault(f"{layout}, {precision}", {})
            for kind in report["settings"]:
                if kind in done:
                    continue
                console.rule(f"{layout}, {precision}, {SETTINGS[kind]}", align="left")
                running, absent = contenders(args, layout, precision, kind, states)
                result = race(running, args.config, args.rounds, console.print, limit=args.timeout)
                done[kind] = summary(result, absent)
                write(report, output)
    report["complete"] = True
    write(report, output)
    console.print(table(report))
    console.print(f"written to {output}, .md and .png")


if __name__ == "__main__":
    exit_with(main)
