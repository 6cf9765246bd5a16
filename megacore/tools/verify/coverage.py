"""Checks that a run reads every sample of an epoch exactly once, through all its changes of layout."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from megacore.config.schema import TrainConfig
from megacore.data.samples import SampleStream, blend, visits
from megacore.data.shuffle import dealt
from megacore.errors import ConfigError

BLOCK = 1 << 20  # samples that are checked at once, in about 100 MB
NAMED = 3  # samples that a finding names
ENDLESS = 1 << 61  # no run reads this many samples


@dataclass(frozen=True)
class Leg:
    """The steps `first` to `last` (included) that a run takes with `data_size` data ranks.

    `last` None: all later steps.
    """

    data_size: int
    first: int = 1
    last: int | None = None


@dataclass(frozen=True)
class EpochCoverage:
    """The result of checking one corpus's epoch."""

    prefix: str
    epoch: int
    samples: int  # in the epoch
    first_step: int
    last_step: int
    reads: int  # of samples of the epoch, in all
    missing: int
    repeated: int
    examples: list[str]  # some of those, and where they were read

    @property
    def holds(self) -> bool:
        """Whether each sample was read once: there are as many reads as samples, and no sample is missing."""
        return self.reads == self.samples and self.missing == 0


@dataclass(frozen=True)
class Epoch:
    """One corpus's epoch, counted from 0, in a run that takes its steps in the layouts `legs`."""

    stream: SampleStream
    corpus: int
    number: int
    legs: list[Leg]
    train: TrainConfig

    def steps(self) -> tuple[int, int]:
        """The first and the last step with a sample of the epoch.

        Raises `ConfigError` if no run gets so far.
        """
        count = self.stream.counts[self.corpus]
        return self._step_of(self.number * count), self._step_of((self.number + 1) * count - 1)

    def _step_of(self, visit: int) -> int:
        """The step that reads the corpus's sample `visit`, counted from 0 over all epochs."""
        length = bisect_left(
            range(ENDLESS), visit + 1, key=lambda count: visits(self.stream.shares, self.corpus, count)
        )
        if length == ENDLESS:
            prefix = self.stream.corpora[self.corpus].prefix
            raise ConfigError(
                "data.train",
                f"no run gets to epoch {self.number} of {prefix}",
                "an earlier epoch, or a larger weight",
            )
        return self.train.batches_in(length - 1) + 1

    def check(self, told: Callable[[float], None] = lambda _: None) -> EpochCoverage:
        """Counts how often the ranks of all legs read each sample, in one byte a sample.

        `told` gets the part that is done, up to 1.
        """
        first, last = self.steps()
        count = self.stream.counts[self.corpus]
        # a count that wraps counts as missing, or adds to `reads`: neither passes
        tally = np.zeros(count, dtype=np.uint8)
        reads = 0
        for steps, _, indices in self._blocks(first, last):
            samples, _ = self._own(indices)
            np.add.at(tally, samples, 1)
            reads += len(samples)
            told((steps.stop - first) / (last + 1 - first))
        missing, repeated = np.flatnonzero(tally == 0), np.flatnonzero(tally > 1)
        examples = [f"{self._name(sample)} is never read" for sample in missing[:NAMED].tolist()]
        for sample, places in self._places(repeated[:NAMED], first, last).items():
            examples.append(f"{self._name(sample)} is read {len(places)} times: {'; '.join(places[:4])}")
        prefix = self.stream.corpora[self.corpus].prefix
        return EpochCoverage(
            prefix, self.number, count, first, last, reads, len(missing), len(repeated), examples
        )

    def _blocks(self, first: int, last: int) -> Iterator[tuple[range, int, np.ndarray]]:
        """Yields what all ranks read in steps `first` to `last`, some steps at a time: (steps,
        data ranks, result of `dealt`).
        """
        length = max(1, BLOCK // self.train.global_batch_size)
        for leg in self.legs:
            stop = 1 + (last if leg.last is None else min(last, leg.last))
            start = max(first, leg.first)
            while start < stop:
                grows = next((last for last, _ in self.train.batch_ramp if last >= start), stop) + 1
                steps = range(start, min(start + length, stop, grows))
                yield steps, leg.data_size, dealt(steps, leg.data_size, self.train)
                start = steps.stop

    def _own(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's samples among global `indices`, and their positions in ``indices.flat``."""
        flat = indices.reshape(-1)
        # the order of other corpora need not be computed
        positions = np.flatnonzero(blend(self.stream.shares, flat)[0] == self.corpus)
        _, epochs, samples = self.stream.locate(flat[positions])
        return samples[epochs == self.number], positions[epochs == self.number]

    def _places(self, wanted: np.ndarray, first: int, last: int) -> dict[int, list[str]]:
        """For each of some samples, the places where it is read, in words."""
        found: dict[int, list[str]] = {sample: [] for sample in wanted.tolist()}
        for steps, data_size, indices in self._blocks(first, last) if found else ():
            samples, positions = self._own(indices)
            for hit in np.flatnonzero(np.isin(samples, wanted)).tolist():
                step, rank, microbatch, _ = np.unravel_index(positions[hit], indices.shape)
                found[int(samples[hit])].append(
                    f"step {steps.start + step}, data rank {rank} of {data_size}, microbatch {microbatch}"
                )
        return found

    def _name(self, sample: int) -> str:
        cut = self.stream.cuts[self.corpus]
        document, offset = cut.corpus.document_and_offset(cut.spans(sample)[0][0])
        return f"sample {sample} (from token {offset} of document {document})"
