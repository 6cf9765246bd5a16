"""Documents within samples: where they begin, positions that start anew in each, and targets that do not lie across a boundary.

The documents of a row of n tokens are a tuple: where each begins (0 first), and n. The corpus's index tells; no token is looked at.
"""

import numpy as np

from megacore.data.indexed import IGNORED, IndexedTokens

Bounds = tuple[int, ...]


def document_bounds(corpus: IndexedTokens, start: int, length: int, whole: int) -> Bounds:
    """The documents in `length` tokens from position `start` of a corpus, which begin a row of `whole`.

    A document that began earlier counts from the first of these tokens. Behind them is padding, which is a document too.
    """
    starts = (int(position) - start for position in corpus.document_starts(start + 1, start + length))
    return (0, *starts, *([length] if length < whole else []), whole)


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
