"""Measures steps: time without waiting for the device, memory, model FLOPs utilisation."""

import platform
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from megacore.config import Config
from megacore.config.devices import peak_flops
from megacore.model.batch import Microbatch
from megacore.model.flops import model_flops


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


class Utilisation:
    """MFU (Chowdhery et al. 2022, PaLM): model FLOPs a second over the devices' dense peak at the run's precision.

    None if the device's peak is not known and no `peak` is given (operations a second of all ranks together). `full` counts
    attention over all pairs of positions, as is usual, or of positions in one document. `causal` counts the half that a causal model needs.
    Both are None where a model of the user's own cannot be counted so.
    """

    def __init__(self, config: Config, device: torch.device, world_size: int, peak: float | None = None) -> None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
        listed = peak_flops(name, config.train.precision)
        self.config, self.available = config, peak or (None if listed is None else listed * world_size)

    def full(self, tokens_per_second: float, pairs: float = 1.0) -> float | None:
        """The usual MFU, as a fraction. `pairs`: the part of all pairs that attention needs (`PairsSeen`)."""
        return self.of(self._model_flops(tokens_per_second, False, pairs))

    def causal(self, tokens_per_second: float, pairs: float = 1.0) -> float | None:
        """MFU with causal attention counted as half."""
        return self.of(self._model_flops(tokens_per_second, True, pairs))

    def of(self, flops_per_second: float | None) -> float | None:
        """Some operations a second, as a fraction of the peak."""
        return None if self.available is None or flops_per_second is None else flops_per_second / self.available

    def _model_flops(self, tokens_per_second: float, causal: bool, pairs: float) -> float | None:
        """The model's operations a second; None if they are not known, or nobody needs them."""
        flops = None if self.available is None else model_flops(self.config, causal, pairs)
        return None if flops is None else flops * tokens_per_second


class PairsSeen:
    """Counts which part of all pairs of a sample's tokens lie in one document, in the steps since the last reading.

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
    """The peak of what PyTorch's allocator took from a GPU, in bytes: `peak_memory`, and blocks between that nothing fitted into. A GPU is
    full by this number. On a CPU there is no such difference."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_memory(device)
