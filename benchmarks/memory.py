"""Bytes of parameters, gradients and optimizer state on the fullest rank, measured, beside what
`megacore.tools.planner.memory` predicts.

Measured are the storages behind the tensors that stage and engine hold once a step's gradients are reduced,
each counted once; "other" is what else has come to live in the process since. "at work" is the most that was
allocated beyond all that in the middle of a step: by PyTorch's allocator on a GPU, and on a CPU by glibc's
malloc, which is asked after every operation. The lowest of five steps counts: malloc serves all threads of a
process, so a busy machine shows as up to 20 % more bytes in one step or another, and Gloo's threads release a
tensor only some time after the wait for its reduction has returned.
Predicted for it are activations and, for fsdp, what is gathered.

Without a launcher it starts each engine on 1 and 4 data ranks, the ways to hold fewer activations on 1, and
prints the table. Under one it measures the layout in which it is started, and rank 0 prints JSON.
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.training import Training, join
from megacore.config import Config
from megacore.distributed.collectives import all_reduce
from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import RankInfo
from megacore.tools.cli import Parser, add_overrides, exit_rank_with
from megacore.tools.diagnosis.failure import fail
from megacore.tools.planner.memory import rank_memory
from megacore.tools.settings.load import load

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = (
    "python -m benchmarks.memory train.precision=bf16",
    "torchrun --nproc-per-node 4 -m benchmarks.memory engine.kind=fsdp parallel.tensor=2",
)

ENGINES = {
    "native": [],
    "native, sharded optimizer": ["engine.shard_optimizer=true"],
    "fsdp": ["engine.kind=fsdp"],
    **{
        f"deepspeed, {name}": ["engine.kind=deepspeed", f"engine.config={ROOT}/configs/deepspeed/{name}.json"]
        for name in ("zero1", "zero2", "zero3")
    },
}
# What changes activations alone: measured on one rank.
ACTIVATIONS = {
    "native, recompute=selective": ["train.recompute=selective"],
    "native, recompute=full": ["train.recompute=full"],
    "native, offload_activations": ["train.offload_activations=true"],
}
DATA = (1, 4)
PARTS = ("parameters", "gradients", "optimizer")
STEPS = 5  # of these steps, the lowest figures count


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the tensors' storages, by address."""
    from torch.distributed.tensor import DTensor  # seconds to import, which -h need not take

    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    held = (tensor.untyped_storage() for tensor in local if tensor.device.type != "meta")
    return {storage.data_ptr(): storage.nbytes() for storage in held if storage.nbytes()}


def living() -> dict[int, int]:
    """`storages` of every tensor in this process that Python knows."""
    gc.collect()
    return storages(thing for thing in gc.get_objects() if issubclass(type(thing), Tensor))


@torch.no_grad()
def held_by(training: Training, before: dict[int, int]) -> dict[str, int]:
    """Bytes by part, when a step's gradients are reduced; a storage that serves as two
    counts as the first.
    """
    engine, deepspeed = training.engine, training.config.engine.kind == "deepspeed"
    held = {at: size for at, size in living().items() if at not in before}
    # ZeRO 3 leaves parameters empty, and this rank's part of each at `ds_tensor`.
    parameters = storages(
        getattr(p, "ds_tensor", p) for stage in training.train_step.stages for p in stage.parameters()
    )
    # DeepSpeed shows copies of its gradients: what it holds beyond parameters and optimizer counts as them.
    gradients = {} if deepspeed else storages(t for t, _ in engine.gradients().values())
    gradients = {at: size for at, size in gradients.items() if at not in parameters}
    state = storages(t for t, _ in engine.tensors().values())
    optimizer = {at: size for at, size in state.items() if at not in parameters | gradients}
    other = {at: size for at, size in held.items() if at not in parameters | gradients | optimizer}
    if deepspeed:
        gradients, other = other, {}
    parts = dict(zip((*PARTS, "other"), (parameters, gradients, optimizer, other), strict=True))
    return {name: sum(part.values()) for name, part in parts.items()}


def measured_step(training: Training, before: dict[int, int]) -> dict[str, int]:
    """Run a step and return the bytes held by part, their sum without "other", the peak of the bytes
    allocated in the forward and backward passes, and the bytes of gradients that these passes create.
    """
    at_start = living()
    peak = peak_of(lambda: training.train_step.forward_backward(training.batch), training.mesh.device)
    new_gradients = sum(size for address, size in living().items() if address not in at_start)
    parts = held_by(training, before)
    training.engine.step(0.0)
    together = sum(parts[name] for name in PARTS)
    return parts | {"together": together, "peak": peak, "new gradients": new_gradients}


