"""Ring against gather against ulysses: what context ranks send for one attention, and how long it
takes, beside what is predicted.

Four ranks run attention, forward and backward, over sequences that they divide, by each method in turn. Bytes
are counted where they are sent, and predicted by the planner's formulas. The time is the slowest rank's, the
median of the rounds. It is predicted as that of the same attention on keys that are there already, plus all
transfers one after the other, by lines fitted to the group's operations
in the same process: ranks that share cores cannot compute while they send.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import machine
from benchmarks.collectives import fit
from benchmarks.collectives import seconds as seconds_of
from benchmarks.figures import BLUE, GREY, ORANGE
from benchmarks.training import join
from benchmarks.wire import Wire
from megacore.config import Config
from megacore.context_parallel.attention import Sequences, attend, gathered
from megacore.context_parallel.ring_blocks import DocumentAttention
from megacore.distributed.collectives import all_reduce
from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import RankInfo
from megacore.tools.charts import new_figure
from megacore.tools.choices.context_method import METHODS
from megacore.tools.cli import Parser, count, exit_rank_with
from megacore.tools.output_files import check_output
from megacore.tools.planner.plot import check_plot
from megacore.tools.planner.traffic import Transfer, rank_traffic, ring_share
from megacore.tools.settings.load import resolve

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = (
    "python -m benchmarks.context --output benchmarks/results/context.json --plot docs/figures/context.png"
)
RANKS, HEADS, HEAD = 4, 8, 64
OPERATIONS = ("all_gather", "reduce_scatter", "all_to_all", "send")


def config_of(method: str, seq_len: int, kv_heads: int) -> Config:
    """One block with such an attention, over one sequence."""
    model = {
        "num_layers": 1,
        "num_heads": HEADS,
        "num_kv_heads": kv_heads,
        "hidden_size": HEADS * HEAD,
        "vocab_size": 2,
    }
    train = {
        "precision": "fp32",
        "seq_len": seq_len,
        "micro_batch_size": 1,
        "global_batch_size": 1,
        "device": "cpu",
    }
    parallel = {"context": RANKS, "context_method": method}
    return resolve({"model": model, "train": train, "parallel": parallel}, [], "context", RANKS).config


def slowest(act: Callable[[], object], mesh: Mesh, rounds: int) -> float:
    """The median over rounds, after one that does not count, of the slowest rank's seconds; collective."""
    own = []
    for _ in range(1 + rounds):
        mesh.barrier()
        started = perf_counter()
        act()
        own.append(perf_counter() - started)
    return median(
        all_reduce(torch.tensor(own[1:], dtype=torch.float64), mesh.world, dist.ReduceOp.MAX).tolist()
    )


def tensors(config: Config) -> list[Tensor]:
    """This rank's q, k and v."""
    heads = (HEADS, config.kv_heads, config.kv_heads)
    return [torch.randn(1, n, config.rank_tokens, HEAD).requires_grad_() for n in heads]


def attention(config: Config, mesh: Mesh, *, sends: bool) -> Callable[[], None]:
    """Forward and backward of this rank's queries; without `sends` the keys of all
    ranks are there already.
    """
    sequences = Sequences(config.train.seq_len, mesh.cp, config.parallel.context_method)
    q, k, v = tensors(config)
    keys, values = (x.requires_grad_() for x in gathered(k.detach(), v.detach(), sequences))
    found = sequences.with_keys(sequences.everything, q)

    def act() -> None:
        y = (
            attend(q, k, v, sequences, 0.125)
            if sends
            else DocumentAttention.apply(q, keys, values, found, 0.125, False)
        )
        y.backward(torch.ones_like(y))

    return act


def lines(mesh: Mesh, largest: int, rounds: int) -> dict[str, Any]:
    """For each operation of the group the line through its times, up to `largest` bytes
    that a rank sends; collective.
    """
    fitted = {}
    for operation in OPERATIONS:
        points = []
        for share in (64, 8, 2, 1):
            size = int(largest / share / ring_share(operation, mesh.cp.size)) // 64 * 64
            points.append(
                (
                    size * ring_share(operation, mesh.cp.size),
                    seconds_of(operation, mesh.cp, size, mesh, rounds),
                )
            )
        fitted[operation] = fit(points)
    return fitted


