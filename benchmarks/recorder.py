"""What the watchdog's notes cost: how many a step makes, what one takes, and their part of the step.

torchrun --nproc-per-node 4 -m benchmarks.recorder --config configs/gpt_tiny.json parallel.tensor=2
parallel.pipeline=2 train.steps=20
"""

import tempfile
import time
from types import SimpleNamespace
from typing import Any

import torch

from megacore.distributed.communicator import ObservedWork
from megacore.distributed.events import Listener, Listeners, Operation
from megacore.distributed.init import joined
from megacore.distributed.rank_info import RankInfo
from megacore.tools.choices.partition import partitioned
from megacore.tools.choices.run import trainer_of
from megacore.tools.cli import Parser, add_config, add_overrides, exit_rank_with
from megacore.tools.crowd import share_cores
from megacore.tools.diagnosis.flight_recorder import FlightRecorder
from megacore.tools.diagnosis.guardians import Guardians
from megacore.tools.garbage import Garbage
from megacore.tools.inputs import Inputs
from megacore.tools.machine.device import take_device
from megacore.tools.settings.load import load

EXAMPLE = (
    "torchrun --nproc-per-node 2 -m benchmarks.recorder --config configs/gpt_tiny.json parallel.tensor=2"
)
NOTES = 100_000


def seconds_a_note() -> float:
    """Of an operation that is begun and waited for, which makes two notes, half the time."""
    listeners = Listeners([FlightRecorder()])
    group: Any = SimpleNamespace(name="tp", key="tp", ranks=(0, 1), rank=0)
    work, x = SimpleNamespace(wait=lambda: None), torch.empty(16, 32)
    started = time.perf_counter()
    for _ in range(NOTES // 2):
        tokens = listeners.notify(Listener.on_collective, Operation(group, "all_reduce", (x,)))
        listeners.reply(Listener.on_started, tokens)
        ObservedWork(listeners, tokens, work).wait()
    return (time.perf_counter() - started) / NOTES


def run(argv: list[str], place: RankInfo) -> int:
    """Trains the config without saving, and rank 0 prints the figures."""
    parser = Parser(
        "Measure what the notes of the hang watchdog cost in a training run.",
        example=EXAMPLE,
        page="benchmarks/README.md",
        ranks=True,
    )
    add_config(parser)
    add_overrides(parser)
    args = parser.parse_intermixed_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"log.dir={folder}", "checkpoint.every=0", "checkpoint.last=false", "log.tensorboard=false"]
        config = partitioned(load(args.config, [*args.overrides, *fixed], place.world_size).config)
        device, inputs = take_device(config, place), Inputs(config, place.rank)
        guardians = Guardians(config, place, device)
        with joined(config, place, device, guardians, [Garbage()]) as mesh:
            trainer = trainer_of(config, mesh, inputs)
            mesh.listeners.add(*share_cores(trainer.config, place.world_size, device))
            started = time.perf_counter()
            trainer.run()
            seconds = (time.perf_counter() - started) / config.train.steps
            notes = guardians.recorder.events / config.train.steps
    note = seconds_a_note()
    if place.rank == 0:
        share = notes * note / seconds
        print(
            f"{notes:.0f} notes a step × {note * 1e6:.2f} µs = {notes * note * 1e3:.2f} ms of "
            f"{seconds * 1e3:.0f} ms: {share:.2%}"
        )
    return 0


if __name__ == "__main__":
    exit_rank_with(run)
