"""Every schedule's step beside its simulation, where cores do not disturb: stages
sleep in place of computing.

Runtime, plans and transfers are the real ones, over gloo; only stages and engine are stand-ins. So the ratio
says whether the runtime keeps the rules that the simulator, the validator and the planner rely on. 1 is a
runtime that loses no time.

A stage sleeps equally long under every schedule, so that what an action costs besides weighs equally. A rank
with two chunks then has twice the work. So schedules are compared by the bubble: the part of a step in which
ranks have nothing to do.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from benchmarks import machine
from benchmarks.charts import ratio_bars
from benchmarks.training import join, random_batch
from megacore.config import Config
from megacore.config.parallel import CHUNKS
from megacore.distributed.collectives import all_reduce
from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import RankInfo
from megacore.model.batch import Microbatch
from megacore.model.flow import HIDDEN, Flow
from megacore.pipeline.generators import GENERATORS, build
from megacore.pipeline.runtime import Runtime
from megacore.pipeline.schedule import COMPUTE, Action, Plan
from megacore.tensor_parallel.gradient import WeightGradPart
from megacore.tools.cli import Parser, count, exit_rank_with
from megacore.tools.output_files import check_output
from megacore.tools.schedules.simulate import simulate
from megacore.tools.settings.load import load

EXAMPLE = "python -m benchmarks.schedules --output schedules.json"
ROOT = Path(__file__).resolve().parents[1]
WORK = 0.050  # seconds of a stage's forward, and of each half of its backward
UNEVEN = 0.8  # the shortest over this, where stages differ
PINGS = 50
LATE = 0.0003  # seconds: more than a process is woken late


@contextmanager
def lasting(seconds: float) -> Iterator[None]:
    """Sleeps behind the block until `seconds` have gone since its start.

    The system wakes a process late, so the last bit is waited for.
    """
    end = perf_counter() + seconds
    yield
    sleep(max(0.0, end - LATE - perf_counter()))
    while perf_counter() < end:
        pass


class SleepingStage(nn.Module):
    """Stands for a `Stage`: one row of weights, and a pause."""

    def __init__(self, config: Config, first: bool, last: bool, seconds: float) -> None:
        super().__init__()
        self.config, self.first, self.last, self.seconds = config, first, last, seconds
        self.device, self.losses = torch.device("cpu"), ("cross_entropy",) if last else ()
        self.takes, self.gives = ({} if end else {"hidden": HIDDEN} for end in (first, last))
        self.weight = nn.Parameter(torch.ones(config.model.hidden_size))

    def empty(self, flows: Mapping[str, Flow]) -> dict[str, Tensor]:
        """See `Stage`."""
        return {name: torch.empty(flow.shape(self.config)) for name, flow in flows.items()}

    def forward(
        self, flow: dict[str, Tensor], batch: Microbatch, **_: Any
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """See `Stage`."""
        with lasting(self.seconds):
            y = flow["hidden"] * self.weight if flow else self.weight.expand(batch.tokens.numel(), -1)
            return ({}, {"cross_entropy": y.sum()}) if self.last else ({"hidden": y}, {})


class SleepingEngine:
    """Stands for what the runtime needs of an engine: pauses, and runs the backward of `SleepingStage`."""

    def __init__(
        self, stages: Sequence[SleepingStage], inputs: Sequence[float], weights: Sequence[float]
    ) -> None:
        self.modules, self.inputs, self.weights = stages, inputs, weights

    def loss_gradient(self, scale: float) -> Tensor:
        return torch.tensor(scale)

    def root(self, outputs: Sequence[Tensor]) -> list[GradientEdge]:
        return [get_gradient_edge(output) for output in outputs]

    def backward(
        self, chunk: int, root: list[GradientEdge], gradients: Sequence[Tensor], *, last: bool
    ) -> None:
        with lasting(self.inputs[chunk] + self.weights[chunk]):
            torch.autograd.backward(root, gradients)

    def backward_input(
        self, chunk: int, root: list[GradientEdge], gradients: Sequence[Tensor]
    ) -> list[WeightGradPart]:
        with lasting(self.inputs[chunk]):
            torch.autograd.backward(root, gradients)
        return []

    def backward_weight(self, chunk: int, parts: list[WeightGradPart], *, last: bool) -> None:
        with lasting(self.weights[chunk]):
            pass

    def reduce_gradients(self) -> None:
        pass


def seconds_of(stages: int, uneven: bool) -> tuple[list[float], list[float], list[float]]:
    """What every stage sleeps in its forward and in the halves of its backward, the same on every rank."""
    rng = random.Random(stages)
    forward, inputs, weights = (
        [WORK * (rng.uniform(UNEVEN, 1.0) if uneven else 1.0) for _ in range(stages)] for _ in range(3)
    )
    return forward, inputs, weights


def one_way(mesh: Mesh, x: Tensor) -> float:
    """Seconds that a message like `x` takes between the first two ranks, half of there
    and back; collective.
    """
    wire, ranks, rank, taken = mesh.pp.communicator, mesh.pp.ranks, mesh.pp.rank, [0.0]
    assert wire is not None
    for _ in range(PINGS if rank < 2 else 0):
        started = perf_counter()
        for sender in (0, 1):
            (wire.send if rank == sender else wire.receive)(x, ranks[1 - rank]).wait()
        taken.append((perf_counter() - started) / 2)
    return all_reduce(torch.tensor(median(taken), dtype=torch.float64), mesh.world, dist.ReduceOp.MAX).item()


def measured(plan: Plan, config: Config, mesh: Mesh, seconds: Sequence[Sequence[float]]) -> float:
    """The makespan of one step: the longest time from a rank's first start to its last end; collective."""
    placed = plan.placement[mesh.pp.rank]
    forward, inputs, weights = ([times[stage] for stage in placed] for times in seconds)
    last = plan.stages - 1
    stages: Any = [
        SleepingStage(config, stage == 0, stage == last, time)
        for stage, time in zip(placed, forward, strict=True)
    ]
    engine: Any = SleepingEngine(stages, inputs, weights)
    runtime = Runtime(stages, engine, mesh.pp)
    moments: list[float] = []

    def timed(method: Any) -> Any:
        def run(action: Action) -> None:
            moments.append(perf_counter())
            method(action)
            moments.append(perf_counter())

        return run

    runtime.methods.update({op: timed(method) for op, method in runtime.methods.items() if op in COMPUTE})
    batch = random_batch(config, mesh.device)
    mesh.barrier()
    runtime.run(plan, batch, {"cross_entropy": 1.0})
    return all_reduce(
        torch.tensor(moments[-1] - moments[0], dtype=torch.float64), mesh.world, dist.ReduceOp.MAX
    ).item()


