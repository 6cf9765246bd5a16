"""Tokens a second, MFU and HFU, peak memory and where the step's time goes, of one config, in the
layout in which it is started.

With --layouts each of those is started here, one after the other. Tables go to stderr and one JSON object to
stdout; --output writes it to a file, with a chart beside it. Tokens are random, or with --data the config's.
Each step waits for the device, which a real run does only when it logs. Utilisation is null where the
device's peak is neither listed nor, by --peak, measured.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import machine
from benchmarks.breakdown import COMMUNICATION, PARTS, Breakdown, beside_each_other, measured_step, shares
from benchmarks.charts import stacked_bars
from benchmarks.training import RandomStream, Training, join
from megacore.config import Config
from megacore.data.samples import training_stream
from megacore.distributed.collectives import all_reduce
from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError
from megacore.model.layers import DTYPES
from megacore.tools.choices.flops import flops_per_token, recomputed_flops
from megacore.tools.choices.utilisation import Utilisation
from megacore.tools.cli import Parser, add_config, add_overrides, count, exit_rank_with
from megacore.tools.corpora import checked_stream
from megacore.tools.diagnosis.failure import fail
from megacore.tools.output_files import check_output
from megacore.tools.planner.plot import check_plot, draw
from megacore.tools.planner.traffic import sent_by_group
from megacore.tools.settings.load import load
from megacore.tools.verify.layouts import parse as parse_layout
from megacore.train.metrics import peak_memory, reserved_memory

EXAMPLES = (
    "python -m benchmarks.throughput --config configs/gpt_tiny.json --layouts one,dp2,tp2,pp2 "
    "--output throughput.json",
    "torchrun --nproc-per-node 2 -m benchmarks.throughput --config configs/gpt_tiny.json parallel.tensor=2",
)
WARM_UP = 3  # steps before the first that is measured
ROOT = Path(__file__).resolve().parents[1]


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        "Measure tokens per second, MFU, peak memory and where the time of a step goes.",
        example=EXAMPLES,
        notes="Under a launcher it measures the layout that was started. Tables go to stderr, JSON to "
        "stdout.",
        page="benchmarks/README.md",
        ranks=True,
    )
    add_config(parser)
    parser.add_argument(
        "--steps",
        type=count,
        default=10,
        metavar="N",
        help=f"measured steps, after {WARM_UP} that are not",
    )
    parser.add_argument(
        "--layouts",
        metavar="LAYOUT,LAYOUT",
        help="start these layouts here, one after the other: one,dp2,tp2,tp2sp,pp2 or tp2pp2dp2",
    )
    parser.add_argument(
        "--real-data",
        action="store_true",
        help="read the corpus of data.train instead of random tokens",
    )
    parser.add_argument(
        "--peak",
        action="store_true",
        help="measure the peak FLOP/s by a large matrix product, on all ranks at once",
    )
    parser.add_argument(
        "--gpu-file",
        type=Path,
        metavar="FILE.json",
        help="with --peak: write the measured device as a file for launch/plan.py --gpu",
    )
    parser.add_argument(
        "--profile",
        metavar="FILE.json",
        help="write a trace of one step of rank 0, which ui.perfetto.dev opens",
    )
    parser.add_argument(
        "--timeline",
        metavar="FILE.png",
        help="draw one more step, action by action, next to the simulated one",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE.json", help="write the results, with a chart next to it"
    )
    add_overrides(parser)
    parser.add_alias("--data", "--real-data")
    parser.add_alias("--device-file", "--gpu-file")
    args = parser.parse_intermixed_args(argv)
    if args.timeline is not None:
        check_plot("--timeline", args.timeline)
    if args.gpu_file and (not args.peak or args.layouts):
        parser.error("argument --gpu-file: goes with --peak, and without --layouts")
    return args


def measure(config: Config, mesh: Mesh, args: argparse.Namespace) -> dict[str, Any]:
    """Runs the steps; collective. The slowest rank's time counts, and the largest rank's memory.

    Time and speed are of plain steps; the breakdown is of as many more, in which its measuring takes part.
    """
    measured = peak_of_all(config, mesh) if args.peak else None
    if args.gpu_file is not None and measured is not None:
        # all ranks at once
        content = machine.device_content(
            config.train.precision, measured / mesh.place.world_size, mesh.device
        )
        if mesh.place.rank == 0:
            args.gpu_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    training = Training(config, mesh, training_stream(config) if args.real_data else RandomStream(config))
    for _ in range(WARM_UP):
        training.step()
    own = [training.step() for _ in range(args.steps)]
    memory = peak_memory(mesh.device), reserved_memory(mesh.device)
    parts = [measured_step(training) for _ in range(args.steps)]
    figures = torch.tensor([*own, *memory], dtype=torch.float64, device=mesh.device)
    *seconds, used, reserved = all_reduce(figures, mesh.world, dist.ReduceOp.MAX).tolist()
    speed = config.train.global_batch_size * config.train.seq_len / median(seconds)
    utilisation = Utilisation(config, mesh.device, mesh.place.world_size, measured)
    result = {
        "mesh": mesh.describe(),
        "tokens_per_second": speed,
        "step_seconds": {
            "median": median(seconds),
            "lowest": min(seconds),
            "highest": max(seconds),
            "spread": spread(seconds),
        },
        "peak_flops": {
            "all_ranks": utilisation.available,
            "source": "measured" if args.peak else "device table",
        },
        "mfu": utilisation.full(speed),
        "mfu_causal": utilisation.causal(speed),
        "hfu": utilisation.of(hardware_flops_per_token(config, causal=False) * speed),
        "hfu_causal": utilisation.of(hardware_flops_per_token(config, causal=True) * speed),
        "memory_bytes": int(used),
        "memory_reserved_bytes": int(reserved),
        "breakdown_percent": shares(parts, mesh),
        "sent_bytes_a_rank_and_step": sent(parts[-1], mesh),
    }
    if args.profile:
        write_trace(training, args.profile)
    if args.timeline is not None:
        draw_timeline(training, args.timeline)
    return result


def draw_timeline(training: Training, path: str) -> None:
    """Draws a measured step beside its simulation, for the pipeline of rank 0; collective."""
    timeline, schedule = beside_each_other(training), training.config.parallel.schedule
    if training.mesh.place.rank == 0:
        rows = [
            f"{rank} {what}" for rank in range(training.mesh.pp.size) for what in ("simulated", "measured")
        ]
        seconds = [max(row[-1].end for row in timeline.spans[first::2]) for first in (0, 1)]
        title = (
            f"{schedule}, simulated ({1e3 * seconds[0]:.0f} ms) and measured ({1e3 * seconds[1]:.0f} "
            "ms), for each rank of the pipeline"
        )
        draw(timeline, title, path, rows=rows)


def hardware_flops_per_token(config: Config, causal: bool) -> float:
    """`flops_per_token` with recomputation: the numerator of HFU, hardware FLOPs utilisation
    (Chowdhery et al. 2022, PaLM).
    """
    return flops_per_token(config, causal) + config.model.num_layers * recomputed_flops(config, causal)


def spread(seconds: list[float]) -> float:
    """The width of the middle half, as a fraction of the median."""
    if len(seconds) == 1:
        return 0.0
    low, middle, high = quantiles(seconds, n=4, method="inclusive")
    return (high - low) / middle


def peak_of_all(config: Config, mesh: Mesh) -> float:
    """Operations a second that all ranks reach together in a large product; collective."""
    mesh.barrier()
    own = machine.measured_peak(DTYPES[config.train.precision], mesh.device)
    return all_reduce(torch.tensor(own, dtype=torch.float64, device=mesh.device), mesh.world).item()


def sent(step: Breakdown, mesh: Mesh) -> dict[str, float]:
    """Bytes that the mean rank sends in a step, by group; collective."""
    own = sent_by_group(step.transfers)
    amounts = torch.tensor(
        [own.get(name, 0.0) for name in COMMUNICATION], dtype=torch.float64, device=mesh.device
    )
    return dict(
        zip(COMMUNICATION, (all_reduce(amounts, mesh.world) / mesh.place.world_size).tolist(), strict=True)
    )


def write_trace(training: Training, path: str) -> None:
    """Profiles a step on rank 0, its parts by name; collective."""
    from torch.profiler import ProfilerActivity, profile

    if training.mesh.place.rank:
        measured_step(training)
        return
    activities = [
        ProfilerActivity.CPU,
        *([ProfilerActivity.CUDA] if training.mesh.device.type == "cuda" else []),
    ]
    with profile(activities=activities) as profiler:
        measured_step(training)
    profiler.export_chrome_trace(path)


def show(results: dict[str, dict[str, Any]]) -> None:
    """The table: a column a layout."""
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=True, highlight=False, markup=False)
    done = {name: result for name, result in results.items() if "failed" not in result}
    for name in results.keys() - done.keys():
        console.print(f"{name} failed: {results[name]['failed']}")
    if not done:
        return
    table = Table("")
    for name in done:
        table.add_column(name, justify="right")

    def row(title: str, render: Callable[[dict[str, Any]], str]) -> None:
        table.add_row(title, *(render(result) for result in done.values()))

    row("tokens a second", lambda r: f"{r['tokens_per_second']:,.0f}")
    row("step, ms", lambda r: f"{1e3 * r['step_seconds']['median']:,.1f}")
    row("  middle half within", lambda r: f"±{r['step_seconds']['spread'] / 2:.1%}")
    for title, key in (
        ("MFU", "mfu"),
        ("  attention counted causally", "mfu_causal"),
        ("HFU", "hfu"),
        ("  likewise", "hfu_causal"),
    ):
        row(title, lambda r, key=key: "unknown" if r[key] is None else f"{r[key]:.1%}")  # type: ignore[misc]
    row("peak memory of a rank, MB", lambda r: f"{r['memory_bytes'] / 1e6:,.0f}")
    row("  reserved", lambda r: f"{r['memory_reserved_bytes'] / 1e6:,.0f}")
    for part in PARTS:
        row(f"{part}, % of a step", lambda r, part=part: f"{r['breakdown_percent'][part]:.1f}")  # type: ignore[misc]
    for group in COMMUNICATION:
        row(
            f"sent over {group}, MB",
            lambda r, group=group: f"{r['sent_bytes_a_rank_and_step'][group] / 1e6:,.2f}",  # type: ignore[misc]
        )
    console.print(table)


def start(args: argparse.Namespace, layout: str) -> dict[str, Any]:
    """One layout's result, from processes of its own; `failed` with the reason
    where it could not be measured.
    """
    wanted = parse_layout(layout)
    own = [
        "--config",
        args.config,
        "--steps",
        str(args.steps),
        *(f"--{flag.replace('_', '-')}" for flag in ("peak", "real_data") if getattr(args, flag)),
    ]
    for option in ("profile", "timeline"):
        if value := getattr(args, option):
            own += [f"--{option}", str(Path(value).with_stem(f"{Path(value).stem}_{layout}"))]
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(wanted.world), "-m"]
    command = [
        sys.executable,
        "-m",
        *launcher,
        "benchmarks.throughput",
        *own,
        *args.overrides,
        *wanted.overrides(),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=Path.cwd(), env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    said = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    return {"failed": said[0] if said else f"status {done.returncode}"}


def measure_here(args: argparse.Namespace, place: RankInfo) -> int:
    """This process's part in the layout in which it was started."""
    config = load(args.config, args.overrides, place.world_size).config
    if args.real_data:
        checked_stream(config, scan=place.local_rank == 0)  # before ranks wait for each other
    mesh = join(config, place)
    try:
        result = measure(config, mesh, args)
    except BaseException as error:
        fail(error, place, mesh)
        raise
    mesh.close()
    if place.rank == 0:
        finish(
            args,
            machine.describe() | {"config": config.model_dump(by_alias=True)} | result,
            {mesh.describe(): result},
        )
    return 0


