"""One training step of one rank: the real model, engine and runtime through the real plan."""

import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from megacore.config import Config
from megacore.distributed.axes import called
from megacore.engine.native import NativeEngine
from megacore.engine.stepper import OptimizerStep
from megacore.model.choose import layers_of
from megacore.tools.choices.measured import batch_on_meta, mixtures_of
from megacore.tools.choices.meta_watch import Call, Journal, MetaWatch, alive
from megacore.tools.deepspeed.engine import ENGINES
from megacore.tools.dry_run.fake import as_on_its_device, playing
from megacore.tools.planner.fsdp_units import divides_parameters
from megacore.tools.planner.routing import Routing, loads_of
from megacore.train.step import TrainStep

PARTS = ("parameters", "gradients", "optimizer", "other")  # of what a rank holds from step to step


@dataclass(frozen=True)
class DryRank:
    """What a rank did."""

    rank: int
    place: str  # its coordinates as text
    stage: int  # its coordinate along the pipeline
    tensor_rank: int
    shard_rank: int  # under fsdp; else 0
    data_rank: int  # of those that divide tokens
    expert_rank: int  # of those that divide experts
    parameters: int  # elements, before padding
    held: dict[str, int]  # bytes of `PARTS`
    # the ranks of each group that it communicates in, by the traffic's names
    groups: dict[str, tuple[int, ...]]
    calls: list[Call]  # of the step, in order
    activations: int  # bytes that forwards keep for their backwards, at most
    peak: int  # bytes
    peak_moment: str
    alive: list[tuple[str, int]]  # bytes that live then, by the moment in which they were made
    journal: Journal
    seconds: float

    def sent(self) -> dict[tuple[str, tuple[int, ...], str, str], tuple[int, int]]:
        """Calls and elements of what the rank posted, by group, its ranks, operation and dtype."""
        names = {ranks: name for name, ranks in reversed(self.groups.items())}
        found: dict[tuple[str, tuple[int, ...], str, str], tuple[int, int]] = {}
        for call in self.calls:
            key = names[call.ranks], call.ranks, call.operation, str(call.dtype).removeprefix("torch.")
            calls, elements = found.get(key, (0, 0))
            found[key] = calls + 1, elements + call.elements
        return found


def dry_run(config: Config, rank: int, host_size: int = 8, routing: Routing | None = None) -> DryRank:
    """Builds `rank` and runs its first step, with a balanced load of experts or that of a run.

    Raises `ConfigError` if the engine's code needs a device.
    """
    began, config, watch = time.perf_counter(), as_on_its_device(config), MetaWatch()
    with playing(config, rank, watch, host_size) as mesh, uncollected():
        step, loads = TrainStep(config, mesh, draw=False, engines=ENGINES), loads_of(config, routing, 0)
        for block, mixture in (found for stage in step.stages for found in mixtures_of(stage)):
            mixture.expected = loads.get(block, mixture.expected)
        held = held_by(step, watch)
        built = len(watch.calls)
        batch = [batch_on_meta(config, layers_of(config), key) for key in range(config.num_microbatches)]
        with watch.during("update"):
            step(1, batch, lambda: {"stop": False, "save_failed": False})
        step.engine.settle()
        names = {
            "world": mesh.world,
            **{"tied" if len(mesh.shared) == 1 else group.name: group for group in mesh.shared.values()},
        }
        names |= {called(axes): group for axes, group in mesh.groups.items()}
        found = DryRank(
            rank,
            mesh.coordinates_text,
            mesh.pp.rank,
            mesh.tp.rank,
            mesh.group("shard").rank if divides_parameters(config) else 0,
            mesh.gradient_group.rank,
            mesh.group("ep").rank if config.model.num_experts is not None else 0,
            sum(
                parameter.numel()
                for parameter in {id(p): p for stage in step.stages for p in stage.parameters()}.values()
            ),
            held,
            {name: group.ranks for name, group in names.items() if group.size > 1},
            watch.calls[built:],
            watch.journal.waiting(),
            watch.peak,
            watch.peak_moment,
            alive(watch),
            watch.journal,
            time.perf_counter() - began,
        )
        step.engine.close()
    return found


@contextmanager
def uncollected() -> Iterator[None]:
    """Python does not look for cycles within.

    A step makes none, and looking through the journal takes longer than the step.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def held_by(step: TrainStep, watch: MetaWatch) -> dict[str, int]:
    """Bytes that live before the first step; a storage that serves as two parts counts as the first."""

    def numbers(tensors: Iterable[Tensor]) -> set[int]:
        return {watch.numbers[tensor.untyped_storage()._cdata] for tensor in tensors}

    engine = step.engine
    assert isinstance(engine, OptimizerStep)
    if isinstance(engine, NativeEngine):
        parameters = numbers(parameter for stage in step.stages for parameter in stage.parameters())
        gradients = numbers(buffer.gradients for buffer in engine.buffers) - parameters
    else:
        values = [
            *(own.master for own in engine.held.ranges),
            *(frozen for frozen, _ in engine.frozen().values()),
        ]
        for tensor in (*values, *(gradient for gradient, _ in engine.gradients().values())):
            watch.note(tensor)  # made while FSDP2 divided, which was not seen
        parameters = numbers(values)
        gradients = numbers(gradient for gradient, _ in engine.gradients().values()) - parameters
    optimizer = numbers(engine.held.memory()) - parameters - gradients
    others = set(watch.numbers.values()) - parameters - gradients - optimizer
    sizes = [block.size for block in watch.journal.blocks]
    return {
        name: sum(sizes[i] for i in part)
        for name, part in zip(PARTS, (parameters, gradients, optimizer, others), strict=True)
    }
