"""megacore's speed beside that of other libraries: the same model, batch and layout, in interleaved rounds, each in its own processes.

Every library runs in an environment of its own, made here when it is first needed (see benchmarks/peers/environments.py). In each
round every contender of a layout takes one step, in alternating order, so that whatever else the machine does meets all of them;
a ratio is taken within each round, and medians count. A library that cannot run is listed with its reason.

Results are written behind every layout; the same command goes on with what an interrupted one left, until it is complete.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from benchmarks import machine
from benchmarks.charts import grouped_bars
from benchmarks.peers.environments import REQUIREMENTS, python_of
from benchmarks.rounds import ROOT, Contender, Race, race
from megacore.cli import Parser, exit_with
from megacore.config import Config, load
from megacore.distributed.cpu import WIDENED
from megacore.errors import ConfigError
from megacore.verify.layouts import parse as parse_layout

EXAMPLE = "python -m benchmarks.peers --quick"
CONFIG = str(ROOT / "benchmarks" / "speed.json")
OURS = "megacore"
GOAL = 1.15  # of the best peer's median
LAYOUTS = ("one", "dp2", "tp2", "pp2")

# Who takes part in which layouts: kind of contender, environment.
PEERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "transformers": ("transformers", ("one", "dp2")),
    "transformers-compiled": ("transformers", ("one",)),
    "deepspeed": ("deepspeed", ("one", "dp2", "pp2")),
    "megatron-core": ("megatron-core", LAYOUTS),
    "torchtitan": ("torchtitan", LAYOUTS),
}

GPT2 = {
    "norm": "layernorm",
    "activation": "gelu",
    "position": "learned",
    "bias": True,
    "tie_embeddings": True,
    "dropout": 0.0,
    "qk_norm": False,
}

NOT_IDENTICAL = {
    OURS: "oneDNN multiplies fp32 where it is exact; freed memory is kept",
    "transformers": "fp32 weights, under bf16 autocast rounds; DDP over data ranks",
    "transformers-compiled": "the same, model and loss compiled as a whole",
    "deepspeed": "the model of transformers; fp32 ZeRO stage 0, bf16 stage 1; its pipeline cuts by parameters, the head on the last stage",
    "megatron-core": "its layers without Transformer Engine; on a CPU torch.cuda's names stand for the CPU",
    "torchtitan": "Llama: RMS norms, rotary positions, swiglu of as many products (0.4 % fewer here), no biases, embeddings not tied; "
    "parameters sharded over data ranks (FSDP2); PyTorch's attention in place of flex attention",
}


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(EXAMPLE, __doc__)
    parser.add_argument("--config", default=CONFIG, metavar="FILE", help="default: benchmarks/speed.json; GPT blocks as in GPT-2")
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 7")
    parser.add_argument("--rounds", type=int, metavar="N", help="that many rounds")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), metavar="NAMES", help=f"default: {','.join(LAYOUTS)}")
    parser.add_argument("--precisions", metavar="NAMES", help="default: fp32,bf16; fp32 alone where a CPU has no bf16 units")
    parser.add_argument("--peers", default=",".join(PEERS), metavar="NAMES", help=", ".join(PEERS))
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS", help="for a step, and for a start (300)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE.json", help="default: benchmarks/results/peers_<date>.json; .md and .png beside it"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="as for launch/pretrain.py, for all alike")
    args = parser.parse_intermixed_args(argv)
    args.rounds = args.rounds or (3 if args.quick else 7)
    args.layouts, args.peers = args.layouts.split(","), args.peers.split(",")
    for name in args.layouts:
        parse_layout(name)
    if unknown := set(args.peers) - set(PEERS):
        raise ConfigError("--peers", f"{', '.join(sorted(unknown))} is unknown", ", ".join(PEERS))
    emulated = not torch.cuda.is_available() and torch.bfloat16 in WIDENED
    args.precisions = args.precisions.split(",") if args.precisions else ["fp32"] if emulated else ["fp32", "bf16"]
    return args


def contenders(args: argparse.Namespace, layout: str, precision: str) -> tuple[list[Contender], dict[str, str]]:
    """Who runs, and who cannot for want of an environment or because it has no such layout."""
    wanted = parse_layout(layout)
    overrides = (*args.overrides, f"train.precision={precision}", *wanted.overrides())
    if torch.cuda.is_available():
        overrides = (*overrides, "train.device=auto")
    train = settings(args, overrides, wanted.world).train
    tokens = train.global_batch_size * train.seq_len
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // wanted.world)
    running = [Contender(OURS, OURS, tokens, overrides, wanted.world, threads)]
    absent = {}
    for peer in args.peers:
        environment, layouts = PEERS[peer]
        if layout not in layouts:
            absent[peer] = "not compared in this layout"
            continue
        try:
            running.append(Contender(peer, peer, tokens, overrides, wanted.world, threads, python=python_of(environment)))
        except RuntimeError as reason:
            absent[peer] = f"no environment: {reason}"
    return running, absent


def settings(args: argparse.Namespace, overrides: tuple[str, ...], world: int) -> Config:
    """What all are configured from. Raises `ConfigError` for another model than GPT-2's, which is the one that all have."""
    config = load(args.config, list(overrides), world).config
    for key, value in GPT2.items():
        if getattr(config.model, key) != value:
            raise ConfigError(f"model.{key}", f"{getattr(config.model, key)} is not what the peers' model has", str(value))
    return config