def finish(args: argparse.Namespace, report: dict[str, Any], results: dict[str, dict[str, Any]]) -> None:
    """Shows the results, and writes them down."""
    show(results)
    print(json.dumps(report))
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        bars = {
            f"{name}\n{r['tokens_per_second']:,.0f} tokens/s": r["breakdown_percent"]
            for name, r in results.items()
            if "failed" not in r
        }
        stacked_bars(
            args.output.with_suffix(".png"), bars, "share of a step, %", report["machine"]["processor"]
        )


def main(argv: list[str], place: RankInfo) -> int:
    """Measures here, or starts what does; returns the exit status."""
    args = parse(argv)
    if place.rank == 0:
        for option, path in (("--output", args.output), ("--gpu-file", args.gpu_file)):
            if path is not None:
                check_output(option, str(path))
    if args.layouts is None:
        return measure_here(args, place)
    if place.world_size > 1:
        raise ConfigError(
            "--layouts",
            "starts its own ranks, and a launcher has started these",
            "no launcher, or no --layouts",
        )
    names = args.layouts.split(",")
    for name in names:
        parse_layout(name)
    results = {name: start(args, name) for name in names}
    finish(
        args,
        machine.describe() | {"config_file": args.config, "overrides": args.overrides, "layouts": results},
        results,
    )
    return any("failed" in result for result in results.values())


if __name__ == "__main__":
    exit_rank_with(main)
