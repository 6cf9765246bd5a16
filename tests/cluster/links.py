"""What a slow link between two hosts costs, and what the engine's ways to make gradients smaller save.

Needs root.

Two hosts on one machine with two data ranks each (see `hosts`) train through torchrun: with the link limited
by `tc … tbf`, and without a limit. Bytes are those that both hosts' interfaces have sent in a run, over its
steps. The loss is that of a smaller model.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks import machine
from megacore.errors import ConfigError
from megacore.tools.cli import Parser, exit_with
from megacore.tools.planner.traffic import rank_traffic, sent_by_group
from tests.build import run_of
from tests.cluster.hosts import Hosts, hosts, missing
from tests.pool import ROOT

EXAMPLE = "python -m tests.cluster.links --link-rates 1gbit,unlimited --output benchmarks/results/links.json"
HOSTS, RANKS = 2, 2  # ranks on each host
KINDS: dict[str, dict[str, Any]] = {  # how gradients travel: settings of the engine
    "fp32": {},
    "bf16": {"reduce_dtype": "bf16"},
    "int8": {"compression": {"kind": "int8"}},
    "low rank 4": {"compression": {"kind": "low_rank", "rank": 4}},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "model": {"num_layers": 4, "hidden_size": 512, "num_heads": 8, "vocab_size": 257},
    "train": {
        "seq_len": 128,
        "micro_batch_size": 1,
        "global_batch_size": 4,
        "precision": "bf16",
        "device": "cpu",
    },
    "engine": {"bucket_mib": 4},
    "checkpoint": {"last": False, "resume": "never"},
    "parallel": {"timeout_seconds": 120},
    "log": {"every": 1, "tensorboard": False},
}
SMALL: dict[str, dict[str, Any]] = {
    "model": {"num_layers": 4, "hidden_size": 64, "num_heads": 4},
    "train": {"micro_batch_size": 2, "global_batch_size": 16},
    "optim": {"lr": 3e-3, "warmup_steps": 20},
    "engine": {"bucket_mib": 0.1},
}
SKIPPED = 3  # steps at the beginning of a run that are not timed


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        "Measure what a slow link between two hosts costs, and what smaller gradients save.",
        example=EXAMPLE,
        notes="Starts two hosts in network namespaces of this machine. Needs root.",
        page="benchmarks/README.md",
    )
    parser.add_argument(
        "--link-rates",
        default="1gbit,unlimited",
        metavar="RATE,RATE",
        help="rates of the link, as tc writes them; empty: none",
    )
    parser.add_argument("--steps", type=int, default=12, metavar="N", help="measured steps of each run")
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="measured rounds, each with one run of every kind"
    )
    parser.add_argument(
        "--loss-steps",
        type=int,
        default=200,
        metavar="N",
        help="steps of each run whose loss counts; 0: none",
    )
    parser.add_argument(
        "--kinds",
        default="fp32:1,bf16:1,fp32:2,bf16:2",
        metavar="KIND:LEVELS,KIND:LEVELS",
        help=f"what is sent, of {', '.join(KINDS)}, and engine.reduce_levels",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE.json",
        help="write the results, next to those of the other kinds and rates in the file",
    )
    parser.add_alias("--out", "--output")
    parser.add_alias("--rates", "--link-rates")
    parser.add_alias("--settings", "--kinds")
    return parser.parse_args(argv)


def limit(link: Hosts, rate: str) -> None:
    """Limits what every host sends."""
    for host in range(HOSTS):
        subprocess.run(link.inside(host, "tc", "qdisc", "del", "dev", "eth0", "root"), capture_output=True)
        if rate != "unlimited":
            tbf = f"tc qdisc add dev eth0 root tbf rate {rate} burst 256k latency 50ms"
            subprocess.run(link.inside(host, *tbf.split()), check=True)


def sent(link: Hosts) -> int:
    """Bytes that all hosts have sent."""
    counter = "/sys/class/net/eth0/statistics/tx_bytes"
    mount = "mount -t sysfs none /sys 2>/dev/null; cat " + counter  # each network has a /sys of its own
    return sum(
        int(subprocess.check_output(link.inside(host, "unshare", "-m", "sh", "-c", mount)))
        for host in range(HOSTS)
    )


def train(
    link: Hosts, folder: Path, settings: dict[str, dict[str, Any]], steps: int, *overrides: str
) -> tuple[list[dict[str, Any]], int]:
    """A run's logged steps, and the bytes that hosts have sent."""
    (folder / "config.json").write_text(json.dumps(settings))
    name, before = f"run{time.monotonic_ns()}", sent(link)
    script = [
        str(ROOT / "launch/pretrain.py"),
        "--config",
        f"{folder}/config.json",
        f"log.dir={folder}/{name}",
        f"train.steps={steps}",
    ]
    meet = [
        "--nnodes",
        str(HOSTS),
        "--nproc-per-node",
        str(RANKS),
        "--master-addr",
        "node0",
        "--master-port",
        "29411",
    ]
    started = [
        link.popen(
            host,
            sys.executable,
            "-m",
            "torch.distributed.run",
            *meet,
            "--node-rank",
            str(host),
            *script,
            *overrides,
        )
        for host in range(HOSTS)
    ]
    ended = [process.communicate(timeout=500) for process in started]
    assert all(process.returncode == 0 for process in started), ended
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line], sent(link) - before


