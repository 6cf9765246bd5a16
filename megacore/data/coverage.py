"""Whether a run reads every sample of an epoch exactly once, through all layouts that it goes through."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from megacore.config.schema import Train
from megacore.data.batches import dealt
from megacore.data.samples import SampleStream, blend, visits
from megacore.errors import ConfigError

BLOCK = 1 << 20  # samples looked at in one piece: what it takes beside the tally is some 100 MB
NAMED = 3  # samples that a finding names
ENDLESS = 1 << 61  # no stream of samples gets this far


@dataclass(frozen=True)
class Leg:
    """The steps `first` to `last`, both run, that a run spends in a layout of `data_size` data ranks; `last` None: all that follow."""

    data_size: int
    first: int = 1
    last: int | None = None


@dataclass(frozen=True)
class Finding:
    """What became of one corpus's epoch."""

    prefix: str
    epoch: int
    samples: int  # that the epoch has
    first_step: int
    last_step: int
    read: int  # how often any of them was read
    missing: int
    repeated: int
    examples: list[str]  # some of those, each with where it was read

    @property
    def holds(self) -> bool:
        """As many reads as samples and none left out: each was read once."""
        return self.read == self.samples and self.missing == 0


def epoch_steps(stream: SampleStream, corpus: int, epoch: int, batch_size: int) -> tuple[int, int]:
    """The first and the last step with a sample of a corpus's epoch. Raises `ConfigError` for a corpus too rare to be read."""

    def step_of(visit: int) -> int:
        length = bisect_left(range(ENDLESS), visit + 1, key=lambda count: visits(stream.shares, corpus, count))
        if length == ENDLESS:
            prefix = stream.corpora[corpus].prefix
            raise ConfigError("data.train", f"{prefix}'s part of the samples is too small for it to come up", "a larger weight")
        return (length - 1) // batch_size + 1

    return step_of(epoch * stream.counts[corpus]), step_of((epoch + 1) * stream.counts[corpus] - 1)


def blocks(first: int, last: int, legs: list[Leg], train: Train) -> Iterator[tuple[range, int, np.ndarray]]:
    """What all ranks read in steps `first` to `last`: (steps, data size, what `dealt` says), some steps at a time."""
    length = max(1, BLOCK // train.global_batch_size)
    for leg in legs:
        stop = min(last, last if leg.last is None else leg.last) + 1
        for start in range(max(first, leg.first), stop, length):
            steps = range(start, min(start + length, stop))
            yield steps, leg.data_size, dealt(steps, leg.data_size, train)


def check_epoch(
    stream: SampleStream, corpus: int, epoch: int, legs: list[Leg], train: Train, told: Callable[[float], None] = lambda _: None
) -> Finding:
    """Counts how often each sample of a corpus's epoch is read by any rank of any leg; one byte a sample.

    `told` hears what part is done, from 0 to 1.
    """
    count = stream.counts[corpus]
    first, last = epoch_steps(stream, corpus, epoch, train.global_batch_size)
    tally = np.zeros(count, dtype=np.uint8)  # wraps at 256, which is then missing: an uneven count can never pass
    read = 0
    for steps, _, indices in blocks(first, last, legs, train):
        samples, _ = of_epoch(stream, corpus, epoch, indices)
        np.add.at(tally, samples, 1)
        read += len(samples)
        told((steps.stop - first) / (last + 1 - first))
    missing, repeated = np.flatnonzero(tally == 0), np.flatnonzero(tally > 1)
    examples = [f"{name(stream, corpus, int(sample))} is never read" for sample in missing[:NAMED]]
    for sample, places in where_read(stream, corpus, epoch, first, last, legs, train, repeated[:NAMED]).items():
        examples.append(f"{name(stream, corpus, sample)} is read {len(places)} times: {'; '.join(places[:4])}")
    prefix = stream.corpora[corpus].prefix
    return Finding(prefix, epoch, count, first, last, read, len(missing), len(repeated), examples)


def of_epoch(stream: SampleStream, corpus: int, epoch: int, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The samples of a corpus's epoch among global `indices`, and their positions in ``indices.flat``."""
    flat = indices.reshape(-1)
    ours = np.flatnonzero(blend(stream.shares, flat)[0] == corpus)  # the order of the others need not be computed
    _, epochs, samples = stream.locate(flat[ours])
    return samples[epochs == epoch], ours[epochs == epoch]


def where_read(
    stream: SampleStream, corpus: int, epoch: int, first: int, last: int, legs: list[Leg], train: Train, wanted: np.ndarray
) -> dict[int, list[str]]:
    """Every place in steps `first` to `last` at which one of the `wanted` samples is read, in words."""
    found: dict[int, list[str]] = {sample: [] for sample in wanted.tolist()}
    if found:
        for steps, data_size, indices in blocks(first, last, legs, train):
            samples, positions = of_epoch(stream, corpus, epoch, indices)
            for hit in np.flatnonzero(np.isin(samples, wanted)):
                step, rank, microbatch, _ = (int(i) for i in np.unravel_index(positions[hit], indices.shape))
                place = f"step {steps.start + step}, data rank {rank} of {data_size}, microbatch {microbatch}"
                found[int(samples[hit])].append(place)
    return found


def name(stream: SampleStream, corpus: int, sample: int) -> str:
    """A sample in words."""
    document, offset = stream.corpora[corpus].place(sample * stream.seq_len)
    return f"sample {sample} (from token {offset} of document {document})"