def measure(mesh: Mesh, seq_len: int, kv_heads: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each method; collective."""
    rows: list[dict[str, Any]] = []
    configs = [config_of(method, seq_len, kv_heads) for method in METHODS]
    planned = [attention_transfers(config) for config in configs]
    largest = max(int(t.sent_bytes / t.calls) for transfers in planned for t in transfers)
    fitted = lines(mesh, largest, rounds)
    alone = slowest(attention(configs[0], mesh, sends=False), mesh, rounds)
    for config, transfers in zip(configs, planned, strict=True):
        act = attention(config, mesh, sends=True)
        with Wire(mesh, lambda name: nullcontext()) as wire:
            act()
        row: dict[str, Any] = {
            "method": config.parallel.context_method,
            "seq_len": seq_len,
            "kv_heads": kv_heads,
        }
        row |= {
            "bytes": sum(t.sent_bytes for t in wire.transfers()),
            "predicted_bytes": sum(t.sent_bytes for t in transfers),
        }
        row |= {"seconds": slowest(act, mesh, rounds), "attention_seconds": alone}
        row["transfer_seconds"] = sum(
            t.calls * fitted[t.operation].seconds(t.sent_bytes / t.calls) for t in transfers
        )
        rows.append(row)
    return rows


def attention_transfers(config: Config) -> list[Transfer]:
    """What the planner says that a rank sends for attention."""
    return [t for t in rank_traffic(config)[0] if t.group == "cp" and t.operation != "all_reduce"]


def draw(report: dict[str, Any], path: Path) -> None:
    """Bytes and seconds of each method: what was measured beside what was predicted."""
    cases = list(dict.fromkeys((row["seq_len"], row["kv_heads"]) for row in report["rows"]))
    drawn = new_figure(5.7)
    grid = drawn.subplots(2, len(cases), squeeze=False, sharey="row")
    for column, (seq_len, kv_heads) in enumerate(cases):
        rows = [row for row in report["rows"] if (row["seq_len"], row["kv_heads"]) == (seq_len, kv_heads)]
        at = range(len(rows))
        sent, taken = grid[0][column], grid[1][column]
        for axes, key, scale in ((sent, "bytes", 1e6), (taken, "seconds", 1.0)):
            axes.bar(
                [x - 0.2 for x in at], [row[key] / scale for row in rows], 0.36, color=BLUE, label="measured"
            )
        sent.bar(
            [x + 0.2 for x in at],
            [row["predicted_bytes"] / 1e6 for row in rows],
            0.36,
            color=ORANGE,
            label="predicted",
        )
        work = [row["attention_seconds"] for row in rows]
        taken.bar([x + 0.2 for x in at], work, 0.36, color=GREY, label="predicted: attention alone")
        taken.bar(
            [x + 0.2 for x in at],
            [row["transfer_seconds"] for row in rows],
            0.36,
            work,
            color=ORANGE,
            label="predicted: transfers",
        )
        sent.set_title(
            f"{seq_len:,} tokens, {HEADS} heads, {kv_heads} key/value heads", loc="left", fontsize=10
        )
        for axes in (sent, taken):
            axes.set_xticks(list(at), [row["method"] for row in rows])
            axes.spines[["top", "right"]].set_visible(False)
    grid[0][0].set_ylabel("sent by a rank, MB")
    grid[1][0].set_ylabel("seconds")
    handles = {
        label: bar for axes in grid.flat for bar, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    drawn.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )
    where = (
        f"{report['machine']['processor']}, {report['machine']['cores']} cores for {RANKS} ranks, gloo, fp32"
    )
    drawn.suptitle(f"One attention, forward and backward\n{where}", x=0.01, ha="left", fontsize=10)
    drawn.savefig(path)


def show(rows: list[dict[str, Any]]) -> None:
    """A line for each method, in Markdown."""
    print("tokens | key/value heads | method | sent, MB | predicted | seconds | predicted | of it transfers")
    print("|".join(["---:", "---:", "---", *["---:"] * 5]))
    for row in rows:
        sent = (row[key] / 1e6 for key in ("bytes", "predicted_bytes"))
        seconds = row["seconds"], row["attention_seconds"] + row["transfer_seconds"], row["transfer_seconds"]
        cells = [
            f"{row['seq_len']:,}",
            row["kv_heads"],
            row["method"],
            *(f"{x:.2f}" for x in sent),
            *(f"{x:.3f}" for x in seconds),
        ]
        print(" | ".join(map(str, cells)))


def start(args: argparse.Namespace) -> dict[str, Any]:
    """Measures in ranks of its own. Raises `RuntimeError` with what they say if they fail."""
    options = ["--lengths", args.lengths, "--kv-heads", args.kv_heads, "--rounds", str(args.rounds)]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(RANKS),
        "-m",
        "benchmarks.context",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*launcher, *options], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return machine.describe() | {
        "ranks": RANKS,
        "rounds": args.rounds,
        "rows": json.loads(done.stdout.splitlines()[-1]),
    }


def main(argv: list[str], place: RankInfo) -> None:
    """The table, or one rank's part in it."""
    parser = Parser(
        "Compare ring, gather and ulysses: bytes sent and time of attention over divided sequences.",
        example=EXAMPLE,
        notes="Starts four gloo ranks on this machine. The planner's prediction is printed next to the "
        "measurement.",
        page="benchmarks/README.md",
        ranks=True,
    )
    parser.add_argument("--lengths", default="8192", metavar="N,N", help="sequence lengths, in tokens")
    parser.add_argument(
        "--kv-heads", default="8,2", metavar="N,N", help=f"numbers of key/value heads, for {HEADS} heads"
    )
    parser.add_argument(
        "--rounds", type=count, default=5, metavar="N", help="measured rounds, after one that is not"
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the results")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the results")
    parser.add_alias("--tokens", "--lengths")
    parser.add_alias("--figure", "--plot")
    args = parser.parse_args(argv)
    if args.output is not None:
        check_output("--output", str(args.output))
    if args.plot is not None:
        check_plot("--plot", str(args.plot))
    cases = [
        (int(tokens), int(heads)) for tokens in args.lengths.split(",") for heads in args.kv_heads.split(",")
    ]
    if "RANK" in os.environ:
        mesh = join(config_of(METHODS[0], *cases[0]), place)
        rows = [row for case in cases for row in measure(mesh, *case, args.rounds)]
        mesh.close()
        if place.rank == 0:
            print(json.dumps(rows))
        return
    report = start(args)
    show(report["rows"])
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.plot is not None:
        draw(report, args.plot)


if __name__ == "__main__":
    exit_rank_with(main)
