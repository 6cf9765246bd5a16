"""Computes the tokens of every sample of a run from the config alone."""

from collections.abc import Sequence

import numpy as np

from megacore.config import Config
from megacore.config.schema import IGNORED
from megacore.data.indexed import IndexedTokens
from megacore.data.packing import (
    Bounds,
    Consecutive,
    Cut,
    Span,
    WholeDocuments,
    document_bounds,
    learned,
    read_tokens,
)
from megacore.data.shuffle import derive_key, permute
from megacore.errors import ConfigError, DataError

_ONE = 1 << 30  # 1 in the fixed-point arithmetic of `blend`

Spec = str | list[tuple[float, str]]  # a prefix, or weighted prefixes


def open_corpora(spec: Spec) -> list[tuple[float, IndexedTokens]]:
    """Opens the corpora of a `data.train` or `data.valid`; returns each with its
    share of the samples (the sum is 1).
    """
    weighted = [(1.0, spec)] if isinstance(spec, str) else spec
    total = sum(weight for weight, _ in weighted)
    return [(weight / total, IndexedTokens(prefix)) for weight, prefix in weighted]


def training_stream(config: Config) -> "SampleStream":
    """The stream that `config` trains on.

    Raises `ConfigError` if it names no corpus, and the errors of `SampleStream`.
    """
    if config.data.train is None:
        raise ConfigError(
            "data.train",
            "no corpus is given",
            "the prefix that launch/prepare.py wrote, such as data.train=data/stdlib",
        )
    return SampleStream(
        config.data.train,
        config.train.seq_len,
        config.train.seed,
        config.model.vocab_size,
        config.data.packing,
    )


