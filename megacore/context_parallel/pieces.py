"""Which tokens of a sequence a context rank holds, and which parts of attention lie between its tokens and others.

A sequence of s tokens is cut into 2·c pieces for c ranks. Rank r holds piece r and piece 2c-1-r: an early one, whose tokens see few
others, and a late one, whose tokens see many. So all ranks have equal work under a causal mask.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np


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


def runs_of(seq_len: int, ranks: int, rank: int) -> Runs:
    """The tokens of a sequence that a context rank holds, in the order in which it holds them."""
    if ranks == 1:
        return (Run(0, seq_len, 0),)
    size = seq_len // (2 * ranks)
    return tuple(Run(piece * size, (piece + 1) * size, i * size) for i, piece in enumerate((rank, 2 * ranks - 1 - rank)))


def positions_of(runs: Runs) -> np.ndarray:
    """The positions in the sequence of the tokens of some runs, int64 ``[tokens]``."""
    return np.concatenate([np.arange(run.start, run.stop) for run in runs])


@dataclass(frozen=True)
class Part:
    """A part of attention: the queries at `queries` attend to the keys at `keys`.

    Either to all of them, or, if they are the same tokens, `causal`: each to its own key and those before it. `row` is the sequence
    of the batch; None stands for all.
    """

    row: int | None
    queries: slice
    keys: slice
    causal: bool


Documents = tuple[tuple[int, ...], ...]  # for each sequence of a batch: where its documents begin (0 first), and its length


def parts(queries: Runs, keys: Runs, documents: Documents | None = None) -> list[Part]:
    """The parts of causal attention between some queries and some keys. Each pair of a query and a key that it sees is in one part.

    With `documents` a query sees the keys of its own document only, so a batch's sequences have different parts.
    """
    if documents is None:
        return list(joined(_causal(None, queries, keys)))
    found: list[Part] = []
    for row, bounds in enumerate(documents):
        for start, stop in _documents_of(queries, bounds):
            own, seen = ([part for run in runs if (part := run.within(start, stop))] for runs in (queries, keys))
            found += joined(_causal(row, own, seen))
    return found


def _documents_of(runs: Runs, bounds: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The documents that have a token in some runs: without a look at all others, of which long samples have thousands."""
    last = -1
    for run in sorted(runs, key=lambda run: run.start):
        i = max(bisect_left(bounds, run.start + 1) - 1, last + 1)
        while i < len(bounds) - 1 and bounds[i] < run.stop:
            yield bounds[i], bounds[i + 1]
            last, i = i, i + 1


def _causal(row: int | None, queries: Iterable[Run], keys: Sequence[Run]) -> Iterator[Part]:
    for query in queries:
        for key in keys:
            before, same = key.within(0, query.start), key.within(query.start, query.stop)
            if before is not None:
                yield Part(row, query.here, before.here, False)
            if same is not None:
                assert (same.start, same.stop) == (query.start, query.stop), "keys are cut where queries are, or not at all"
                yield Part(row, query.here, same.here, True)


def joined(found: Iterable[Part]) -> list[Part]:
    """The same parts, with neighbours of equal queries or of equal keys in one: fewer and larger products."""
    out: list[Part] = []
    for part in found:
        last = out[-1] if out else None
        if last is not None and not last.causal and not part.causal and last.row == part.row:
            if last.queries == part.queries and last.keys.stop == part.keys.start:
                out[-1] = Part(part.row, part.queries, slice(last.keys.start, part.keys.stop), False)
                continue
            if last.keys == part.keys and last.queries.stop == part.queries.start:
                out[-1] = Part(part.row, slice(last.queries.start, part.queries.stop), part.keys, False)
                continue
        out.append(part)
    return out


def pairs(found: Iterable[Part], batch_size: int = 1) -> int:
    """How many pairs of a query and a key some parts have: the work of attention, up to a factor."""
    total = 0
    for part in found:
        q, k = part.queries.stop - part.queries.start, part.keys.stop - part.keys.start
        total += (q * (q + 1) // 2 if part.causal else q * k) * (batch_size if part.row is None else 1)
    return total
