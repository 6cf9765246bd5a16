"""Measures steps, and copies their results to the host without a step that waits for the device."""

import json
import math
import platform
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megacore.checkpoint import Ranks
from megacore.config import Config
from megacore.distributed.collectives import all_gather
from megacore.distributed.events import Listener, Listeners, Waits
from megacore.distributed.mesh import Mesh
from megacore.model.batch import Microbatch
from megacore.records import FIGURES
from megacore.train.callbacks import Callback, Report
from megacore.train.checkpointing import Saving
from megacore.train.step import StepResult

# From tokens per second, and the fraction of all pairs of tokens that attend (`AttendedPairs`): MFU, and MFU
# with half of attention, as causal attention computes it. None where the device's peak is unknown.
Utilisation = Callable[[float, float], tuple[float | None, float | None]]
LAG = 2  # steps after which a GPU's results are read


class PendingResults:
    """Copies step results to the host, and hands them out in order when they are due.

    On a CPU a result is due at once. On a GPU it is due `LAG` steps later: the host waits for it then, so it
    never runs further ahead, and the device always has the next step to do. Which results are due depends on
    the step alone, so all ranks take the same ones.
    """

    def __init__(self, device: torch.device, listeners: Listeners) -> None:
        self.listeners = listeners
        self.lag = LAG if device.type == "cuda" else 0
        self.pending: deque[tuple[StepResult[Tensor], Tensor, torch.cuda.Event | None]] = deque()
        self.pinned: list[Tensor] = []  # host buffers, used in turn

    def post(self, result: StepResult[Tensor]) -> None:
        """Begin to copy a step's result to the host."""
        packed = result.pack()
        if self.lag == 0:
            self.pending.append((result, packed, None))
            return

        if not self.pinned:
            self.pinned = [
                torch.empty_like(packed, device="cpu", pin_memory=True) for _ in range(self.lag + 1)
            ]
        host = self.pinned[result.step % len(self.pinned)]
        copied = torch.cuda.Event()
        host.copy_(packed, non_blocking=True)
        copied.record()
        self.pending.append((result, host, copied))

    def take(self, *, all_of_them: bool = False) -> list[StepResult[float]]:
        """Return the results that are due, oldest first.

        With `all_of_them`, wait for the device and return the others too.
        """
        due = []
        most_pending = 0 if all_of_them else self.lag
        while len(self.pending) > most_pending:
            result, packed, copied = self.pending.popleft()
            if copied is not None:
                self._wait(copied)
            due.append(result.unpack(packed))
        return due

    def _wait(self, copied: torch.cuda.Event) -> None:
        """Wait until the device has done a step and copied its result."""
        self.listeners.notify(Listener.on_host_wait_begin, "device")
        copied.synchronize()
        self.listeners.notify(Listener.on_host_wait_end, "device")


class StepTimer:
    """Measures the mean seconds of a step since the last reading, without validations and saves."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.restart()

    def restart(self) -> None:
        """Begin to measure now."""
        self.steps = 0
        self.paused_seconds = 0.0
        self.started = time.perf_counter()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Return a context whose time does not count.

        Waits for the device before and after it, so that launched work counts where it belongs.
        """
        began = self._time_when_done()
        yield
        self.paused_seconds += self._time_when_done() - began

    def read(self) -> float:
        """Return the mean and begin anew. The caller has waited for the device."""
        now = time.perf_counter()
        mean = (now - self.started - self.paused_seconds) / max(1, self.steps)
        self.steps = 0
        self.paused_seconds = 0.0
        self.started = now
        return mean

    def _time_when_done(self) -> float:
        """Wait for the compute stream, and return the time.

        Not for the whole device: another stream may still copy a checkpoint to the host.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return time.perf_counter()


class AttendedPairs:
    """The fraction of all pairs of a sample's tokens that lie in one document, since the last reading.

    With `data.document_mask`, attention computes only these. Without it the fraction is 1. Documents' bounds
    are on the host, so counting waits for nothing.
    """

    def __init__(self) -> None:
        self.attended = 0
        self.all = 0

    def add(self, batch: list[Microbatch]) -> None:
        """Count the samples of a step on this data rank."""
        for microbatch in batch:
            for bounds in microbatch.documents or ():
                self.attended += int(np.square(np.diff(bounds)).sum())
                self.all += bounds[-1] ** 2

    def read(self) -> float:
        """Return the fraction and begin anew."""
        fraction = self.attended / self.all if self.all else 1.0
        self.attended = self.all = 0
        return fraction


def peak_memory(device: torch.device) -> int:
    """Return the peak of memory in bytes: of PyTorch's allocator on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reserved_memory(device: torch.device) -> int:
    """Return the peak in bytes of what PyTorch's allocator took from a GPU.

    This is `peak_memory` and blocks in between that nothing fitted into, so a GPU is full by this number. On
    a CPU the two are the same.
    """
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_memory(device)


def unknown_utilisation(tokens_per_second: float, pairs: float) -> tuple[None, None]:
    """Return the utilisation where the cost of a token or the peak of the device is unknown."""
    return None, None