def here(args: argparse.Namespace, place: RankInfo) -> int:
    """This rank's part in every schedule; collective."""
    ranks = place.world_size
    config = load(str(ROOT / "benchmarks/speed.json"), overrides_of(ranks), ranks).config
    mesh = join(config, place)
    message = torch.zeros(config.train.micro_batch_size * config.train.seq_len, config.model.hidden_size)
    transfer, rows = one_way(mesh, message), []
    warm_up = build("zb_v", ranks, config.num_microbatches)  # the first step also starts threads
    measured(warm_up, config, mesh, [[0.0] * warm_up.stages] * 3)
    for uneven in (False, True):
        for name in GENERATORS:
            plan = build(name, ranks, config.num_microbatches, CHUNKS[name])
            forward, inputs, weights = seconds = seconds_of(plan.stages, uneven)
            whole = [a + b for a, b in zip(inputs, weights, strict=True)]
            expected = simulate(plan, forward, whole, transfer, weight=weights)
            found = [measured(plan, config, mesh, seconds) for _ in range(args.rounds)]
            work = sum(expected.busy) / ranks
            rows.append(
                {
                    "schedule": name,
                    "stages": "uneven" if uneven else "even",
                    "simulated_seconds": expected.makespan,
                    "simulated_bubble": expected.bubble_rate,
                    "seconds": found,
                    "bubble": 1 - work / median(found),
                    "ratio": median(found) / expected.makespan,
                }
            )
    mesh.close()
    if place.rank == 0:
        print(
            json.dumps(
                {
                    "ranks": ranks,
                    "microbatches": config.num_microbatches,
                    "transfer_seconds": transfer,
                    "rows": rows,
                }
            )
        )
    return 0


def overrides_of(ranks: int) -> list[str]:
    """A pipeline of small messages, with twice as many microbatches as ranks."""
    sizes = ["model.num_layers=16", "model.hidden_size=64", "train.seq_len=16", "train.micro_batch_size=1"]
    return [
        *sizes,
        f"train.global_batch_size={2 * ranks}",
        f"parallel.pipeline={ranks}",
        "model.tie_embeddings=false",
    ]


def start(args: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """The result of so many ranks, in processes of their own."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    command = [sys.executable, "-m", *launcher, "benchmarks.schedules", "--rounds", str(args.rounds)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def show(results: Sequence[dict[str, Any]]) -> None:
    """The table: each schedule's bubble and step, simulated and measured, and the
    measured step over the simulated one.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table("schedule", "ranks", "stages")
    for column in ("bubble", "measured", "step, s", "measured", "ratio"):
        table.add_column(column, justify="right")
    for result in results:
        for row in result["rows"]:
            bubbles = (f"{row['simulated_bubble']:.1%}", f"{row['bubble']:.1%}")
            times = (
                f"{row['simulated_seconds']:.3f}",
                f"{median(row['seconds']):.3f}",
                f"{row['ratio']:.3f}",
            )
            table.add_row(row["schedule"], str(result["ranks"]), row["stages"], *bubbles, *times)
    Console(stderr=True, highlight=False, markup=False).print(table)


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """The chart: each schedule's step over the work of a rank, simulated and measured, so
    that 1 is a step without a bubble.
    """
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for result in results:
        for row in result["rows"]:
            work = row["simulated_seconds"] * (1 - row["simulated_bubble"])
            steps = {"simulated": row["simulated_seconds"] / work, "measured": median(row["seconds"]) / work}
            panels.setdefault(f"{result['ranks']} ranks, {row['stages']} stages", {})[row["schedule"]] = steps
    ratio_bars(path, panels, "A step of sleeping stages, over a rank's work")


def main(argv: list[str], place: RankInfo) -> int:
    """Measures here under a launcher, or starts what does; returns the exit status."""
    parser = Parser(
        "Compare the step of every pipeline schedule with its simulation; stages sleep instead of computing.",
        example=EXAMPLE,
        page="benchmarks/README.md",
        ranks=True,
    )
    parser.add_argument("--world", default="4,8", metavar="N,N", help="numbers of pipeline ranks")
    parser.add_argument(
        "--rounds", type=count, default=3, metavar="N", help="measured steps of each schedule"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE.json", help="write the results, with a chart next to it"
    )
    parser.add_alias("--ranks", "--world")
    args = parser.parse_args(argv)
    if args.output is not None:
        check_output("--output", str(args.output))
    if place.world_size > 1:
        return here(args, place)
    results = [start(args, int(ranks)) for ranks in args.world.split(",")]
    show(results)
    if args.output is not None:
        args.output.write_text(
            json.dumps(machine.describe() | {"results": results}, indent=1) + "\n", encoding="utf-8"
        )
        draw(results, args.output.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    exit_rank_with(main)
