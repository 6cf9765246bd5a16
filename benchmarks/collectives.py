"""How fast each group of the mesh communicates: every operation that a step uses, from 1 KiB to 1
GiB, and a line through the times.

Of each size: the median time of the slowest rank; the algorithm bandwidth, bytes of the whole over time; and
the bus bandwidth, bytes that a rank of a ring sends over time, which can be held against a link's. The line
is α + β · bytes that a rank sends, fitted to small and large messages alike (least squares of the relative
error). `--cluster-file` writes the lines of gathers, scatters and sums as the links that
`python launch/plan.py --cluster FILE.json` predicts with.

NCCL's own settings are printed as they are, and none is changed.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import machine
from benchmarks.charts import lines_over_sizes
from benchmarks.training import join
from megacore.config import Config
from megacore.distributed.collectives import all_gather, all_reduce, reduce_scatter
from megacore.distributed.communicator import Group
from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError
from megacore.tools.cli import Parser, add_config, add_overrides, count, exit_rank_with
from megacore.tools.diagnosis.failure import fail
from megacore.tools.output_files import check_output
from megacore.tools.planner.traffic import ring_share
from megacore.tools.settings.load import load

EXAMPLE = (
    "torchrun --nproc-per-node 2 -m benchmarks.collectives --config configs/gpt_tiny.json --largest "
    "16 parallel.tensor=2"
)
SMALLEST = 1024  # bytes
# up to so many bytes, so many calls in a row are timed: a barrier lets ranks go at different moments
SMALL, CALLS = 2**20, 10
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send")


@dataclass(frozen=True)
class Line:
    """The time of one call: `alpha` seconds, and `beta` more for every byte that a rank
    sends (Hockney 1994).
    """

    alpha: float
    beta: float

    def seconds(self, sent_bytes: float) -> float:
        """The time of a call."""
        return self.alpha + self.beta * sent_bytes


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        "Measure how fast each process group of a layout communicates, from 1 KiB to 1 GiB.",
        example=EXAMPLE,
        notes="Reports the median time of the slowest rank, and the algorithm and bus bandwidth.",
        page="benchmarks/README.md",
        ranks=True,
    )
    add_config(parser)
    parser.add_argument(
        "--largest", type=float, default=1024.0, metavar="MIB", help="largest message, in MiB"
    )
    parser.add_argument(
        "--repeat",
        type=count,
        default=5,
        metavar="N",
        help="measured calls of each size, after 2 that are not",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE.json",
        help="results to write, with a chart next to it (default: benchmarks/results/collectives_DATE.json)",
    )
    parser.add_argument(
        "--cluster-file",
        type=Path,
        metavar="FILE.json",
        help="write the links as a file for launch/plan.py --cluster",
    )
    add_overrides(parser)
    args = parser.parse_intermixed_args(argv)
    if not args.largest * 2**20 >= SMALLEST:
        parser.error("argument --largest: must be at least 1 KiB")
    return args


def call(operation: str, group: Group, size: int, device: torch.device) -> Callable[[], object]:
    """One operation on `size` bytes (of the whole, or of what is sent) of fp32; collective over the group."""
    whole = torch.zeros(size // 4, dtype=torch.float32, device=device)
    part = whole[: len(whole) // group.size]
    if operation == "all_reduce":
        return lambda: all_reduce(whole, group)
    if operation == "reduce_scatter":
        return lambda: reduce_scatter(whole, group)
    if operation == "all_gather":
        return lambda: all_gather(part, group)
    if operation == "all_to_all":
        out = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(out, whole, group=group.process_group)
    received, after, before = (
        torch.empty_like(whole),
        (group.rank + 1) % group.size,
        (group.rank - 1) % group.size,
    )

    def around() -> None:
        """Every rank sends to the next, and receives from the one before."""
        posts = [
            dist.P2POp(dist.isend, whole, group.ranks[after], group.process_group),
            dist.P2POp(dist.irecv, received, group.ranks[before], group.process_group),
        ]
        for work in dist.batch_isend_irecv(posts):
            work.wait()

    return around


def seconds(operation: str, group: Group, size: int, mesh: Mesh, repeat: int) -> float:
    """Median time of a call, of the slowest rank of all; collective over the mesh, all of whose
    groups work at once, as in a step.
    """
    act, times = call(operation, group, size, mesh.device), []
    calls = CALLS if size <= SMALL else 1

    def wait() -> None:
        if mesh.device.type == "cuda":
            torch.cuda.synchronize(mesh.device)

    for _ in range(2 + repeat):
        mesh.barrier()
        wait()
        started = perf_counter()
        for _ in range(calls):
            act()
        wait()
        times.append((perf_counter() - started) / calls)
    slowest = all_reduce(
        torch.tensor(times[2:], dtype=torch.float64, device=mesh.device), mesh.world, dist.ReduceOp.MAX
    )
    return median(slowest.tolist())


def fit(points: list[tuple[float, float]]) -> Line:
    """The line through (bytes that a rank sends, seconds) with the least relative errors,
    neither of whose terms is negative.

    A size's weight is its time's inverse square: else the largest message alone would decide, and latency
    would be noise.
    """
    weights = [1 / time**2 for _, time in points]
    total = sum(weights)
    x0 = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    y0 = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - x0) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    beta = (
        sum(w * (x - x0) * (y - y0) for w, (x, y) in zip(weights, points, strict=True)) / spread
        if spread
        else 0.0
    )
    beta = max(0.0, beta)
    return Line(max(0.0, y0 - beta * x0), beta)


def sizes(largest: int, group: Group) -> Iterator[int]:
    """Bytes in powers of 4, of which every rank's part is whole numbers."""
    size, unit = SMALLEST, 4 * group.size
    while size <= largest:
        yield -(-size // unit) * unit
        size *= 4


def groups(mesh: Mesh) -> list[Group]:
    """Those of more than one rank that every rank has one of; of groups with the same ranks, the first."""
    candidates = (mesh.tp, mesh.gradient_group, mesh.pp, mesh.world)
    found = {
        group.ranks: group
        for group in reversed(candidates)
        if group.size > 1 and group.ranks in mesh.communicators
    }
    return [group for group in candidates if found.get(group.ranks) is group]


def measure(mesh: Mesh, largest: int, repeat: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Times and lines of every group and operation; collective."""
    rows, lines = [], []
    for group in groups(mesh):
        for operation in OPERATIONS:
            points = []
            for size in sizes(largest, group):
                time = seconds(operation, group, size, mesh, repeat)
                sent = size * ring_share(operation, group.size)
                points.append((sent, time))
                rows.append(
                    {
                        "group": group.name,
                        "ranks": group.size,
                        "operation": operation,
                        "bytes": size,
                        "seconds": time,
                        "algorithm_bytes_per_second": size / time,
                        "bus_bytes_per_second": sent / time,
                    }
                )
            line = fit(points)
            error = max(abs(line.seconds(sent) / time - 1) for sent, time in points)
            lines.append(
                {
                    "group": group.name,
                    "operation": operation,
                    "ranks": group.size,
                    "alpha_seconds": line.alpha,
                    "beta_seconds_per_byte": line.beta,
                    "largest_relative_error": error,
                }
            )
            bus = max(sent / time for sent, time in points)
            bandwidth = 1e-9 / line.beta if line.beta else math.inf
            say(
                f"{group.name:<6} {group.size:>4} ranks {operation:<15} latency "
                f"{1e6 * points[0][1]:10,.1f} µs  bus {bus / 1e9:8.3f} GB/s  "
                f"α {1e6 * line.alpha:8.1f} µs  1/β {bandwidth:8.3f} GB/s  off by {error:.0%} at most"
            )
    return {"measured": rows, "lines": lines}


def cluster_content(lines: list[dict[str, Any]], machine_ranks: int) -> dict[str, Any]:
    """What a cluster file of the planner holds (see tools/planner/devices.py), from the fitted lines
    of gathers, scatters and sums.

    A level for the largest group within a machine and one for the largest beyond it, if there are such
    groups. A sum goes round the
    ring twice: what it takes longer to begin than a gather is its hops' latency, and the rest is the call's.
    A ring that leaves a machine uses the links of all its ranks there.
    """
    sizes = sorted({line["ranks"] for line in lines})
    chosen = [
        max(group)
        for group in ([n for n in sizes if n <= machine_ranks], [n for n in sizes if n > machine_ranks])
        if group
    ]
    levels: list[dict[str, Any]] = []
    calls = []
    for ranks in chosen:
        of = {line["operation"]: line for line in lines if line["ranks"] == ranks}
        once = [of[name] for name in ("all_gather", "reduce_scatter") if name in of]
        begin = median(line["alpha_seconds"] for line in once)
        hops = (
            min(max(of["all_reduce"]["alpha_seconds"] - begin, 0.0), begin) if "all_reduce" in of else begin
        )
        calls.append(begin - hops)
        rings = [*once, of["all_reduce"]] if "all_reduce" in of else once
        sharing = machine_ranks if ranks > machine_ranks else 1
        bandwidth = 1 / (max(median(line["beta_seconds_per_byte"] for line in rings), 1e-15) * sharing)
        levels.append(
            {
                "link": "measured",
                "ranks": machine_ranks,
                "bytes_per_second": bandwidth,
                "latency_seconds": hops / (ranks - 1),
            }
        )
    levels[-1]["ranks"] = None
    return {
        "name": "measured links",
        "source": "benchmarks.collectives",
        "call_seconds": calls[0],
        "levels": levels,
    }


def nccl_settings() -> dict[str, str]:
    """What the environment sets of NCCL and gloo."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(("NCCL_", "TORCH_NCCL_", "GLOO_"))
    }


def write(report: dict[str, Any], output: Path) -> None:
    """JSON and chart."""
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in report["measured"]:
        curves.setdefault(f"{row['group']}, {row['operation']}", []).append(
            (row["bytes"], row["bus_bytes_per_second"] / 1e9)
        )
    lines_over_sizes(
        output.with_suffix(".png"),
        curves,
        "bus bandwidth, GB/s",
        f"{report['mesh']}: {report['machine']['processor']}",
    )


def run(args: argparse.Namespace, config: Config, mesh: Mesh) -> None:
    """Measures, and on rank 0 says and writes; collective."""
    is_loss_rank = mesh.place.rank == 0

    def say(line: str) -> None:
        if is_loss_rank:
            print(line, file=sys.stderr, flush=True)

    say(mesh.describe())
    for name, value in nccl_settings().items():
        say(f"{name}={value}")
    result = measure(mesh, int(args.largest * 2**20), args.repeat, say)
    if is_loss_rank:
        report = (
            machine.describe()
            | {"mesh": mesh.describe(), "backend": mesh.backend, "environment": nccl_settings()}
            | result
        )
        output = args.output or Path(__file__).parent / "results" / f"collectives_{report['date'][:10]}.json"
        write(report, output)
        say(f"written to {output}")
        if args.cluster_file is not None:
            content = cluster_content(
                result["lines"], min(mesh.place.local_world_size, mesh.place.world_size)
            )
            args.cluster_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main(argv: list[str], place: RankInfo) -> int:
    """One rank's part; returns its exit status."""
    args = parse(argv)
    if place.world_size == 1:
        raise ConfigError(
            "world", "one rank has nobody to talk to", "start it with a launcher, as in the example of -h"
        )
    if place.rank == 0:
        for option, path in (("--output", args.output), ("--cluster-file", args.cluster_file)):
            if path is not None:
                check_output(option, str(path))
    config = load(args.config, args.overrides, place.world_size).config
    mesh = join(config, place)
    try:
        run(args, config, mesh)
    except BaseException as error:
        fail(error, place, mesh)
        raise
    mesh.close()
    return 0


if __name__ == "__main__":
    exit_rank_with(main)
