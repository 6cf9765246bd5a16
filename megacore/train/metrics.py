"""A run's figures: measures steps, and brings what the device has computed to the host
without a step that waits for it.
"""

import platform
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megacore.config import Config
from megacore.distributed.collectives import all_gather
from megacore.distributed.mesh import Mesh
from megacore.distributed.events import Listener, Listeners
from megacore.model.batch import Microbatch
from megacore.train.checkpointing import Saving
from megacore.train.logs import Monitor, Report

# Of tokens a second, and of the part of all pairs that attention needs (`PairsSeen`): MFU, and MFU of causal
# attention.
MFU = Callable[[float, float], tuple[float | None, float | None]]
LAG = 2  # steps after which a GPU's figures are read: by then they have long arrived


@dataclass(frozen=True)
class StepMetrics:
    """Figures of a step, the same on every rank."""

    step: int
    loss: float  # the global batch's mean
    stops: float  # ranks that were asked to stop
    failures: float  # ranks on which the save under way has failed
    grad_norm: float
    skipped: float  # steps skipped so far
    losses: dict[str, float] = field(default_factory=dict)  # by name, if there are several


class AsyncMetrics:
    """Holds the figures of the last steps.

    Which of them are due does not depend on a rank's device, so all ranks take the same.

    On a CPU a step's figures are due at once. On a GPU they are due `LAG` steps later, and the host is never
    further ahead.
    """

    def __init__(
        self, device: torch.device, listeners: Listeners | None = None, losses: Sequence[str] = ()
    ) -> None:
        """`losses`: the names of those that each step's figures bring one by one."""
        self.listeners, self.losses = Listeners() if listeners is None else listeners, losses
        self.lag = LAG if device.type == "cuda" else 0
        self.waiting: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()
        self.pinned = (
            [torch.empty(5 + len(losses), dtype=torch.float64, pin_memory=True) for _ in range(self.lag + 1)]
            if self.lag
            else []
        )

    def post(self, step: int, figures: Tensor) -> None:
        """Begins to copy a step's `[loss, stops, failures, grad_norm, skipped, *losses]`,
        fp64 on the device, to the host.
        """
        if not self.lag:
            self.waiting.append((step, figures, None))
            return
        host, arrived = self.pinned[step % len(self.pinned)], torch.cuda.Event()
        host.copy_(figures, non_blocking=True)
        arrived.record()
        self.waiting.append((step, host, arrived))

    def take(self, *, all_of_them: bool = False) -> list[StepMetrics]:
        """The figures that are due, in order.

        With `all_of_them` it waits for the device and takes the others too.
        """
        due = []
        while len(self.waiting) > (0 if all_of_them else self.lag):
            step, figures, arrived = self.waiting.popleft()
            if arrived is not None:
                self.wait(arrived)
            numbers = figures.tolist()
            losses = dict(zip(self.losses, numbers[5:], strict=True))
            due.append(replace(StepMetrics(step, *numbers[:5]), losses=losses))
        return due

    def wait(self, arrived: torch.cuda.Event) -> None:
        """Waits until the device has sent a step's figures. A host that is late does not wait here."""
        self.listeners.notify(Listener.on_host_wait_begin, "device")
        arrived.synchronize()
        self.listeners.notify(Listener.on_host_wait_end, "device")


class StepTimer:
    """Measures the mean seconds of a step since the last reading, without validation and saving."""

    def __init__(self) -> None:
        self.steps, self.started, self.excluded = 0, time.perf_counter(), 0.0

    def now(self, device: torch.device) -> float:
        """The time once the device has done its work. A checkpoint may still be on its way to the host."""
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return time.perf_counter()

    @contextmanager
    def aside(self, device: torch.device) -> Iterator[None]:
        """A context that is not counted, because it is not part of a training step."""
        started = self.now(device)
        yield
        self.excluded += self.now(device) - started

    def read(self) -> float:
        """Returns the mean seconds of a step and starts anew. Call it after waiting for the device."""
        now = time.perf_counter()
        mean = (now - self.started - self.excluded) / max(1, self.steps)
        self.steps, self.started, self.excluded = 0, now, 0.0
        return mean