class MallInfo(ctypes.Structure):
    """What glibc's malloc says of itself (malloc.h)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def allocated() -> int:
    """Bytes that this process has from malloc, whichever thread asked for them, as
    PyTorch does for every CPU tensor.
    """
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallInfo
    info = mallinfo()
    return info.uordblks + info.hblkhd


class Watch(TorchDispatchMode):
    """While entered, asks behind every operation how much is allocated; `peak` is the most."""

    peak = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        self.peak = max(self.peak, allocated())
        return result


def peak_of(work: Callable[[], object], device: torch.device) -> int:
    """The most bytes allocated at once by `work`, beyond those before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - start
    with Watch():
        torch.ones(1).add(1)  # PyTorch imports ten megabytes for the first operation that is watched
    start = allocated()
    with Watch() as watch:
        work()
    return watch.peak - start


def measure(config: Config, mesh: Mesh) -> dict[str, Any]:
    """Builds what trains and runs steps; collective.

    Measured bytes are the largest rank's, predicted ones the fullest stage's.
    """
    before = living()
    training = Training(config, mesh)
    training.step()  # whatever is made by the first step alone
    steps = [measured_step(training, before) for _ in range(STEPS)]
    lowest = {name: min(step[name] for step in steps) for name in steps[0]}
    lowest["at work"] = lowest.pop("peak") - lowest.pop("new gradients")
    figures = all_reduce(
        torch.tensor(list(lowest.values()), device=mesh.device), mesh.world, dist.ReduceOp.MAX
    )
    measured = dict(zip(lowest, figures.tolist(), strict=True))
    training.engine.close()
    stages = rank_memory(config)
    predicted = {name: max(getattr(stage, name) for stage in stages) for name in PARTS}
    predicted |= {
        "together": max(s.held for s in stages),
        "at work": max(s.activations + s.gathered for s in stages),
    }
    return {"mesh": mesh.describe(), "measured": measured, "predicted": predicted}


def measure_here(args: argparse.Namespace, place: RankInfo) -> None:
    """One rank's part under a launcher."""
    config = load(args.config, args.overrides, place.world_size).config
    mesh = join(config, place)
    try:
        result = measure(config, mesh)
    except BaseException as error:
        fail(error, place, mesh)
        raise
    mesh.close()
    if place.rank == 0:
        print(json.dumps(result))


def start(args: argparse.Namespace, engine: str, data: int) -> dict[str, Any]:
    """`measure` in processes of its own; raises `RuntimeError` with what they say if they fail."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(data),
        "-m",
        "benchmarks.memory",
    ]
    settings = (ENGINES | ACTIVATIONS)[engine]
    command = [*launcher, "--config", args.config, *args.overrides, *settings, f"parallel.data={data}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{engine} on {data} ranks failed: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def show(args: argparse.Namespace) -> None:
    """Measures every engine, and prints the table as it grows, in Markdown."""
    columns = ["engine", "data", *PARTS, "together", "predicted", "ratio", "other", "at work", "predicted"]
    print("MB | " + " | ".join(columns[1:]).replace("data", "data ranks", 1))
    print("|".join(["---", *["---:"] * (len(columns) - 1)]), flush=True)
    for engine, data in [*product(ENGINES, DATA), *product(ACTIVATIONS, [1])]:
        result = start(args, engine, data)
        measured, predicted = result["measured"], result["predicted"]
        sizes = [measured[name] for name in (*PARTS, "together")] + [predicted["together"]]
        cells = [f"{size / 1e6:.2f}" for size in sizes] + [
            f"{measured['together'] / predicted['together']:.3f}"
        ]
        cells += [
            f"{size / 1e6:.2f}" for size in (measured["other"], measured["at work"], predicted["at work"])
        ]
        print(" | ".join([engine, str(data), *cells]), flush=True)


def main(argv: list[str], place: RankInfo) -> None:
    """The table, or one rank's part in a measurement."""
    parser = Parser(
        "Measure bytes of parameters, gradients and optimizer state next to the planner's prediction.",
        example=EXAMPLES,
        notes="Alone it starts each engine on 1 and 4 data ranks; under a launcher it measures that layout.",
        page="benchmarks/README.md",
        ranks=True,
    )
    parser.add_argument(
        "--config", default="benchmarks/memory.json", metavar="FILE", help="config of the run"
    )
    add_overrides(parser)
    args = parser.parse_intermixed_args(argv)
    if "RANK" in os.environ:
        measure_here(args, place)
    else:
        show(args)


if __name__ == "__main__":
    exit_rank_with(main)
