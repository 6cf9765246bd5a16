"""What a run says of itself: what is about to run, and every logged step."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any

import torch

from megacore.config import Config
from megacore.config.resolve_auto import why_whole
from megacore.distributed.collectives import all_gather
from megacore.distributed.mesh import Mesh
from megacore.distributed.shard import shard_of
from megacore.model.batch import Microbatch
from megacore.pipeline.generators import GENERATORS, generated
from megacore.pipeline.partition import placement_of, stage_layers
from megacore.train.async_metrics import StepMetrics
from megacore.train.checkpointing import Saving
from megacore.train.meters import PairsSeen, StepTimer, Utilisation, peak_memory, reserved_memory
from megacore.train.monitor import Monitor, Report


class Reporter:
    """Measures steps, and gathers what all ranks have measured."""

    def __init__(self, config: Config, mesh: Mesh, saving: Saving, monitors: Sequence[Monitor] = ()) -> None:
        self.config, self.mesh, self.saving, self.monitors = config, mesh, saving, monitors
        self.pairs = PairsSeen()
        self.utilisation = Utilisation(config, mesh.device, mesh.place.world_size)

    def start(self) -> None:
        """Begins to measure."""
        self.timer = StepTimer()

    def count(self, batch: list[Microbatch]) -> None:
        """Counts a step that was just begun with this batch."""
        self.timer.steps += 1
        self.pairs.add(batch)

    def aside(self) -> AbstractContextManager[None]:
        """A context whose time is no part of a step."""
        return self.timer.aside(self.mesh.device)

    def report(self, step: int, metrics: StepMetrics, lr: float, saved_step: int) -> tuple[Report, dict[int, float]]:
        """The report of a step that the device has done, and the stragglers: by rank, seconds of their own work. Collective."""
        steps = self.timer.steps
        seconds = self.timer.read()
        waits = self.mesh.observers.waits()
        own, worked = seconds - waits.for_ranks / steps, waits.device_worked / steps
        parts = {part: value for monitor in self.monitors for part, value in monitor.parts(worked or own, waits, steps).items()}
        memory = peak_memory(self.mesh.device), reserved_memory(self.mesh.device)
        of_all = self.told_by_all([seconds, own, worked, self.saving.read_seconds(), *memory, self.pairs.read(), *parts.values()])
        seconds, _, _, save_seconds, used, reserved, *_ = of_all.amax(1).tolist()
        tokens_a_step = self.config.train.global_batch_size * self.config.train.seq_len
        speed, pairs = tokens_a_step / seconds, float(of_all[6].mean())  # data ranks have equally many tokens and ranks
        stragglers = self.mesh.observers.stragglers(of_all[1].tolist(), of_all[2].tolist(), seconds)
        figures: dict[str, Any] = {
            "step": step,
            "loss": metrics.loss,
            **metrics.losses,
            "grad_norm": metrics.grad_norm,
            "lr": lr,
            "tokens": step * tokens_a_step,
            "tokens_per_second": speed,
            "step_seconds": seconds,
            "mfu": self.utilisation.full(speed, pairs),
            "mfu_causal": self.utilisation.causal(speed, pairs),
            "save_seconds": save_seconds,
            "memory_bytes": int(used),
            "memory_reserved_bytes": int(reserved),
            "skipped": int(metrics.skipped),
        }
        by_rank = {
            "rank_busy_seconds": of_all[1].tolist(),
            "rank_waiting_seconds": (of_all[0] - of_all[1]).tolist(),
            "rank_memory_bytes": of_all[4].tolist(),
            "rank_memory_reserved_bytes": of_all[5].tolist(),
            "rank_straggler": [float(rank in stragglers) for rank in range(of_all.shape[1])],
        }
        by_part = dict(zip(parts, of_all[7:].tolist(), strict=True))
        return Report(figures, by_rank, by_part, saved_step, self.saving.took), stragglers

    def told_by_all(self, own: list[float]) -> torch.Tensor:
        """Every rank's numbers, fp64 ``[number, rank]`` on the host. Collective; nothing else of a report waits for the device."""
        return all_gather(torch.tensor([own], dtype=torch.float64, device=self.mesh.device), self.mesh.world).cpu().T


def opening(config: Config, mesh: Mesh, stages: Sequence[torch.nn.Module]) -> list[str]:
    """What is about to run, in a few lines."""
    train, schedule = config.train, config.parallel.schedule
    lines = [
        f"mesh: {mesh.describe()}",
        f"batch: global_batch_size {train.global_batch_size} = micro_batch_size {train.micro_batch_size}"
        f" × microbatches {config.num_microbatches} × data {mesh.sample_group.size}",
    ]
    if schedule in GENERATORS and generated(schedule, 1, 1).splits and (why := why_whole(config)):
        lines.append(f"{schedule} runs with whole backwards, which {why}")
    held = (stage_layers(config)[stage] for stage in placement_of(config)[0])
    layers = " and ".join(f"{layers.start}–{layers.stop - 1}" for layers in held)
    own = {parameter for stage in stages for parameter in stage.parameters()}
    parameters = sum(prod(shard_of(parameter).local_shape) for parameter in own)  # an engine may hold some elsewhere
    return [*lines, f"rank 0 holds layers {layers}, {parameters:,} parameters in {train.precision}"]