class Reporter:
    """Measures this rank's steps, and gathers what all ranks have measured for a logged step."""

    def __init__(self, config: Config, mesh: Mesh, saving: Saving, utilisation: Utilisation) -> None:
        self.config = config
        self.mesh = mesh
        self.saving = saving
        self.utilisation = utilisation
        self.timer = StepTimer(mesh.device)
        self.pairs = AttendedPairs()
        self.tokens = 0  # of all ranks since the last report
        self.part_names: list[str] | None = None  # of `Callback.step_parts`, agreed at the first report

    def start(self) -> None:
        """Begin to measure."""
        self.timer.restart()

    def count(self, batch: list[Microbatch]) -> None:
        """Count a step that was launched."""
        train = self.config.train
        self.timer.steps += 1
        self.tokens += len(batch) * self.config.data_size * train.micro_batch_size * train.seq_len
        self.pairs.add(batch)

    def report(self, result: StepResult[float], checkpoint_step: int, stages: Sequence[nn.Module]) -> Report:
        """Return the report of a step that the device has finished.

        Collective over the world. The host waits for one all-gather, and in the first report for the names
        of step parts. `stages`: this rank's part of the model, for callbacks.
        """
        device = self.mesh.device
        steps = self.timer.steps
        local_seconds = self.timer.read()
        waits = self.mesh.listeners.step_waits()
        busy_seconds = local_seconds - waits.for_ranks / steps
        device_seconds = waits.device_worked / steps  # 0 on a CPU
        measured = {
            "step_seconds": local_seconds,
            "busy_seconds": busy_seconds,
            "device_seconds": device_seconds,
            "save_seconds": self.saving.read_seconds(),
            "memory_bytes": float(peak_memory(device)),
            "memory_reserved_bytes": float(reserved_memory(device)),
            "pairs": self.pairs.read(),
        }
        parts = self.read_step_parts(device_seconds or busy_seconds, waits, steps)
        rows = self.gather([*measured.values(), *parts.values()])
        by_rank = dict(zip(measured, rows[: len(measured)], strict=True))

        # The slowest rank's step counts. Data ranks have equally many tokens.
        step_seconds = max(by_rank["step_seconds"])
        tokens_per_second = self.tokens / steps / step_seconds
        self.tokens = 0
        pairs = fmean(by_rank["pairs"])
        mfu, mfu_causal = self.utilisation(tokens_per_second, pairs)
        train = self.config.train
        metrics: dict[str, Any] = {
            "step": result.step,
            "loss": result.loss,
            **result.losses,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            # without the batches that rollbacks have passed over
            "tokens": train.samples_through(result.step) * train.seq_len,
            "tokens_per_second": tokens_per_second,
            "step_seconds": step_seconds,
            "mfu": mfu,
            "mfu_causal": mfu_causal,
            "save_seconds": max(by_rank["save_seconds"]),
            "memory_bytes": int(max(by_rank["memory_bytes"])),
            "memory_reserved_bytes": int(max(by_rank["memory_reserved_bytes"])),
            "skipped": int(result.skipped_so_far),
        }
        self.add_metrics(metrics, stages)
        stragglers = self.mesh.listeners.stragglers(
            by_rank["busy_seconds"], by_rank["device_seconds"], step_seconds
        )
        if stragglers:
            metrics["stragglers"] = list(stragglers)
        times = zip(by_rank["step_seconds"], by_rank["busy_seconds"], strict=True)
        return Report(
            metrics=metrics,
            by_rank={
                "rank_busy_seconds": by_rank["busy_seconds"],
                "rank_waiting_seconds": [seconds - busy for seconds, busy in times],
                "rank_memory_bytes": by_rank["memory_bytes"],
                "rank_memory_reserved_bytes": by_rank["memory_reserved_bytes"],
                "rank_straggler": [float(rank in stragglers) for rank in range(self.mesh.world.size)],
            },
            by_part=dict(zip(parts, rows[len(measured) :], strict=True)),
            stragglers=stragglers,
            checkpoint_step=checkpoint_step,
            checkpoint_seconds=self.saving.last_save_seconds,
        )

    def read_step_parts(self, busy_seconds: float, waits: Waits, steps: int) -> dict[str, float]:
        """Return the seconds of this rank's step by what callbacks say it spent them on.

        All ranks return the names that rank 0 had at the first report, in its order, so that the all-gather
        has one shape even if a callback fails on some rank: what it would have said is NaN there.
        """
        parts: dict[str, float] = {}
        listeners = self.mesh.listeners
        for callback, answer in listeners.notify(Callback.step_parts, busy_seconds, waits, steps):
            try:
                parts.update({name: float(seconds) for name, seconds in answer.items()})
            except (TypeError, ValueError, AttributeError) as error:
                listeners.fail(callback, Callback.step_parts, error)
        if self.part_names is None:
            names = Ranks(self.mesh).share(json.dumps(list(parts)).encode())
            self.part_names = json.loads(names)
        return {name: parts.get(name, math.nan) for name in self.part_names}

    def gather(self, numbers: list[float]) -> list[list[float]]:
        """Return for each number the values of all ranks. Collective; waits for the device."""
        local = torch.tensor([numbers], dtype=torch.float64, device=self.mesh.device)
        by_rank = all_gather(local, self.mesh.world).cpu()
        columns: list[list[float]] = by_rank.T.tolist()
        return columns

    def add_metrics(self, metrics: dict[str, Any], stages: Sequence[nn.Module]) -> None:
        """Add what callbacks measure of a logged step to its metrics."""
        listeners = self.mesh.listeners
        for callback, answer in listeners.notify(Callback.metrics, metrics, stages):
            try:
                metrics.update(checked_metrics(answer, metrics))
            except (TypeError, ValueError, AttributeError) as error:
                listeners.fail(callback, Callback.metrics, error)


def checked_metrics(answer: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, float | list[float]]:
    """Return a callback's metrics as numbers.

    Raises:
        ValueError: if `metrics`, or a line of metrics.jsonl, already has one of the names.
        TypeError: if a value is not a number or a list of numbers.
    """
    numbers: dict[str, float | list[float]] = {}
    for name, value in answer.items():
        if name in FIGURES or name in metrics:
            raise ValueError(f"{name} is another metric's name")
        numbers[name] = [float(number) for number in value] if isinstance(value, list) else float(value)
    return numbers
