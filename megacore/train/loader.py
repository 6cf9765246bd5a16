"""Reads the samples of each rank's microbatches, one step ahead of training."""

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
        """Global sample indices ``[n]`` → which tokens are learned, bool ``[n, seq_len + 1]``; None: all."""

    def documents(self, indices: np.ndarray) -> list[Bounds]:
        """Global sample indices ``[n]`` → the bounds of the documents in each sample."""


class Loader:
    """Makes this rank's microbatches of a batch, which depend on the batch's number alone.

    `dealt` says which samples this data rank reads. Every tensor and pipeline rank reads its own copy from
    the memory-mapped file, which is cheaper than a broadcast and needs no collective.
    """

    def __init__(self, config: Config, mesh: Mesh, stream: SampleSource) -> None:
        self.config = config
        self.mesh = mesh
        self.stream = stream
        self.sources = fields_of(layers_of(config))
        self.executor = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="loader", initializer=use_device, initargs=(mesh.device,)
        )
        self.reading_ahead: tuple[int, Future[list[Microbatch]]] | None = None  # number and microbatches
        self.thread: int | None = None  # the identifier of the thread that reads ahead

    def read(self, number: int) -> list[Microbatch]:
        """Return this rank's microbatches of batch `number` (from 1), and begin to read the next batch."""
        if self.reading_ahead is not None and self.reading_ahead[0] == number:
            batch = self._wait_for(self.reading_ahead[1])
        else:
            batch = self._read(number)
        self.reading_ahead = number + 1, self.executor.submit(self._read_ahead, number + 1)
        return batch

    def close(self) -> None:
        """End the thread that reads ahead."""
        self.executor.shutdown(wait=False, cancel_futures=True)

    def _wait_for(self, reading: Future[list[Microbatch]]) -> list[Microbatch]:
        listeners = self.mesh.listeners
        listeners.notify(Listener.on_host_wait_begin, "data", self.thread)
        batch = reading.result()
        listeners.notify(Listener.on_host_wait_end, "data")
        return batch

    def _read_ahead(self, number: int) -> list[Microbatch]:
        self.thread = threading.get_ident()
        return self._read(number)

    def _read(self, number: int) -> list[Microbatch]:
        train = self.config.train
        group = self.mesh.sample_group
        first_sample = train.samples_through(number - 1)
        microbatches = []
        # `dealt` returns sample indices [batch, data rank, microbatch, sample].
        for indices in dealt(range(number, number + 1), group.size, train)[0, group.rank]:
            tokens = self.stream.samples(indices)
            learned = self.stream.learned(indices)
            targets = tokens[:, 1:]
            if learned is not None:
                targets = np.where(learned[:, 1:], targets, IGNORED)
            bounds = self.stream.documents(indices) if self.config.data.document_mask else None

            # Random numbers, such as dropout's, follow from the microbatch's position in the global batch,
            # which is the same in every layout.
            position = (int(indices[0]) - first_sample) // train.micro_batch_size
            key = key_of(train.seed, number, position)
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
    """Make a microbatch from whole samples ``[batch, seq]``, on the device of this rank.

    A context rank keeps its own tokens of each sample. The copy to a GPU is asynchronous, on the default
    stream, so kernels that are launched later see it.

    `key`: for the microbatch's random numbers. `bounds`: of the documents; attention then stays within them,
    and a target in another document than its input is ignored. `sources`: of further fields that the model's
    layers declare.
    """
    documents = None
    if bounds is not None:
        documents = tuple(map(of_inputs, bounds))
        targets = targets.copy()
        for row, sample_bounds in zip(targets, bounds, strict=True):
            ignore_across(row, sample_bounds)

    samples = Samples(tokens, targets, documents)
    arrays = {"tokens": tokens, "targets": targets}
    for name, source in (sources or {}).items():
        arrays[name] = source(samples)
    if documents is not None:
        arrays["positions"] = np.stack([document_positions(sample) for sample in documents])

    cp = mesh.cp
    seq_len = tokens.shape[1]
    if cp.size > 1:
        local = positions_of(runs_of(seq_len, cp.size, cp.rank, documents))
        for name, array in arrays.items():
            if array.shape[1] == seq_len:  # a field may have another shape, which is not divided
                arrays[name] = array[:, local]

    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    if mesh.device.type == "cuda":
        for name, tensor in tensors.items():
            tensors[name] = tensor.pin_memory().to(mesh.device, non_blocking=True)
    usual = (tensors.pop("tokens"), tensors.pop("targets"), key, documents, tensors.pop("positions", None))
    return Microbatch(*usual, tensors)


def validation_batches(config: Config, mesh: Mesh, samples: EvalSamples) -> Iterator[list[Microbatch]]:
    """Yield this data rank's microbatches of every validation batch.

    They hold all samples in order, or `eval_batches` batches spread evenly, because the beginning of a corpus
    may be unlike the rest. The last batch is padded, so that all ranks run equally many microbatches.
    """
    train = config.train.model_copy(update={"batch_ramp": ()})
    group = mesh.sample_group
    sources = fields_of(layers_of(config))
    count = len(samples)
    batches = -(-count // train.global_batch_size)
    if train.eval_batches and train.eval_batches < batches:
        batches = train.eval_batches
        count = batches * train.global_batch_size

    for batch in range(batches):
        microbatches = []
        for positions in dealt(range(batch + 1, batch + 2), group.size, train)[0, group.rank]:
            # Spread evenly. Positions past the last sample, which pad the last batch, stay past it.
            indices = positions * len(samples) // count
            tokens, targets = samples.samples(indices)
            bounds = samples.documents(indices) if config.data.document_mask else None
            microbatches.append(microbatch_on(tokens, targets, mesh, bounds=bounds, sources=sources))
        yield microbatches
