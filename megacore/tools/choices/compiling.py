"""What `auto` becomes, once, before the first step: what rank 0 finds for its device, alike on
every rank and at each resume.

For attention and context ranks `resolve_auto` has the rules; for compiled blocks rank 0 measures.

On CPUs blocks gain or lose some per cent by being compiled, which depends on processor and model. To know
takes a minute or two, since Inductor writes and compiles C++. So short runs are not compiled, and not
measured.
"""

import json
import time
from dataclasses import dataclass
from shutil import which
from statistics import median

import torch

from megacore.checkpoint import Reader
from megacore.checkpoint.weights import recorded_sections
from megacore.config import Config
from megacore.config.implied import splits_backward
from megacore.distributed.collectives import broadcast_text
from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import RankInfo
from megacore.model.batch import Microbatch
from megacore.tools.choices import resolve_auto
from megacore.tools.choices.partition import partitioned
from megacore.tools.deepspeed.engine import ENGINES
from megacore.train.step import TrainStep

LEAST_STEPS = 200  # that a run has left; one of fewer is not even timed
# seconds that they take at least: measuring and compiling are then a few per cent of the run
WORTH_MEASURING = 1800.0
LAYERS = 2  # of the model that is measured; all blocks share one graph
SECONDS, ROUNDS = 10.0, 15  # at most, of the measurement itself
GAIN = 0.98  # compiled blocks are taken where a step takes less than this part of a plain one's time


@dataclass(frozen=True)
class Times:
    """Median seconds of a step of one microbatch through `LAYERS` layers, the head and the optimizer."""

    plain: float
    compiled: float


def settled(config: Config, mesh: Mesh, resumed: Reader | None) -> tuple[Config, str]:
    """The config without an `auto` that is chosen by the device, its model cut into stages, and in words why
    blocks are compiled or not, if somebody measured.

    Collective. `resumed`: the checkpoint that rank 0 is to go on from; its run has settled all before. The
    cut is that by which the mesh was made, whose groups follow from who shares parameters: with what is
    chosen here, the costs might cut otherwise.
    """
    found, why, cut = dict[str, str](), "", partitioned(config).partition
    if mesh.place.rank == 0:
        name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else ""
        found = resolve_auto.resolved_auto(
            config, mesh.device.type, name, None if resumed is None else recorded_sections(resumed)
        )
    found = json.loads(broadcast_text(json.dumps(found), mesh.world, mesh.device))
    config = with_choices(config, found)
    if config.train.compile != "auto":
        return config.with_partition(cut), ""
    chosen = False
    if can_compile(config, mesh.device):
        if mesh.place.rank == 0:
            chosen, why = recorded(resumed) if resumed is not None else measure(config, mesh)
        chosen = bool(broadcast_text("true" if chosen else "", mesh.world, mesh.device))
    return with_compile(config, chosen).with_partition(cut), why


def can_compile(config: Config, device: torch.device) -> bool:
    """Whether compiled blocks come into question: on a CPU, where nothing else that the
    config asks for excludes them.

    Tensor and context ranks' blocks wait for each other, so one rank could not measure them. GPUs are to be
    measured. A model of the user's own is compiled only if the config says so, and one with experts never.
    """
    train, parallel = config.train, config.parallel
    own = config.model.is_custom or config.model.num_experts is not None
    excluded = (
        own
        or config.model.dropout
        or train.offload_activations
        or train.deterministic
        or train.precision == "fp64"
    )
    divided = parallel.tensor > 1 or parallel.context > 1 or config.engine.kind != "native"
    split = parallel.pipeline > 1 and splits_backward(config) and parallel.schedule not in WHOLE
    return device.type == "cpu" and not (excluded or divided or split) and train.steps >= LEAST_STEPS


WHOLE = ("1f1b", "gpipe", "interleaved")  # schedules whose backwards are whole anyway