def summary(result: Race, absent: dict[str, str]) -> dict[str, Any]:
    """Of one layout and precision, for JSON."""
    ours = result.records.get(OURS)
    entry: dict[str, Any] = {"contenders": {}, "absent": absent | result.failures, "load_averages": result.loads}
    for name, record in result.records.items():
        entry["contenders"][name] = record.summary()
        if ours is not None and name != OURS:
            ratios = [theirs / own for own, theirs in zip(ours.seconds, record.seconds, strict=True)]
            entry["contenders"][name]["megacore_is_times_as_fast"] = {"median": median(ratios), "rounds": ratios}
    return entry


def table(report: dict[str, Any]) -> str:
    """The results in Markdown."""
    cores, gpus = report["machine"]["cores"], ", ".join(report["machine"]["gpus"]) or "no GPU"
    versions = ", ".join(f"{name} {version}" for name, version in (report["versions"] | report["peers"]).items() if version)
    model, train = report["setting"]["model"], report["setting"]["train"]
    lines = [
        f"{report['machine']['processor']}, {cores} cores; {gpus}. {versions}. {report['date'][:10]}.",
        "",
        f"{model['num_layers']} layers, hidden {model['hidden_size']}, {model['num_heads']} heads, sequence {train['seq_len']}, vocabulary "
        f"{model['vocab_size']}, {train['global_batch_size'] // train['micro_batch_size']} microbatches of {train['micro_batch_size']}; "
        f"{report['rounds']} interleaved rounds, medians; the loss is that of the last, on the same random tokens in every step.",
        "",
        "| layout | | tokens/s | lowest–highest | peak MB a rank | megacore is | cores busy with others | loss |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for key, entry in report["results"].items():
        found = sorted(entry["contenders"].items(), key=lambda item: -item[1]["tokens_per_second"]["median"])
        for name, figures in found:
            speed = figures["tokens_per_second"]
            ratio = figures.get("megacore_is_times_as_fast")
            times = "" if ratio is None else f"{ratio['median']:.2f}×"
            cells = [
                key,
                f"**{name}**" if name == OURS else name,
                f"{speed['median']:,.0f}",
                f"{speed['lowest']:,.0f}–{speed['highest']:,.0f}",
            ]
            cells += [f"{figures['memory_bytes'] / 1e6:,.0f}", times, f"{median(figures['cores_busy_with_others']):.1f}"]
            cells.append(f"{figures['losses'][-1]:.3f}" if figures["losses"] else "")
            lines.append(f"| {' | '.join(cells)} |")
        for name, reason in entry["absent"].items():
            if reason != "not compared in this layout":
                lines.append(f"| {key} | {name} | – | {reason.replace('|', '/')} | | | | |")
    lines += ["", f"The goal: {GOAL}× of the best peer's median in every layout.", "", "Not identical:", ""]
    lines += [f"- {name}: {note}" for name, note in NOT_IDENTICAL.items()]
    return "\n".join(lines) + "\n"


def write(report: dict[str, Any], output: Path) -> None:
    """JSON, table and chart."""
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    output.with_suffix(".md").write_text(table(report), encoding="utf-8")
    groups = {
        key: {name: figures["tokens_per_second"]["median"] for name, figures in entry["contenders"].items()}
        for key, entry in report["results"].items()
        if entry["contenders"]
    }
    if groups:
        title = f"{report['machine']['processor']}, {report['machine']['cores']} cores, {report['date'][:10]}"
        grouped_bars(output.with_suffix(".png"), groups, OURS, "tokens a second, median", title)


def begin(args: argparse.Namespace, output: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """A new report, or an interrupted one of the same setting."""
    setting = settings(args, tuple(args.overrides), 1).model_dump(by_alias=True, include={"model", "train", "optim"})
    fresh = machine.describe() | {
        "peers": {name: " ".join(REQUIREMENTS[PEERS[name][0]]) for name in args.peers},
        "setting": setting,
        "rounds": args.rounds,
        "not_identical": NOT_IDENTICAL,
        "complete": False,
        "results": {},
    }
    if output.is_file():
        before = json.loads(output.read_text(encoding="utf-8"))
        same = all(before.get(key) == fresh[key] for key in ("peers", "setting", "rounds", "machine"))
        if same and not before["complete"]:
            say(f"going on with {output}: {', '.join(before['results']) or 'nothing yet'} done")
            return before
    return fresh


def main(argv: list[str]) -> None:
    """Runs what is not done yet, and writes it down."""
    args = parse(argv)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    day = machine.describe()["date"][:10]
    output = args.output or ROOT / "benchmarks" / "results" / f"peers_{day}.json"
    report = begin(args, output, console.print)
    for layout in args.layouts:
        for precision in args.precisions:
            key = f"{layout}, {precision}"
            if key in report["results"]:
                continue
            console.rule(key, align="left")
            running, absent = contenders(args, layout, precision)
            report["results"][key] = summary(race(running, args.config, args.rounds, console.print, limit=args.limit), absent)
            write(report, output)
    report["complete"] = True
    write(report, output)
    console.print(table(report))
    console.print(f"written to {output}, .md and .png")


if __name__ == "__main__":
    exit_with(main)
