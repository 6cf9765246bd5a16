"""Tokens a second, step time, MFU and peak memory of one config, on random tokens, in the layout in which it is started.

The table goes to stderr and one JSON object to stdout, from rank 0. Each step waits for the device, which a real run does
only when it logs. MFU is null where the device's peak is not known.
"""

import argparse
import json
import sys
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import machine
from benchmarks.training import Training, join
from megacore.cli import Parser
from megacore.comm import all_reduce
from megacore.config import Config, load
from megacore.errors import UserError
from megacore.mesh import Mesh
from megacore.place import place_from_environment
from megacore.train.failure import fail
from megacore.train.meters import Utilisation, peak_memory

EXAMPLE = "python -m benchmarks.throughput --config configs/gpt_tiny.json --steps 10"
MORE = """Under a launcher: torchrun --nproc-per-node 2 -m benchmarks.throughput --config configs/gpt_tiny.json parallel.tensor=2
or: deepspeed --module benchmarks.throughput --config configs/gpt_tiny.json parallel.tensor=2"""
WARM_UP = 3  # steps before the first that is measured


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(EXAMPLE, f"{__doc__}\n{MORE}")
    parser.add_argument("--config", required=True, metavar="FILE", help="a JSON file, such as configs/gpt_tiny.json")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help=f"steps that are measured, after {WARM_UP} that are not (10)")
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher's
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="as for launch/pretrain.py")
    args = parser.parse_intermixed_args(argv)
    if args.steps < 1:
        parser.error("argument --steps: must be at least 1")
    return args


def measure(config: Config, mesh: Mesh, steps: int) -> dict[str, Any]:
    """Runs the steps; collective. The slowest rank's time counts, and the largest rank's memory."""
    training = Training(config, mesh)
    for _ in range(WARM_UP):
        training.step()
    own = [training.step() for _ in range(steps)]
    figures = torch.tensor([*own, peak_memory(mesh.device)], dtype=torch.float64, device=mesh.device)
    *seconds, memory = all_reduce(figures, mesh.world, dist.ReduceOp.MAX).tolist()
    speed = config.train.global_batch_size * config.train.seq_len / median(seconds)
    utilisation = Utilisation(config, mesh.device, mesh.place.world_size)
    return {
        "mesh": mesh.describe(),
        "tokens_per_second": speed,
        "step_seconds": {"median": median(seconds), "lowest": min(seconds), "highest": max(seconds)},
        "mfu": utilisation.full(speed),
        "mfu_causal": utilisation.causal(speed),
        "memory_bytes": int(memory),
    }


def show(result: dict[str, Any]) -> None:
    """The table."""
    from rich.console import Console
    from rich.table import Table

    seconds, table = result["step_seconds"], Table(show_header=False)
    table.add_row("mesh", result["mesh"])
    table.add_row("tokens a second", f"{result['tokens_per_second']:,.0f}")
    table.add_row("step", f"{seconds['median']:.4f} s (from {seconds['lowest']:.4f} to {seconds['highest']:.4f})")
    for name, key in (("MFU", "mfu"), ("MFU, attention counted causally", "mfu_causal")):
        table.add_row(name, "unknown: this device's peak is not listed" if result[key] is None else f"{result[key]:.1%}")
    table.add_row("peak memory of a rank", f"{result['memory_bytes'] / 1e6:,.0f} MB")
    Console(stderr=True, highlight=False, markup=False).print(table)


def main() -> int:
    """One rank's part; returns its exit status."""
    rank = 0
    try:
        place = place_from_environment()
        rank = place.rank
        args = parse(sys.argv[1:])
        config = load(args.config, args.overrides, place.world_size).config
        mesh = join(config, place)
    except UserError as error:
        if rank == 0:
            print(error, file=sys.stderr)
        return 2
    try:
        result = measure(config, mesh, args.steps)
    except BaseException as error:
        fail(error, place, mesh)
        raise
    mesh.close()
    if rank == 0:
        show(result)
        print(json.dumps(machine.describe() | {"config": config.model_dump(by_alias=True)} | result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