def with_choices(config: Config, chosen: dict[str, str]) -> Config:
    """The same config otherwise; the choices by dotted key."""
    for key, value in chosen.items():
        section, name = key.split(".")
        config = config.model_copy(
            update={section: getattr(config, section).model_copy(update={name: value})}
        )
    return config


def with_compile(config: Config, compiled: bool) -> Config:
    """The same config otherwise."""
    return config.model_copy(update={"train": config.train.model_copy(update={"compile": compiled})})


def recorded(reader: Reader) -> tuple[bool, str]:
    """What a checkpoint's run settled on.

    One that was written before there was a choice had no compiled blocks.
    """
    return recorded_sections(reader)["train"].get("compile") is True, ""


def measure(config: Config, mesh: Mesh) -> tuple[bool, str]:
    """Whether this machine is faster with compiled blocks, and in words what it measured, if anything."""
    small = Small(config, mesh)
    layers = config.model.num_layers / config.parallel.pipeline / min(LAYERS, config.model.num_layers)
    run = (
        small.seconds(with_compile(config, False))
        * max(1.0, layers)
        * config.num_microbatches
        * config.train.steps
    )
    if run < WORTH_MEASURING:
        return False, ""
    started = time.monotonic()
    if which("c++") is None and which("g++") is None and which("clang++") is None:
        return False, "train.compile=auto is false: there is no C++ compiler"
    mesh.listeners.phase("measuring compiled blocks")
    try:
        times = small.times(config)
    except RuntimeError as error:  # Inductor's, where this machine lacks something to build with
        return False, f"train.compile=auto is false: {str(error).splitlines()[0]}"
    chosen = times.compiled < GAIN * times.plain
    part, took, word = times.compiled / times.plain, time.monotonic() - started, str(chosen).lower()
    return (
        chosen,
        f"train.compile=auto is {word}: a compiled step takes {part:.2f} of a plain one's time (measured "
        f"in {took:.0f} s)",
    )


class Small:
    """Steps of one microbatch of this model with few layers, on this rank alone."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.device, self.progress = mesh.device, mesh.listeners.phase
        shape = config.train.micro_batch_size, config.train.seq_len + 1
        tokens = torch.randint(config.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
        self.batch = [Microbatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), 0)]

    def step(self, config: Config) -> TrainStep:
        """Few layers, no other ranks."""
        model = config.model.model_copy(update={"num_layers": min(LAYERS, config.model.num_layers)})
        train = config.train.model_copy(update={"global_batch_size": config.train.micro_batch_size})
        alone = {"data": 1, "pipeline": 1, "schedule": "1f1b", "chunks": 1, "sequence": False}
        parallel, engine = (
            config.parallel.model_copy(update=alone),
            config.engine.model_copy(update={"shard_optimizer": False}),
        )
        data = config.data.model_copy(update={"document_mask": False, "packing": "none", "train": None})
        small = config.model_copy(
            update={"model": model, "train": train, "parallel": parallel, "engine": engine, "data": data}
        )
        return TrainStep(small, Mesh(small, RankInfo(), self.device), engines=ENGINES)

    def timed(self, step: TrainStep) -> float:
        """Seconds of one step."""
        self.progress("measuring compiled blocks")
        started = time.perf_counter()
        step(1, self.batch)
        step.engine.settle()
        return time.perf_counter() - started

    def seconds(self, config: Config) -> float:
        """Of a step, the better of two behind a first one."""
        step = self.step(config)
        return min([self.timed(step) for _ in range(3)][1:])

    def times(self, config: Config) -> Times:
        """Plain and compiled steps in turns, so that whatever else the machine does meets both."""
        steps = [self.step(with_compile(config, compiled)) for compiled in (False, True)]
        for step in steps * 2:  # the compiled one's first takes tens of seconds
            self.timed(step)
        taken: list[list[float]] = [[], []]
        until = time.monotonic() + SECONDS
        while len(taken[0]) < ROUNDS and (time.monotonic() < until or not taken[0]):
            for own, step in zip(taken, steps, strict=True):
                own.append(self.timed(step))
        return Times(*map(median, taken))
