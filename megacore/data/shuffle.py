"""The order of samples: a keyed bijection on [0, n), computed for each index separately; and
which of them each data rank reads.

A shuffled index would have to be built, stored and shared. A pseudorandom permutation needs none of this: any
rank computes the position of any index, at any corpus size, and one integer is enough to resume a run.
"""

import numpy as np

from megacore.config.schema import TrainConfig

ROUNDS = 8  # 4 do for wide halves (Luby and Rackoff 1988); on domains of a few bits more than 8 gain nothing
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: spreads consecutive integers over all bits


def permute(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """Where each index goes under the permutation of [0, n) that `key` selects.

    A balanced Feistel network permutes the smallest [0, 4^h) that contains [0, n). An index that lands
    outside [0, n) goes through it again until it lands inside (cycle walking, Black and Rogaway 2002). The
    map stays a bijection, and takes fewer than 4 passes on average.

    Args:
        index: integers in [0, n), any shape.
        n: size of the set, from 1 to 2^62.
        key: from `derive_key`.

    Returns:
        int64 of the same shape.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    round_keys = _mix(np.uint64(key) + _GOLDEN * np.arange(1, ROUNDS + 1, dtype=np.uint64))
    out = _feistel(np.asarray(index).astype(np.uint64).reshape(-1), half, round_keys)
    outside = np.flatnonzero(out >= n)
    while outside.size:
        out[outside] = _feistel(out[outside], half, round_keys)
        outside = outside[out[outside] >= n]
    return out.astype(np.int64).reshape(np.shape(index))


def derive_key(*parts: int) -> int:
    """One 64-bit key from several non-negative integers, such as (seed, corpus, epoch);
    their order matters.
    """
    key = np.zeros(1, dtype=np.uint64)
    for part in parts:
        key = _mix(_mix(key + _GOLDEN) ^ np.uint64(part % 2**64))
    return int(key[0])


def _feistel(x: np.ndarray, half: int, round_keys: np.ndarray) -> np.ndarray:
    """A permutation of [0, 4^half): each round swaps the halves and flips bits of one by
    a keyed function of the other.
    """
    mask = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    left, right = x >> shift, x & mask
    for key in round_keys:
        # Takes the upper bits of a mixed word: `half` is at most 31.
        left, right = right, left ^ (_mix(right + key) >> np.uint64(33) & mask)
    return left << shift | right


def _mix(x: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64 (Steele et al. 2014): every input bit flips
    about half of the output bits.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def dealt(steps: range, data_size: int, train: TrainConfig) -> np.ndarray:
    """The global sample indices that are read in `steps`: int64 ``[steps, data ranks,
    microbatches, micro_batch_size]``.

    A step takes the next samples, as many in each of these steps (`train.batch_at`), cut into microbatches;
    microbatch j of data rank d is the step's ``j · data_size + d``. So which samples share a microbatch does
    not depend on the layout. Steps count from 1.
    """
    first, size = train.samples_through(steps.start - 1), train.batch_at(steps.start)
    assert train.batch_at(steps.stop - 1) == size, f"steps {steps} with batches of several sizes"
    samples = np.arange(first, first + len(steps) * size)
    return samples.reshape(len(steps), -1, data_size, train.micro_batch_size).swapaxes(1, 2)
