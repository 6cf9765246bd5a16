"""Reads the samples of each rank's microbatches, one step ahead."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch

from megacore.config import Config
from megacore.config.schema import IGNORED
from megacore.context_parallel.sharding import positions_of, runs_of
from megacore.data.packing import Bounds, document_positions, ignore_across, of_inputs
from megacore.data.samples import EvalSamples
from megacore.data.shuffle import dealt
from megacore.distributed.events import Listener
from megacore.distributed.mesh import Mesh
from megacore.distributed.rendezvous import use_device
from megacore.model.batch import FieldSource, Microbatch, Samples
from megacore.model.choose import layers_of
from megacore.model.layers import fields_of
from megacore.rng import key_of


class SampleSource(Protocol):
    """A source of training samples, such as `data.samples.SampleStream`."""

    def samples(self, indices: np.ndarray) -> np.ndarray:
        """Global sample indices ``[n]`` → their tokens, int64 ``[n, seq_len + 1]``."""

    def learned(self, indices: np.ndarray) -> np.ndarray | None:
        """Global sample indices ``[n]`` → which tokens of each are learned, bool
        ``[n, seq_len + 1]``; None: all.
        """

    def documents(self, indices: np.ndarray) -> list[Bounds]:
        """Global sample indices ``[n]`` → the documents in the tokens of each sample."""


class Loader:
    """Makes the microbatches of a step, as a function of the step alone.

    `dealt` says which samples this data rank reads. Every tensor and pipeline rank reads its own copy from
    the memory-mapped file, which is cheaper than a broadcast and needs no collective.
    """

    def __init__(self, config: Config, mesh: Mesh, stream: SampleSource) -> None:
        self.config, self.mesh, self.stream = config, mesh, stream
        self.sources = fields_of(layers_of(config))
        self.executor = ThreadPoolExecutor(
            1, thread_name_prefix="loader", initializer=use_device, initargs=(mesh.device,)
        )
        self.ahead: tuple[int, Future[list[Microbatch]]] | None = None
        self.thread: int | None = None  # the one that reads ahead

    def step(self, step: int) -> list[Microbatch]:
        """Returns the microbatches of `step` (from 1), and begins to read those of the next step."""
        if self.ahead is not None and self.ahead[0] == step:
            batch = self._wait(self.ahead[1])
        else:
            batch = self._read(step)
        self.ahead = step + 1, self.executor.submit(self._read_ahead, step + 1)
        return batch

    def close(self) -> None:
        """Ends the thread that reads ahead."""
        self.executor.shutdown(wait=False, cancel_futures=True)

    def _wait(self, reading: Future[list[Microbatch]]) -> list[Microbatch]:
        """Waits for the microbatches that are read ahead."""
        listeners = self.mesh.listeners
        listeners.notify(Listener.on_host_wait_begin, "data", self.thread)
        batch = reading.result()
        listeners.notify(Listener.on_host_wait_end, "data")
        return batch

    def _read_ahead(self, step: int) -> list[Microbatch]:
        self.thread = threading.get_ident()
        return self._read(step)

    def _read(self, step: int) -> list[Microbatch]:
        train = self.config.train
        microbatches = []
        for indices in dealt(range(step, step + 1), self.mesh.sample_group.size, train)[
            0, self.mesh.sample_group.rank
        ]:
            tokens, learned = self.stream.samples(indices), self.stream.learned(indices)
            targets = tokens[:, 1:] if learned is None else np.where(learned[:, 1:], tokens[:, 1:], IGNORED)
            bounds = self.stream.documents(indices) if self.config.data.document_mask else None
            position = (int(indices[0]) - train.samples_through(step - 1)) // train.micro_batch_size
            # by its position in the global batch, which is the same in every layout
            key = key_of(train.seed, step, position)
            microbatches.append(microbatch_on(tokens[:, :-1], targets, self.mesh, key, bounds, self.sources))
        return microbatches


def microbatch_on(
    tokens: np.ndarray,
    targets: np.ndarray,
    mesh: Mesh,
    key: int = 0,
    bounds: Sequence[Bounds] | None = None,
    sources: Mapping[str, FieldSource] | None = None,
) -> Microbatch:
    """Makes the batch's fields from whole samples ``[batch, seq]``, and copies this context rank's tokens of
    each to the device, without waiting for it.

    With `bounds` of the documents, attention stays within them, and no target is in another document than its
    input. `sources`: of the fields that the model's layers declare.
    """
    documents, cp = None, mesh.cp
    if bounds is not None:
        documents, targets = tuple(map(of_inputs, bounds)), targets.copy()
        for row, sample in zip(targets, bounds, strict=True):
            ignore_across(row, sample)
    samples = Samples(tokens, targets, documents)
    arrays = {"tokens": tokens, "targets": targets} | {
        name: source(samples) for name, source in (sources or {}).items()
    }
    if documents is not None:
        arrays["positions"] = np.stack([document_positions(own) for own in documents])
    if cp.size > 1:
        own = positions_of(runs_of(tokens.shape[1], cp.size, cp.rank, documents))
        arrays = {
            name: array[:, own] if array.shape[1] == tokens.shape[1] else array
            for name, array in arrays.items()
        }
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    if mesh.device.type == "cuda":
        tensors = {name: t.pin_memory().to(mesh.device, non_blocking=True) for name, t in tensors.items()}
    usual = (tensors.pop("tokens"), tensors.pop("targets"), key, documents, tensors.pop("positions", None))
    return Microbatch(*usual, tensors)


def validation_batches(config: Config, mesh: Mesh, samples: EvalSamples) -> Iterator[list[Microbatch]]:
    """This data rank's microbatches of every validation batch.

    They hold all samples in order, or `eval_batches` batches spread evenly, because the beginning of a corpus
    may be unlike the rest. The last batch is padded, so that all ranks run equally many microbatches.
    """
    train, sources = config.train.model_copy(update={"batch_ramp": ()}), fields_of(layers_of(config))
    batches = -(-len(samples) // train.global_batch_size)
    count = len(samples)
    if train.eval_batches and train.eval_batches < batches:
        batches = train.eval_batches
        count = batches * train.global_batch_size
    for batch in range(batches):
        microbatches = []
        for positions in dealt(range(batch + 1, batch + 2), mesh.sample_group.size, train)[
            0, mesh.sample_group.rank
        ]:
            indices = positions * len(samples) // count  # a position past the end stays past the end
            bounds = samples.documents(indices) if config.data.document_mask else None
            microbatches.append(
                microbatch_on(*samples.samples(indices), mesh, bounds=bounds, sources=sources)
            )
        yield microbatches
