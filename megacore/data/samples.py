"""Samples: which tokens are in which sample of a run, as a pure function of the config. Nothing is built or stored."""

import numpy as np

from megacore.data.indexed import IndexedTokens, check_vocabulary
from megacore.data.order import derive_key, permute
from megacore.errors import DataError

IGNORED = -100  # a target that no loss counts: padding

Spec = str | list[tuple[float, str]]  # a prefix, or weighted prefixes


def open_corpora(spec: Spec, vocab_size: int) -> list[tuple[float, IndexedTokens]]:
    """Opens and checks the corpora of a `data.train` or `data.valid`, with their shares of the samples (which sum to 1)."""
    weighted = [(1.0, spec)] if isinstance(spec, str) else spec
    total = sum(weight for weight, _ in weighted)
    corpora = [(weight / total, IndexedTokens(prefix)) for weight, prefix in weighted]
    for _, tokens in corpora:
        check_vocabulary(tokens, vocab_size)
    return corpora


class SampleStream:
    """The training samples of a run, by global index: the first epoch's, then the second's, and so on.

    A sample is ``seq_len + 1`` consecutive tokens, starting at a multiple of `seq_len` of a corpus's token stream; the
    order of each epoch is a bijection of its own (`order.permute`). A blend gives each corpus its share of every
    prefix of the run, to within one sample a corpus, and the k-th visit to a corpus takes sample k of its order.

    Raises:
        DataError: a corpus is missing, damaged, of another vocabulary, or shorter than one sample.
    """

    def __init__(self, spec: Spec, seq_len: int, seed: int, vocab_size: int) -> None:
        self.seq_len, self.seed, self.vocab_size = seq_len, seed, vocab_size
        self.corpora = open_corpora(spec, vocab_size)
        for _, tokens in self.corpora:
            if tokens.num_tokens < seq_len + 1:
                wrong = f"has {tokens.num_tokens} tokens, and a sample is train.seq_len {seq_len} + 1"
                raise DataError(f"{tokens.prefix}.bin", wrong, f"a longer corpus, or train.seq_len at most {tokens.num_tokens - 1}")

    def samples(self, indices: np.ndarray) -> np.ndarray:
        """Global sample indices ``[n]`` → their tokens, int64 ``[n, seq_len + 1]``."""
        out = np.empty((len(indices), self.seq_len + 1), dtype=np.int64)
        for row, (corpus, _, sample) in zip(out, self._locate(indices), strict=True):
            tokens = self.corpora[corpus][1]
            row[:] = tokens.read(sample * self.seq_len, self.seq_len + 1)
            check_ids(row, tokens.prefix, sample * self.seq_len, self.vocab_size)
        return out

    def where(self, index: int) -> tuple[str, int, int]:
        """(prefix, epoch, sample within the corpus) of a global sample index."""
        ((corpus, epoch, sample),) = self._locate(np.array([index]))
        return self.corpora[corpus][1].prefix, epoch, sample

    def _locate(self, indices: np.ndarray) -> list[tuple[int, int, int]]:
        corpus, visit = blend([share for share, _ in self.corpora], np.asarray(indices, dtype=np.int64))
        places = []
        for c, v in zip(corpus.tolist(), visit.tolist(), strict=True):
            n = (self.corpora[c][1].num_tokens - 1) // self.seq_len
            epoch, position = divmod(v, n)
            places.append((c, epoch, int(permute(np.array([position]), n, derive_key(self.seed, c, epoch))[0])))
        return places


def blend(shares: list[float], indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each index of a blended stream, its corpus and which visit to that corpus it is.

    The first corpus takes of the first j samples ``round(j · share)``; what is left is a stream of its own, which the
    others divide in the same way. So counts have a closed form: no table, no loop over samples.
    """
    corpus = np.zeros_like(indices)
    visit = np.zeros_like(indices)
    left = np.arange(len(indices))  # positions not yet given to a corpus
    rest = indices.copy()  # their index in the stream of the corpora that remain
    remaining = 1.0
    for c, share in enumerate(shares):
        last = c == len(shares) - 1
        fraction = 1.0 if last else min(1.0, share / remaining)
        taken = rest if last else np.floor(rest * fraction + 0.5).astype(np.int64)
        following = rest + 1 if last else np.floor((rest + 1) * fraction + 0.5).astype(np.int64)
        ours = following > taken
        corpus[left[ours]], visit[left[ours]] = c, taken[ours]
        left, rest = left[~ours], (rest - taken)[~ours]
        remaining -= share
    return corpus, visit


class EvalSamples:
    """Every token of a validation corpus once as a target, in order; the corpora of a blend one after another.

    Raises:
        DataError: a corpus is missing, damaged, of another vocabulary, or has no token to predict.
    """

    def __init__(self, spec: Spec, seq_len: int, vocab_size: int) -> None:
        self.seq_len, self.vocab_size = seq_len, vocab_size
        self.corpora = [tokens for _, tokens in open_corpora(spec, vocab_size)]
        for tokens in self.corpora:
            if tokens.num_tokens < 2:
                raise DataError(f"{tokens.prefix}.bin", "has no token to predict", "at least two tokens")
        self.counts = [-(-(tokens.num_tokens - 1) // seq_len) for tokens in self.corpora]

    def __len__(self) -> int:
        return sum(self.counts)

    def samples(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sample indices ``[n]`` → inputs and targets, int64 ``[n, seq_len]``; padded with input 0 and target `IGNORED`
        behind the end of a corpus, and for indices past the last sample."""
        inputs = np.zeros((len(indices), self.seq_len), dtype=np.int64)
        targets = np.full((len(indices), self.seq_len), IGNORED, dtype=np.int64)
        for row, index in enumerate(indices.tolist()):
            for tokens, count in zip(self.corpora, self.counts, strict=True):
                if index < count:
                    start = index * self.seq_len
                    read = tokens.read(start, min(self.seq_len + 1, tokens.num_tokens - start))
                    check_ids(read, tokens.prefix, start, self.vocab_size)
                    inputs[row, : len(read) - 1], targets[row, : len(read) - 1] = read[:-1], read[1:]
                    break
                index -= count
        return inputs, targets

    def targets_in(self, samples: int) -> int:
        """How many targets the first `samples` samples hold, padding not counted."""
        total = 0
        for tokens, count in zip(self.corpora, self.counts, strict=True):
            total += min(samples * self.seq_len, tokens.num_tokens - 1)
            samples = max(0, samples - count)
        return total


def check_ids(tokens: np.ndarray, prefix: str, start: int, vocab_size: int) -> None:
    """The last guard: where a corpus is too large to be scanned at the start, each read is."""
    if tokens.max() >= vocab_size or tokens.min() < 0:
        bad = int(np.flatnonzero((tokens >= vocab_size) | (tokens < 0))[0])
        wrong = f"token {start + bad} is id {int(tokens[bad])}, beyond a vocabulary of {vocab_size}"
        raise DataError(f"{prefix}.bin", wrong, "the vocabulary that the corpus was prepared with, or an intact file")
