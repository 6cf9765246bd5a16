"""Which tokens of a corpus make each sample: consecutive ones, or whole documents (`data.packing`);
and where documents begin in it.

A sample is a row of ``seq_len + 1`` tokens, of which the last is a target only. Spans of the corpus's token
stream fill it from the left, and padding the rest. The documents of a row of n tokens are a tuple: where each
begins (0 first), and n. The corpus's index tells; no token is looked at.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from megacore.config.schema import IGNORED
from megacore.data.indexed import IndexedTokens
from megacore.errors import DataError

BLOCK = 1 << 22  # documents that are packed at once, in some hundred MB

Span = tuple[int, int]  # the position of its first token in the corpus's stream, and how many tokens
Bounds = tuple[int, ...]  # of documents in a row


class Consecutive:
    """Samples of consecutive tokens, which begin at multiples of `seq_len`. Nothing is built or stored.

    Those of training are full, and those of an evaluation have every token but the first as a target.
    """

    def __init__(self, corpus: IndexedTokens, seq_len: int, *, full: bool) -> None:
        self.corpus, self.seq_len = corpus, seq_len
        targets = corpus.num_tokens - 1
        self.count = targets // seq_len if full else -(-targets // seq_len)

    def spans(self, sample: int) -> list[Span]:
        """The spans of sample number `sample`."""
        start = sample * self.seq_len
        return [(start, min(self.seq_len + 1, self.corpus.num_tokens - start))]


class WholeDocuments:
    """Samples of whole documents, by best-fit-decreasing packing (Ding et al. 2024, Fewer
    Truncations Improve Language Modeling).

    A document longer than a sample is cut into pieces that are as long as a sample, and a rest. Each piece
    begins with the last token of the piece before, so that every token of a document but its first is a
    target once. Documents of one token have no target, and are left out.

    The packing depends on the lengths of the documents and on `seq_len` alone. Every rank computes it when it
    starts: that takes less time than ranks need to agree on a file, and no file can be of another corpus.
    `BLOCK` documents are packed at a time. So packing takes some hundred MB at any size of the corpus, and
    then 12 bytes a piece are held and 8 a sample.

    Raises:
        DataError: no document has two tokens, or the index is damaged.
    """

    def __init__(self, corpus: IndexedTokens, seq_len: int) -> None:
        self.corpus, self.row = corpus, seq_len + 1
        self.documents = self.cut = self.cut_otherwise = 0
        starts, lengths, sizes = [], [], []
        for first in range(0, corpus.num_documents, BLOCK):
            begins, whole = corpus.documents(first, min(first + BLOCK, corpus.num_documents))
            pieces = -(-np.maximum(whole - 1, 0) // seq_len)  # of each document
            self.documents += int((pieces > 0).sum())
            self.cut += int((pieces > 1).sum())
            # Its targets would lie in several samples of consecutive tokens.
            self.cut_otherwise += int(
                (begins // seq_len != (begins + np.maximum(whole - 2, 0)) // seq_len).sum()
            )
            of = np.repeat(np.arange(len(whole)), pieces)
            offset = (np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * seq_len
            length = np.minimum(whole[of] - offset, self.row).astype(np.int32)
            bins = best_fit(length, self.row)
            order = np.argsort(bins, kind="stable")  # in a sample, pieces are in the order of the corpus
            starts.append((begins[of] + offset)[order])
            lengths.append(length[order])
            sizes.append(np.bincount(bins))
        self._starts, self._lengths = np.concatenate(starts), np.concatenate(lengths)
        self._first = np.append(0, np.cumsum(np.concatenate(sizes)))  # the first piece of each sample
        self.count = len(self._first) - 1
        if not self.count:
            raise DataError(
                f"{corpus.prefix}.bin",
                "has no document of two tokens, so nothing to predict",
                "longer documents",
            )
        self.padding = self.count * self.row - int(self._lengths.sum(dtype=np.int64))

    def spans(self, sample: int) -> list[Span]:
        """The spans of sample number `sample`: a piece each."""
        own = slice(int(self._first[sample]), int(self._first[sample + 1]))
        return list(zip(self._starts[own].tolist(), self._lengths[own].tolist(), strict=True))

    def __str__(self) -> str:
        padding = self.padding / self.count / self.row
        return (
            f"{self.corpus.prefix}: {self.documents:,} documents in {self.count:,} samples, {padding:.2%} "
            f"padding; {self.cut:,} documents "
            f"are longer than a sample and cut (without packing {self.cut_otherwise:,} are cut)"
        )


Cut = Consecutive | WholeDocuments


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The number of the bin ``[n]`` that each item of `lengths` ``[n]``, from 1 to `capacity`, goes into.

    Best fit, longest first: an item goes into the fullest bin that has room for it, of equally full ones into
    the first, or else into a new one. All items of one length are placed together, into a range of bins with
    equal room at once. Afterwards these have less than half the room that they had. So there are at most
    about ``3 · log2(capacity)`` rounds for each length that occurs, however many items there are.
    """
    by_length = np.argsort(-lengths, kind="stable")
    bins = np.empty(len(lengths), dtype=np.int64)  # of the items by length
    rooms: list[int] = []  # that bins have, ascending; and by room the ranges of such bins' numbers
    having: dict[int, list[tuple[int, int]]] = {}
    opened = at = 0

    def leave(first: int, stop: int, room: int) -> None:
        if first < stop and room:
            if room not in having:
                insort(rooms, room)
            heappush(having.setdefault(room, []), (first, stop))

    sizes, counts = np.unique(lengths, return_counts=True)
    for size, items in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while items:
            i = bisect_left(rooms, size)
            if i == len(rooms):
                new = -(-items // (capacity // size))
                leave(opened, opened + new, capacity)
                opened += new
            room = rooms[i]
            first, stop = heappop(having[room])
            if not having[room]:
                del having[room], rooms[i]
            each = room // size
            full = min(stop, first + items // each)  # bins before it take as many as they can hold
            rest = items - (full - first) * each if full < stop else 0  # the last items go into this one
            begun = full + (rest > 0)
            placed = (full - first) * each + rest
            bins[at : at + placed] = first + np.arange(placed) // each
            leave(first, full, room - each * size)
            leave(full, begun, room - rest * size)
            leave(begun, stop, room)
            at, items = at + placed, items - placed
    out = np.empty_like(bins)
    out[by_length] = bins
    return out


def read_tokens(corpus: IndexedTokens, spans: Sequence[Span], out: np.ndarray) -> None:
    """Copies the tokens of some spans into the row `out`, with 0 behind them."""
    at = 0
    for start, length in spans:
        out[at : at + length] = corpus.read(start, length)
        at += length
    out[at:] = 0


def learned(corpus: IndexedTokens, spans: Sequence[Span], row: int) -> np.ndarray:
    """Which of the tokens of some spans, and of the padding behind them, are learned where
    they are targets, bool ``[row]``.

    The first of a span is not: nothing before it in the row says what it is.
    """
    out, at = np.zeros(row, dtype=np.bool_), 0
    for start, length in spans:
        out[at : at + length] = corpus.learned(start, length)
        if at:
            out[at] = False
        at += length
    return out


def document_bounds(corpus: IndexedTokens, spans: Sequence[Span], row: int) -> Bounds:
    """The documents in the tokens of some spans of a corpus, which begin a row of `row` tokens.

    A document that began earlier counts from the span's first token. Behind the spans is padding, which is a
    document too.
    """
    begins, at = [], 0
    for start, length in spans:
        begins += [
            at,
            *(int(position) - start + at for position in corpus.document_starts(start + 1, start + length)),
        ]
        at += length
    return (*begins, *([at] if at < row else []), row)


def of_inputs(bounds: Bounds) -> Bounds:
    """The documents of a sample's inputs, from those of its tokens: the last token is a target only."""
    last = bounds[-1] - 1
    return (*(bound for bound in bounds if bound < last), last)


def document_positions(bounds: Bounds) -> np.ndarray:
    """The position of every token in its document, int64 ``[tokens]``."""
    return np.arange(bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds))


def ignore_across(targets: np.ndarray, bounds: Bounds) -> None:
    """Sets the targets ``[tokens - 1]`` that begin a document to `IGNORED`: nothing before them in
    the sample says what they are.
    """
    targets[[bound - 1 for bound in bounds[1:-1]]] = IGNORED
