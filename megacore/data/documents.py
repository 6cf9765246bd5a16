"""Documents within samples: where they begin, positions that start anew in each, and targets that do not lie across a boundary.

The documents of a row of n tokens are a tuple: where each begins (0 first), and n. The corpus's index tells; no token is looked at.
"""

from collections.abc import Sequence

import numpy as np

from megacore.config.schema import IGNORED
from megacore.data.indexed import IndexedTokens
from megacore.data.packing import Span

Bounds = tuple[int, ...]


def document_bounds(corpus: IndexedTokens, spans: Sequence[Span], row: int) -> Bounds:
    """The documents in the tokens of some spans of a corpus, which begin a row of `row` tokens.

    A document that began earlier counts from the span's first token. Behind the spans is padding, which is a document too.
    """
    begins, at = [], 0
    for start, length in spans:
        begins += [at, *(int(position) - start + at for position in corpus.document_starts(start + 1, start + length))]
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
    """Sets the targets ``[tokens - 1]`` that begin a document to `IGNORED`: nothing before them in the sample says what they are."""
    targets[[bound - 1 for bound in bounds[1:-1]]] = IGNORED