class PairsSeen:
    """Counts which part of all pairs of a sample's tokens lie in one document, in
    the steps since the last reading.

    It asks the documents' bounds, which the host knows. Without `data.document_mask` it is 1.
    """

    def __init__(self) -> None:
        self.seen, self.all = 0, 0

    def add(self, batch: list[Microbatch]) -> None:
        """Counts a step's samples on this data rank."""
        for bounds in (own for microbatch in batch for own in microbatch.documents or ()):
            self.seen += int(np.square(np.diff(bounds)).sum())
            self.all += bounds[-1] ** 2

    def read(self) -> float:
        """Returns the part and starts anew."""
        part = self.seen / self.all if self.all else 1.0
        self.seen, self.all = 0, 0
        return part


def peak_memory(device: torch.device) -> int:
    """The peak of memory in bytes: of PyTorch's allocator on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


def reserved_memory(device: torch.device) -> int:
    """The peak of what PyTorch's allocator took from a GPU, in bytes: `peak_memory`, and blocks between that
    nothing fitted into. A GPU is full by this number. On a CPU there is no such difference.
    """
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_memory(device)


def unknown(tokens_per_second: float, pairs: float) -> tuple[None, None]:
    """The utilisation where nobody tells what a token costs and what the devices can do;
    `megacore.tools.choices` does.
    """
    return None, None


class Reporter:
    """Measures steps, and gathers what all ranks have measured."""

    def __init__(
        self, config: Config, mesh: Mesh, saving: Saving, monitors: Sequence[Monitor], utilisation: MFU
    ) -> None:
        self.config, self.mesh, self.saving, self.monitors, self.utilisation = (
            config,
            mesh,
            saving,
            monitors,
            utilisation,
        )
        self.pairs = PairsSeen()
        self.tokens = 0  # of all ranks, since the last report

    def start(self) -> None:
        """Begins to measure."""
        self.timer = StepTimer()

    def count(self, batch: list[Microbatch]) -> None:
        """Counts a step that was just begun with this batch."""
        self.timer.steps += 1
        train = self.config.train
        self.tokens += len(batch) * train.micro_batch_size * self.config.data_size * train.seq_len
        self.pairs.add(batch)

    def aside(self) -> AbstractContextManager[None]:
        """A context whose time is no part of a step."""
        return self.timer.aside(self.mesh.device)

    def report(self, step: int, metrics: StepMetrics, lr: float, saved_step: int) -> Report:
        """The report of a step that the device has done. Collective."""
        steps = self.timer.steps
        seconds = self.timer.read()
        waits = self.mesh.listeners.waits()
        own, worked = seconds - waits.for_ranks / steps, waits.device_worked / steps
        parts = {
            part: value
            for monitor in self.monitors
            for part, value in monitor.parts(worked or own, waits, steps).items()
        }
        memory = peak_memory(self.mesh.device), reserved_memory(self.mesh.device)
        of_all = self.told_by_all(
            [seconds, own, worked, self.saving.read_seconds(), *memory, self.pairs.read(), *parts.values()]
        )
        seconds, _, _, save_seconds, used, reserved, *_ = of_all.amax(1).tolist()
        train, tokens, self.tokens = self.config.train, self.tokens, 0
        # data ranks have equally many tokens and ranks
        speed, pairs = tokens / steps / seconds, float(of_all[6].mean())
        mfu, mfu_causal = self.utilisation(speed, pairs)
        stragglers = self.mesh.listeners.stragglers(of_all[1].tolist(), of_all[2].tolist(), seconds)
        figures: dict[str, Any] = {
            "step": step,
            "loss": metrics.loss,
            **metrics.losses,
            "grad_norm": metrics.grad_norm,
            "lr": lr,
            "tokens": train.samples_through(step) * train.seq_len,
            "tokens_per_second": speed,
            "step_seconds": seconds,
            "mfu": mfu,
            "mfu_causal": mfu_causal,
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
        return Report(figures, by_rank, by_part, stragglers, saved_step, self.saving.took)

    def told_by_all(self, own: list[float]) -> torch.Tensor:
        """Every rank's numbers, fp64 ``[number, rank]`` on the host.

        Collective; nothing else of a report waits for the device.
        """
        return (
            all_gather(torch.tensor([own], dtype=torch.float64, device=self.mesh.device), self.mesh.world)
            .cpu()
            .T
        )
