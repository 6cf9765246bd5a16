"""What the hang doctor's notes cost: how many a step makes, what one takes, and their part of the step.

torchrun --nproc-per-node 4 -m benchmarks.ledger --config configs/gpt_tiny.json parallel.tensor=2 parallel.pipeline=2 train.steps=20
"""

import tempfile
import time

import torch

from megacore.cli import Parser, exit_rank_with
from megacore.config import load
from megacore.distributed.mesh import pick_device
from megacore.distributed.rank_info import RankInfo
from megacore.tools.diagnosis.flight_recorder import FlightRecorder
from megacore.tools.diagnosis.joining import joined
from megacore.tools.diagnosis.noting import note_trainer
from megacore.train.inputs import Inputs
from megacore.train.trainer import Trainer

NOTES = 100_000


def seconds_a_note() -> float:
    """Of an operation that is begun and waited for, which makes two notes, half the time."""
    channel, x = FlightRecorder().channel((0, 1)), torch.empty(16, 32)
    started = time.perf_counter()
    for _ in range(NOTES // 2):
        with channel.during("tp", "all_reduce", x):
            pass
    return (time.perf_counter() - started) / NOTES


def run(argv: list[str], place: RankInfo) -> int:
    """Trains the config without saving, and rank 0 prints the figures."""
    parser = Parser(str(__doc__).strip().splitlines()[-1].strip(), None, ranks=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"log.dir={folder}", "checkpoint.every=0", "checkpoint.last=false", "log.tensorboard=false"]
        config = load(args.config, [*args.overrides, *fixed], place.world_size).config
        device, inputs = pick_device(config, place), Inputs(config, place.rank)
        with joined(config, place, device) as (mesh, ledger):
            started = time.perf_counter()
            note_trainer(Trainer(config, mesh, inputs), ledger).run()
            seconds = (time.perf_counter() - started) / config.train.steps
            notes = ledger.events / config.train.steps
    note = seconds_a_note()
    if place.rank == 0:
        share = notes * note / seconds
        print(f"{notes:.0f} notes a step × {note * 1e6:.2f} µs = {notes * note * 1e3:.2f} ms of {seconds * 1e3:.0f} ms: {share:.2%}")
    return 0


if __name__ == "__main__":
    exit_rank_with(run)
