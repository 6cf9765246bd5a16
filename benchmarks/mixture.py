"""A mixture's step beside a dense model's with as many operations a token: whole,
and by part, in each layout.

Both take turns of one plain step and one whose parts are measured (benchmarks/layer_parts.py), in interleaved
rounds; a ratio is taken within each round, and medians count. The dense model is the config without experts;
its feed-forward layers are as large as it needs.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks import machine
from benchmarks.charts import stacked_bars
from benchmarks.contender import BY_PART
from benchmarks.layer_parts import PARTS
from benchmarks.peers.contenders import threads_of
from benchmarks.rounds import ROOT, Contender, race
from megacore.errors import ConfigError
from megacore.tools.cli import Parser, add_overrides, count, exit_with
from megacore.tools.output_files import check_output
from megacore.tools.settings.load import load
from megacore.tools.verify.layouts import parse as parse_layout
from megacore.tools.versus.contenders import matched, opponent, read_contender

EXAMPLE = "python -m benchmarks.mixture --layouts one,dp2ep2 --output mixture.json"
CONFIG = str(ROOT / "configs" / "moe_tiny.json")
SUMMARY = (("median", 1e3, ".0f"), ("times the dense step", 1.0, ".2f"))
MIXTURE, DENSE, BEFORE = "mixture", "dense", "mixture before"


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        "Compare the step of an MoE model with that of a dense model of equal FLOPs.",
        example=EXAMPLE,
        page="benchmarks/README.md",
    )
    parser.add_argument(
        "--config",
        default=CONFIG,
        metavar="FILE",
        help="config of an MoE model (default: configs/moe_tiny.json)",
    )
    parser.add_argument("--layouts", default="one,dp2ep2", metavar="LAYOUT,LAYOUT", help="layouts to measure")
    parser.add_argument("--rounds", type=count, default=9, metavar="N", help="measured rounds")
    parser.add_argument(
        "--before", type=Path, metavar="CHECKOUT", help="also measure the MoE model of another checkout"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE.json", help="write the results, with a chart next to it"
    )
    add_overrides(parser)
    args = parser.parse_intermixed_args(argv)
    if args.output is not None:
        check_output("--output", str(args.output))
    args.layouts = args.layouts.split(",")
    for name in args.layouts:
        parse_layout(name)
    return args


def measure(args: argparse.Namespace, layout: str, dense: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Both in one layout."""
    wanted = parse_layout(layout)
    own = (*args.overrides, "train.device=cpu", *wanted.overrides())
    plain = tuple(override for override in own if not override.startswith("parallel.expert"))
    config = load(args.config, [*own], wanted.world).config
    place: dict[str, Any] = {"ranks": wanted.world, "threads": threads_of(layout)}
    tokens = config.train.global_batch_size * config.train.seq_len
    running = [
        Contender(MIXTURE, BY_PART, tokens, own, **place),
        Contender(DENSE, BY_PART, tokens, plain, config=dense, **place),
    ]
    if args.before is not None:
        running.append(Contender(BEFORE, BY_PART, tokens, own, checkout=args.before, **place))
    found = race(running, args.config, args.rounds, say)
    models = {}
    for name, record in found.records.items():
        whole, *parts = ([turn[i] for turn in record.turns] for i in range(len(PARTS) + 1))
        models[name] = {
            "seconds": whole,
            "median": median(whole),
            "parts": {part: median(seconds) for part, seconds in zip(PARTS, parts, strict=True)},
            "times the dense step": median(
                a / b for a, b in zip(whole, found.records[DENSE].seconds, strict=True)
            ),
            "cores busy with others": median(record.others),
        }
    return {"models": models, "failures": found.failures, "load_averages": found.loads}


def dense_layout(layout: str) -> str:
    """The same without ranks of experts."""
    return re.sub(r"et?p\d+", "", layout) or "one"


def table(report: dict[str, Any]) -> str:
    """Milliseconds by part, and what the mixture takes more."""
    lines = []
    for layout, result in report["layouts"].items():
        models = result["models"]
        lines += [f"| {layout}, ms | {' | '.join(models)} |", f"|---|{'---:|' * len(models)}"]
        for part in PARTS:
            values = [own["parts"][part] for own in models.values()]
            if max(values) > 0:
                lines.append(f"| {part} | {' | '.join(f'{1e3 * seconds:.1f}' for seconds in values)} |")
        whole, ratios = (
            [f"{factor * own[key]:{form}}" for own in models.values()] for key, factor, form in SUMMARY
        )
        lines += [
            f"| a plain step | {' | '.join(whole)} |",
            f"| times the dense one | {' | '.join(ratios)} |",
            "",
        ]
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Measures every layout, and writes it down."""
    args, console = parse(argv), Console(highlight=False, markup=False, soft_wrap=True, stderr=True)
    idea = read_contender(args.config, args.overrides)
    if idea.config.model.num_experts is None:
        raise ConfigError(
            "--config", f"{Path(args.config).name} has no experts", "such as configs/moe_tiny.json"
        )
    dense = matched(idea, opponent(idea, "gpt", []), "ffn")
    report: dict[str, Any] = machine.describe() | {
        "config": Path(args.config).name,
        "overrides": args.overrides,
        "operations a token": {MIXTURE: idea.flops, DENSE: dense.flops},
        "parameters": {MIXTURE: idea.parameters, DENSE: dense.parameters},
        "dense feed-forward features": dense.config.model.ffn_size,
        "rounds": args.rounds,
        **({} if args.before is None else {"before": machine.commit(args.before)}),
        "layouts": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "dense.json")
        path.write_text(json.dumps(dense.sections), encoding="utf-8")
        for layout in args.layouts:
            console.rule(layout, align="left")
            report["layouts"][layout] = measure(args, layout, str(path), console.print)
    print(table(report))
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        bars = {
            f"{name}, {layout if name == MIXTURE else dense_layout(layout)}": {
                part: 1e3 * each for part, each in own["parts"].items()
            }
            for layout, result in report["layouts"].items()
            for name, own in result["models"].items()
            if name != BEFORE
        }
        stacked_bars(
            args.output.with_suffix(".png"), bars, "milliseconds of a step", report["machine"]["processor"]
        )


if __name__ == "__main__":
    exit_with(main)