def merged(*settings: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Sections' keys of later settings over those of earlier ones."""
    found: dict[str, dict[str, Any]] = {}
    for sections in settings:
        for name, section in sections.items():
            found[name] = found.get(name, {}) | section
    return found


def engine_of(kind: str, levels: int) -> dict[str, dict[str, Any]]:
    """A config's section for a kind."""
    return {"engine": {**KINDS[kind], "reduce_levels": levels}}


def predicted(settings: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The bytes that a rank sends over data ranks in a step, by group."""
    config = run_of(json.loads(json.dumps(settings)), world=HOSTS * RANKS)
    return {
        name: sent
        for name, sent in sent_by_group(rank_traffic(config, RANKS)[0]).items()
        if name.startswith("dp")
    }


def timed(
    link: Hosts,
    folder: Path,
    common: dict[str, dict[str, Any]],
    rate: str,
    variant: tuple[str, int],
    steps: int,
    speeds: list[float],
) -> dict[str, Any]:
    """One run of a setting.

    Adds its speed, that of its median step, to `speeds`, and returns the result's row with all of them.
    """
    settings = merged(common, engine_of(*variant))
    lines, bytes_sent = train(link, folder, settings, steps)
    speeds.append(median(line["tokens_per_second"] for line in lines[SKIPPED:]))
    return {
        "link": rate,
        "dtype": variant[0],
        "levels": variant[1],
        "tokens_per_second": sorted(speeds),
        "link_bytes_per_step": bytes_sent / steps,
        "predicted_bytes_per_rank": predicted(settings),
    }


def kept(file: Path, kind: str, figures: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of `kind` that `file` has of an earlier call and this one has not measured."""
    if not file.exists():
        return []
    measured = {row.get("link") for row in figures[kind]}
    return [row for row in json.loads(file.read_text())[kind] if row.get("link") not in measured]


def run(argv: list[str]) -> None:
    """Measures, and prints a line for each run."""
    args = parse(argv)
    variants = [
        (kind, int(levels)) for kind, levels in (setting.split(":") for setting in args.kinds.split(","))
    ]
    if why_not := missing("tc"):
        raise ConfigError("hosts", why_not, "root, and Debian's iproute2 and openssh-server")
    figures: dict[str, Any] = machine.describe() | {
        "settings": SETTINGS,
        "hosts": HOSTS,
        "ranks on each": RANKS,
        "speed": [],
        "loss": [],
    }
    with tempfile.TemporaryDirectory() as name, hosts(Path(name), HOSTS) as link:
        folder = Path(name)
        prepare = [
            ROOT / "launch/prepare.py",
            "--input",
            ROOT / "megacore",
            "--output",
            folder / "code",
            "--tokenizer",
            "bytes",
        ]
        subprocess.run([sys.executable, *prepare], check=True, stdout=subprocess.DEVNULL)
        common = merged(SETTINGS, {"data": {"train": f"{folder}/code"}})
        for rate in filter(None, args.link_rates.split(",")):
            limit(link, rate)
            speeds: dict[tuple[str, int], list[float]] = {variant: [] for variant in variants}
            rows = []
            # settings take turns, so that what else the machine does meets all of them
            for _ in range(args.rounds):
                rows = [
                    timed(link, folder, common, rate, variant, args.steps, speeds[variant])
                    for variant in variants
                ]
            figures["speed"] += rows
            for row in rows:
                speed, megabytes = row["tokens_per_second"], row["link_bytes_per_step"] / 1e6
                found = (
                    f"{median(speed):.0f} tokens/s ({speed[0]:.0f} to {speed[-1]:.0f}), "
                    f"{megabytes:.1f} MB a step"
                )
                print(f"{rate:>10} {row['dtype']} {row['levels']}: {found}", flush=True)
        limit(link, "unlimited")
        for dtype, levels in variants if args.loss_steps else []:
            settings = merged(common, SMALL, engine_of(dtype, levels))
            lines, _ = train(link, folder, settings, args.loss_steps)
            last = [line["loss"] for line in lines[-10:]]
            figures["loss"].append(
                {"dtype": dtype, "levels": levels, "first": lines[0]["loss"], "last_ten": last}
            )
            print(
                f"{dtype} {levels}: loss {last[-1]:.6f} at step {args.loss_steps}, of the last ten "
                f"{mean(last):.6f}",
                flush=True,
            )
    if args.output is not None:
        figures |= {kind: kept(args.output, kind, figures) + figures[kind] for kind in ("speed", "loss")}
        args.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    exit_with(run)
