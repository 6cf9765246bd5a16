"""What a step with Muon costs beside one with AdamW, with the exchange of matrices overlapped
and one round after the other.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 -m benchmarks.muon --config configs/gpt_tiny.json
parallel.tensor=2
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megacore.distributed.mesh import Mesh
from megacore.engine import owners
from megacore.engine.optimizers import WholeUpdate
from megacore.model.batch import Microbatch
from megacore.tools.choices.settle import settled_alone
from megacore.tools.cli import Parser, add_config, add_overrides, count, exit_with
from megacore.tools.deepspeed.engine import ENGINES
from megacore.tools.launchers import place_from_environment
from megacore.tools.settings.load import load
from megacore.train.loader import microbatch_on
from megacore.train.step import TrainStep

EXAMPLE = "torchrun --nproc-per-node 4 -m benchmarks.muon --config configs/gpt_tiny.json parallel.tensor=2"
KINDS = {"adamw": "adamw", "muon": "muon", "muon, not overlapped": "muon"}


@torch.no_grad()
def in_turn(self: WholeUpdate, lr: float, scale: Tensor, skip: Tensor) -> None:
    """`WholeUpdate.step`, one round after the other: nothing is computed while something travels."""
    for tasks in self.rounds:
        for _ in tasks:
            pass


def timed(mesh: Mesh, step: TrainStep, batch: list[Microbatch], number: int) -> float:
    """Seconds of a step, on all ranks."""
    mesh.barrier()
    began = time.perf_counter()
    step(number, batch)
    mesh.barrier()
    return time.perf_counter() - began


def run(argv: list[str]) -> int:
    """Prints the figures, on the first rank."""
    parser = Parser(
        "Compare a step with Muon with one with AdamW.",
        example=EXAMPLE,
        page="benchmarks/README.md",
    )
    add_config(parser)
    parser.add_argument("--rounds", type=count, default=15, metavar="N", help="measured steps of each kind")
    parser.add_argument(
        "--together",
        type=count,
        default=owners.TOGETHER,
        metavar="N",
        help="elements of matrices that are exchanged at once",
    )
    add_overrides(parser)
    args = parser.parse_intermixed_args(argv)
    owners.TOGETHER = args.together
    place = place_from_environment()
    steps: dict[str, Callable[[int], float]] = {}
    mesh: Mesh | None = None
    for name, kind in KINDS.items():
        config = settled_alone(
            load(
                args.config, [*args.overrides, f"optim.kind={kind}", "train.device=cpu"], place.world_size
            ).config
        )
        if mesh is None:  # that of Muon has all groups that AdamW has
            most = load(
                args.config, [*args.overrides, "optim.kind=muon", "train.device=cpu"], place.world_size
            ).config
            mesh = Mesh(most, place, torch.device("cpu"))
        step, train = TrainStep(config, mesh, engines=ENGINES), config.train
        generator = torch.Generator().manual_seed(mesh.sample_group.rank)
        shape = (config.num_microbatches, 2, train.micro_batch_size, train.seq_len)
        tokens = torch.randint(config.model.vocab_size, shape, generator=generator).numpy()
        batch = [microbatch_on(inputs, targets, mesh, key) for key, (inputs, targets) in enumerate(tokens)]

        steps[name] = partial(timed, mesh, step, batch)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    overlapped = WholeUpdate.step
    for number in range(1, args.rounds + 3):
        for name, one in steps.items():
            WholeUpdate.step = overlapped if name == "muon" else in_turn  # type: ignore[method-assign]
            seconds[name].append(one(number))
    if place.rank == 0:
        for name, found in seconds.items():
            ratio = statistics.median(a / b for a, b in zip(found[2:], seconds["adamw"][2:], strict=True))
            print(f"{name}: {1e3 * statistics.median(found[2:]):.0f} ms a step, {ratio:.2f} of AdamW's")
    assert mesh is not None
    mesh.close()
    return 0


if __name__ == "__main__":
    exit_with(run)
