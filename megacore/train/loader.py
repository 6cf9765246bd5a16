"""Reads the samples of each rank's microbatches, one step ahead."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch

from megacore.config import Config
from megacore.data.batches import dealt
from megacore.data.samples import EvalSamples
from megacore.distributed.meeting import use_device
from megacore.distributed.mesh import Mesh
from megacore.pipeline.runtime import Microbatch
from megacore.rng import key_of


class Stream(Protocol):
    """A source of training samples, such as `data.samples.SampleStream`."""

    def samples(self, indices: np.ndarray) -> np.ndarray:
        """Global sample indices ``[n]`` → their tokens, int64 ``[n, seq_len + 1]``."""


class Loader:
    """Makes the microbatches of a step, as a function of the step alone.

    `dealt` says which samples this data rank reads. Every tensor and pipeline rank reads its own copy from the memory-mapped file,
    which is cheaper than a broadcast and needs no collective.
    """

    def __init__(self, config: Config, mesh: Mesh, stream: Stream) -> None:
        self.config, self.mesh, self.stream = config, mesh, stream
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="loader", initializer=use_device, initargs=(mesh.device,))
        self.ahead: tuple[int, Future[list[Microbatch]]] | None = None
        self.thread: int | None = None  # the one that reads ahead

    def step(self, step: int) -> list[Microbatch]:
        """Returns the microbatches of `step` (from 1), and begins to read those of the next step."""
        if self.ahead is not None and self.ahead[0] == step:
            batch = self.wait(self.ahead[1])
        else:
            batch = self._read(step)
        self.ahead = step + 1, self.executor.submit(self._read_ahead, step + 1)
        return batch

    def close(self) -> None:
        """Ends the thread that reads ahead."""
        self.executor.shutdown(wait=False, cancel_futures=True)

    def wait(self, reading: Future[list[Microbatch]]) -> list[Microbatch]:
        """Waits for the microbatches that are read ahead."""
        return reading.result()

    def _read_ahead(self, step: int) -> list[Microbatch]:
        self.thread = threading.get_ident()
        return self._read(step)

    def _read(self, step: int) -> list[Microbatch]:
        train = self.config.train
        microbatches = []
        for indices in dealt(range(step, step + 1), self.mesh.sample_group.size, train)[0, self.mesh.sample_group.rank]:
            tokens = self.stream.samples(indices)
            position = int(indices[0]) % train.global_batch_size // train.micro_batch_size
            key = key_of(train.seed, step, position)  # by its position in the global batch, which is the same in every layout
            microbatches.append(microbatch_on(tokens[:, :-1], tokens[:, 1:], self.mesh.device, key))
        return microbatches


def microbatch_on(inputs: np.ndarray, targets: np.ndarray, device: torch.device, key: int = 0) -> Microbatch:
    """Copies token arrays ``[batch, seq]`` to the device, without waiting for it."""
    x, y = (torch.from_numpy(np.ascontiguousarray(a)) for a in (inputs, targets))
    if device.type == "cuda":
        x, y = (t.pin_memory().to(device, non_blocking=True) for t in (x, y))
    return Microbatch(x, y, key)


def validation_batches(config: Config, mesh: Mesh, samples: EvalSamples) -> Iterator[list[Microbatch]]:
    """This data rank's microbatches of every validation batch.

    They hold all samples in order, or `eval_batches` batches spread evenly, because the beginning of a corpus may be unlike the
    rest. The last batch is padded, so that all ranks run equally many microbatches.
    """
    train = config.train
    batches = -(-len(samples) // train.global_batch_size)
    count = len(samples)
    if train.eval_batches and train.eval_batches < batches:
        batches = train.eval_batches
        count = batches * train.global_batch_size
    for batch in range(batches):
        microbatches = []
        for positions in dealt(range(batch + 1, batch + 2), mesh.sample_group.size, train)[0, mesh.sample_group.rank]:
            indices = positions * len(samples) // count  # a position past the end stays past the end
            microbatches.append(microbatch_on(*samples.samples(indices), mesh.device))
        yield microbatches
