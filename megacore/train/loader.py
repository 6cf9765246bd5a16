"""Which samples each rank's microbatches hold, read one step ahead."""

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from megacore.config import Config
from megacore.data.samples import EvalSamples, SampleStream
from megacore.mesh import Mesh
from megacore.pipeline.runtime import Microbatch
from megacore.rng import key_of


class Loader:
    """A step's microbatches as a pure function of the step.

    Microbatch j of data rank d is the global batch's microbatch ``j · data + d``: which samples share a
    microbatch, and the key of its dropout, do not depend on the layout. Every tensor and pipeline rank reads its own
    copy from the memory-mapped file, which is cheaper than a broadcast and needs no collective.
    """

    def __init__(self, config: Config, mesh: Mesh, stream: SampleStream) -> None:
        self.config, self.mesh, self.stream = config, mesh, stream
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self.ahead: tuple[int, Future[list[Microbatch]]] | None = None

    def step(self, step: int) -> list[Microbatch]:
        """The microbatches of `step` (from 1), and begins to read those of the next."""
        if self.ahead is not None and self.ahead[0] == step:
            batch = self.ahead[1].result()
        else:
            batch = self._read(step)
        if step < self.config.train.steps:
            self.ahead = step + 1, self.executor.submit(self._read, step + 1)
        return batch

    def _read(self, step: int) -> list[Microbatch]:
        train = self.config.train
        data_ranks = self.mesh.dp.size
        microbatches = []
        for j in range(self.config.num_microbatches):
            index = j * data_ranks + self.mesh.dp.rank
            first = (step - 1) * train.global_batch_size + index * train.micro_batch_size
            tokens = self.stream.samples(np.arange(first, first + train.micro_batch_size))
            microbatches.append(self._place(tokens[:, :-1], tokens[:, 1:], key_of(train.seed, step, index)))
        return microbatches

    def _place(self, inputs: np.ndarray, targets: np.ndarray, key: int = 0) -> Microbatch:
        return place_microbatch(inputs, targets, self.mesh.device, key)


def place_microbatch(inputs: np.ndarray, targets: np.ndarray, device: torch.device, key: int = 0) -> Microbatch:
    """Token arrays ``[batch, seq]`` on the device, copied without waiting for it."""
    pair = torch.from_numpy(np.ascontiguousarray(inputs)), torch.from_numpy(np.ascontiguousarray(targets))
    if device.type == "cuda":
        pair = tuple(t.pin_memory().to(device, non_blocking=True) for t in pair)
    return Microbatch(*pair, key)


def validation_batches(config: Config, mesh: Mesh, samples: EvalSamples) -> list[list[np.ndarray]]:
    """For each validation batch the sample indices of this data rank's microbatches.

    Every sample once, in order; indices past the end are padding, so that all ranks run equally many microbatches.
    """
    train = config.train
    batches = -(-len(samples) // train.global_batch_size)
    if train.eval_batches:
        batches = min(batches, train.eval_batches)
    first = [
        [(b * config.num_microbatches + j) * mesh.dp.size + mesh.dp.rank for j in range(config.num_microbatches)] for b in range(batches)
    ]
    return [[np.arange(i * train.micro_batch_size, (i + 1) * train.micro_batch_size) for i in row] for row in first]
