"""Which tokens of a sequence a context rank holds, and which parts of attention lie
between its tokens and others.

A sequence of s tokens is cut into 2·c pieces for c ranks. Rank r holds piece r and piece 2c-1-r: an early
one, whose tokens see few others, and a late one, whose tokens see many. So all ranks have equal work under a
causal mask. Within documents, whose lengths differ, more pieces are dealt by work where that is more even.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

EVEN = 1.05  # the most work of a rank over the mean that counts as balanced


@dataclass(frozen=True)
class Run:
    """Consecutive tokens ``start … stop - 1`` of a sequence, which lie at `at` and behind it in a tensor."""

    start: int
    stop: int
    at: int

    def within(self, start: int, stop: int) -> "Run | None":
        """The part of the run that lies in ``start … stop - 1`` of the sequence; None if there is none."""
        first, last = max(self.start, start), min(self.stop, stop)
        return Run(first, last, self.at + first - self.start) if first < last else None

    @property
    def here(self) -> slice:
        """Its place in the tensor."""
        return slice(self.at, self.at + self.stop - self.start)


Runs = tuple[Run, ...]


# for each sequence of a batch: where its documents begin (0 first), and its length
Documents = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=64)
def runs_by_rank(seq_len: int, ranks: int, documents: Documents | None = None) -> tuple[Runs, ...]:
    """The tokens of a sequence that each context rank holds, in the order in which it holds them.

    With `documents` attention's work differs between pieces. If early and late pieces then make ranks unequal
    by more than `EVEN`, up to four times as many pieces are dealt by work, alike in all sequences of the
    batch.
    """
    if ranks == 1:
        return ((Run(0, seq_len, 0),),)
    chosen, count = [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)], 2 * ranks
    if documents is not None:
        seen = keys_seen(seq_len, documents)
        least = unevenness(chosen, seen.reshape(count, -1).sum(1))
        for finer in (1, 2, 4):
            if least <= EVEN or seq_len % (2 * ranks * finer):
                break
            work = seen.reshape(2 * ranks * finer, -1).sum(1)
            found = dealt(work, ranks)
            if (uneven := unevenness(found, work)) < least:
                chosen, count, least = found, len(work), uneven
    size = seq_len // count
    return tuple(
        tuple(Run(piece * size, (piece + 1) * size, i * size) for i, piece in enumerate(own))
        for own in chosen
    )


def keys_seen(seq_len: int, documents: Documents) -> np.ndarray:
    """How many keys the tokens at each position see, in all sequences together: int64 ``[seq_len]``."""
    total = np.zeros(seq_len, dtype=np.int64)
    for bounds in documents:
        total += np.arange(1, seq_len + 1) - np.repeat(bounds[:-1], np.diff(bounds))
    return total


def dealt(work: np.ndarray, ranks: int) -> list[list[int]]:
    """The pieces of each rank, as many for all: the one with most work first, each to the rank
    that has least and still has room.
    """
    room, own, load = len(work) // ranks, [list[int]() for _ in range(ranks)], [0] * ranks
    for piece in np.argsort(-work, kind="stable").tolist():
        rank = min((rank for rank in range(ranks) if len(own[rank]) < room), key=load.__getitem__)
        own[rank].append(piece)
        load[rank] += int(work[piece])
    return [sorted(pieces) for pieces in own]


def unevenness(pieces: list[list[int]], work: np.ndarray) -> float:
    """The most work of a rank over the mean: 1 if all have as much."""
    loads = [int(work[own].sum()) for own in pieces]
    return max(loads) * len(loads) / sum(loads)


def runs_of(seq_len: int, ranks: int, rank: int, documents: Documents | None = None) -> Runs:
    """The tokens of a sequence that a context rank holds, in the order in which it holds them."""
    return runs_by_rank(seq_len, ranks, documents)[rank]


def positions_of(runs: Runs) -> np.ndarray:
    """The positions in the sequence of the tokens of some runs, int64 ``[tokens]``."""
    return np.concatenate([np.arange(run.start, run.stop) for run in runs])


@dataclass(frozen=True)
class AttentionPart:
    """A part of attention: the queries at `queries` attend to the keys at `keys`.

    Either to all of them, or, if they are the same tokens, `causal`: each to its own key and those before it.
    `row` is the sequence of the batch; None stands for all.
    """

    row: int | None
    queries: slice
    keys: slice
    causal: bool


def parts(queries: Runs, keys: Runs, documents: Documents | None = None) -> list[AttentionPart]:
    """The parts of causal attention between some queries and some keys.

    Each pair of a query and a key that it sees is in one part.

    With `documents` a query sees the keys of its own document only, so a batch's sequences have different
    parts.
    """
    if documents is None:
        return list(joined(_causal(None, queries, keys)))
    found: list[AttentionPart] = []
    for row, bounds in enumerate(documents):
        for start, stop in documents_of(queries, bounds):
            own, seen = (
                [part for run in runs if (part := run.within(start, stop))] for runs in (queries, keys)
            )
            found += joined(_causal(row, own, seen))
    return found


def documents_of(runs: Runs, bounds: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The documents that have a token in some runs: without a look at all others, of
    which long samples have thousands.
    """
    last = -1
    for run in sorted(runs, key=lambda run: run.start):
        i = max(bisect_left(bounds, run.start + 1) - 1, last + 1)
        while i < len(bounds) - 1 and bounds[i] < run.stop:
            yield bounds[i], bounds[i + 1]
            last, i = i, i + 1


def _causal(row: int | None, queries: Iterable[Run], keys: Sequence[Run]) -> Iterator[AttentionPart]:
    for query in queries:
        for key in keys:
            before, same = key.within(0, query.start), key.within(query.start, query.stop)
            if before is not None:
                yield AttentionPart(row, query.here, before.here, False)
            if same is not None:
                assert (same.start, same.stop) == (query.start, query.stop), (
                    "keys are cut where queries are, or not at all"
                )
                yield AttentionPart(row, query.here, same.here, True)


def joined(found: Iterable[AttentionPart]) -> list[AttentionPart]:
    """The same parts, with neighbours of equal queries or of equal keys in one: fewer and larger products."""
    out: list[AttentionPart] = []
    for part in found:
        last = out[-1] if out else None
        if last is not None and not last.causal and not part.causal and last.row == part.row:
            if last.queries == part.queries and last.keys.stop == part.keys.start:
                out[-1] = AttentionPart(part.row, part.queries, slice(last.keys.start, part.keys.stop), False)
                continue
            if last.keys == part.keys and last.queries.stop == part.queries.start:
                out[-1] = AttentionPart(
                    part.row, slice(last.queries.start, part.queries.stop), part.keys, False
                )
                continue
        out.append(part)
    return out