class SampleStream:
    """The training samples of a run, by global index: the first epoch's, then the second's, and so on.

    A sample is ``seq_len + 1`` tokens of a corpus: consecutive ones, or with `packing` "best_fit" whole
    documents (`packing.py`). Every epoch has its own order of samples (`shuffle.permute`). In a blend each
    corpus has its own epochs, and its k-th sample in the run is the k-th of its order: no sample repeats
    before all were seen.

    Raises:
        DataError: a corpus is missing, damaged, or shorter than one sample.
    """

    def __init__(self, spec: Spec, seq_len: int, seed: int, vocab_size: int, packing: str = "none") -> None:
        self.seq_len, self.seed, self.vocab_size = seq_len, seed, vocab_size
        opened = open_corpora(spec)
        self.shares = [share for share, _ in opened]
        self.corpora = [tokens for _, tokens in opened]
        for tokens in self.corpora if packing == "none" else ():
            if tokens.num_tokens < seq_len + 1:
                wrong = (
                    f"sequence longer than the corpus: {tokens.num_tokens} tokens, and a sample is "
                    f"train.seq_len {seq_len} + 1"
                )
                raise DataError(
                    f"{tokens.prefix}.bin",
                    wrong,
                    f"a longer corpus, or train.seq_len at most {tokens.num_tokens - 1}",
                )
        self.cuts: list[Cut] = [
            WholeDocuments(tokens, seq_len)
            if packing == "best_fit"
            else Consecutive(tokens, seq_len, full=True)
            for tokens in self.corpora
        ]
        self.counts = [cut.count for cut in self.cuts]  # samples in an epoch of each
        # whether some tokens are not learned
        self.masked = packing == "best_fit" or any(tokens.masked for tokens in self.corpora)

    def samples(self, indices: np.ndarray) -> np.ndarray:
        """Global sample indices ``[n]`` → their tokens, int64 ``[n, seq_len + 1]``."""
        out = np.empty((len(indices), self.seq_len + 1), dtype=np.int64)
        for row, (corpus, spans) in zip(out, self._spans(indices), strict=True):
            read_tokens(corpus, spans, row)
            check_ids(row, corpus, spans, self.vocab_size)
        return out

    def learned(self, indices: np.ndarray) -> np.ndarray | None:
        """Which tokens of each sample are learned where they are targets, bool ``[n, seq_len +
        1]``; None: all, in every corpus.
        """
        return (
            np.stack([learned(*found, self.seq_len + 1) for found in self._spans(indices)])
            if self.masked
            else None
        )

    def documents(self, indices: np.ndarray) -> list[Bounds]:
        """The documents in the tokens of each sample."""
        return [document_bounds(*found, self.seq_len + 1) for found in self._spans(indices)]

    def _spans(self, indices: np.ndarray) -> list[tuple[IndexedTokens, list[Span]]]:
        """The corpus of each sample, and which of its tokens it has."""
        corpus, _, sample = self.locate(indices)
        return [
            (self.corpora[c], self.cuts[c].spans(s))
            for c, s in zip(corpus.tolist(), sample.tolist(), strict=True)
        ]

    def packed(self) -> list[str]:
        """How the documents of each corpus were packed, in words; nothing where
        samples are consecutive tokens.
        """
        return [f"packing: {cut}" for cut in self.cuts if isinstance(cut, WholeDocuments)]

    def where(self, index: int) -> tuple[str, int, int]:
        """The prefix, the epoch, and the sample within the corpus of a global sample index."""
        corpus, epoch, sample = (int(part[0]) for part in self.locate(np.array([index])))
        return self.corpora[corpus].prefix, epoch, sample

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Corpus, epoch and sample within the corpus of each global index, all ``[n]``."""
        corpus, visit = blend(self.shares, np.asarray(indices, dtype=np.int64))
        per_epoch = np.array(self.counts)[corpus]
        epoch, position = np.divmod(visit, per_epoch)
        sample = np.empty_like(position)
        for c, e in {*zip(corpus.tolist(), epoch.tolist(), strict=True)}:
            here = (corpus == c) & (epoch == e)
            sample[here] = permute(position[here], int(per_epoch[here][0]), derive_key(self.seed, c, e))
        return corpus, epoch, sample


def blend(shares: list[float], indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each index ``[n]`` of a blended stream, its corpus ``[n]``, and how many samples of that
    corpus came before it ``[n]``.

    Of the first i samples the largest corpus takes ``round(i · share)``. The samples left form a stream,
    which the next largest corpus divides in the same way. So counts need neither a table nor a loop over
    samples. After any number of samples each of k corpora is within ``1 + ln(k) / 2`` samples of its share: a
    rounding of 1/2 at each level reaches a later corpus in proportion to that corpus's part of the rest.

    Shares are rounded to multiples of 2^-30 of the rest, and the arithmetic is exact: in floating point ``i ·
    share`` would skip or repeat a sample when it rounds across an integer.
    """
    corpus, visit = np.empty_like(indices), np.empty_like(indices)
    left = np.arange(len(indices))  # positions that have no corpus yet,
    index = indices  # and their indices in the stream of the remaining corpora
    for c, fraction in _fractions(shares):
        before = _part(index, fraction)
        ours = _part(index + 1, fraction) > before
        corpus[left[ours]], visit[left[ours]] = c, before[ours]
        left, index = left[~ours], (index - before)[~ours]
    return corpus, visit


def visits(shares: list[float], corpus: int, count: int) -> int:
    """How many of the first `count` samples of a blended stream are of `corpus`."""
    for c, fraction in _fractions(shares):
        part = int(_part(np.array(count), fraction))
        if c == corpus:
            return part
        count -= part
    raise AssertionError(f"no corpus {corpus}")


def _fractions(shares: list[float]) -> list[tuple[int, int]]:
    """The corpora, largest first, each with its part of the rest that those before it leave.

    The last has exactly `_ONE`.
    """
    order = sorted(range(len(shares)), key=lambda c: -shares[c])
    return [
        (c, round(shares[c] / sum(shares[d] for d in order[level:]) * _ONE)) for level, c in enumerate(order)
    ]


def _part(count: np.ndarray, fraction: int) -> np.ndarray:
    """``round(count · fraction / _ONE)``, exact for counts up to 2^62, where the
    product itself would overflow.
    """
    return (count >> 30) * fraction + ((count & (_ONE - 1)) * fraction + _ONE // 2 >> 30)


class EvalSamples:
    """Validation samples that have every token of a corpus once as a target, in order, one
    corpus of a blend after another.

    Tokens that a corpus does not want learned are no targets. With `packing` "best_fit" the samples hold
    whole documents, and the first token of a document is no target.

    With `bos` every sample, and every document that is packed into one, has that token as its first input,
    in place of the one that it would have. The targets are the same.

    Raises:
        DataError: a corpus is missing, damaged, or has no token to predict.
    """

    def __init__(
        self, spec: Spec, seq_len: int, vocab_size: int, packing: str = "none", bos: int | None = None
    ) -> None:
        self.seq_len, self.vocab_size, self.bos = seq_len, vocab_size, bos
        self.corpora = [tokens for _, tokens in open_corpora(spec)]
        for tokens in self.corpora:
            if tokens.num_tokens < 2:
                raise DataError(f"{tokens.prefix}.bin", "has no token to predict", "at least two tokens")
        self.cuts: list[Cut] = [
            WholeDocuments(tokens, seq_len)
            if packing == "best_fit"
            else Consecutive(tokens, seq_len, full=False)
            for tokens in self.corpora
        ]

    def __len__(self) -> int:
        return sum(cut.count for cut in self.cuts)

    def samples(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sample indices ``[n]`` → inputs and targets, int64 ``[n, seq_len]``.

        Past the end of a corpus, and for indices past the last sample, they are padded with input 0 and
        target `IGNORED`; so is a target that is not learned.
        """
        tokens = np.zeros((len(indices), self.seq_len + 1), dtype=np.int64)
        targets = np.full((len(indices), self.seq_len), IGNORED, dtype=np.int64)
        for row, own, index in zip(tokens, targets, indices.tolist(), strict=True):
            if (found := self._spans(index)) is not None:
                read_tokens(*found, row)
                check_ids(row, *found, self.vocab_size)
                own[:] = np.where(learned(*found, len(row))[1:], row[1:], IGNORED)
                if self.bos is not None:
                    lengths = [length for _, length in found[1]]
                    row[np.cumsum([0, *lengths[:-1]])] = self.bos
        return tokens[:, :-1], targets

    def documents(self, indices: np.ndarray) -> list[Bounds]:
        """The documents in the tokens of each sample."""
        row = self.seq_len + 1
        return [
            (0, row) if (found := self._spans(index)) is None else document_bounds(*found, row)
            for index in indices.tolist()
        ]

    def _spans(self, index: int) -> tuple[IndexedTokens, list[Span]] | None:
        """The corpus of a sample, and which of its tokens it has; None for an index past the last one."""
        for cut in self.cuts:
            if index < cut.count:
                return cut.corpus, cut.spans(index)
            index -= cut.count
        return None


def check_ids(row: np.ndarray, corpus: IndexedTokens, spans: Sequence[Span], vocab_size: int) -> None:
    """Checks the ids of a row of tokens that some spans gave, because nobody has
    read all of a large corpus before.
    """
    if row.max() >= vocab_size or row.min() < 0:
        bad = int(np.flatnonzero((row >= vocab_size) | (row < 0))[0])
        position = [position for start, length in spans for position in range(start, start + length)][bad]
        place = f"token {position} (document {corpus.document_at(position)})"
        wrong = f"{place} is id {int(row[bad])}, beyond a vocabulary of {vocab_size}"
        raise DataError(
            f"{corpus.prefix}.bin",
            wrong,
            "the vocabulary that the corpus was prepared with, or an intact file",
        )
