"""The order of samples: a bijection, and one that looks like any other."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from megacore.data.shuffle import derive_key, permute

SIZES = [
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    15,
    16,
    17,
    31,
    32,
    33,
    97,
    100,
    255,
    256,
    257,
    1009,
    4095,
    4096,
    4097,
    65537,
]


@pytest.mark.parametrize("n", SIZES)
def test_bijection(n: int) -> None:
    """Otherwise an epoch shows some samples twice and others never."""
    for key in (0, 1, derive_key(5, 0, 0), 2**64 - 1):
        assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


def test_each_index_on_its_own() -> None:
    """A rank that asks for a few indices, in any order and shape, gets what one that asks for all gets."""
    n, key = 1000, derive_key(1)
    whole = permute(np.arange(n), n, key)
    some = np.array([[999, 0], [17, 17]])
    assert np.array_equal(permute(some, n, key), whole[some])


def test_large_sizes() -> None:
    """Corpora of any size: no overflow, everything in range and distinct."""
    n = 2**62 - 5
    index = np.concatenate([np.arange(1000), n - 1 - np.arange(1000)])
    out = permute(index, n, derive_key(3))
    assert out.min() >= 0 and out.max() < n and len(set(out.tolist())) == len(index)


def test_stable() -> None:
    """The order of a run must outlive releases, or a resumed run repeats samples."""
    assert permute(np.arange(10), 10, derive_key(42, 0, 0)).tolist() == [5, 4, 9, 6, 2, 7, 0, 3, 8, 1]


def excess(counts: np.ndarray, expected: float) -> float:
    """Pearson's chi-square of `counts` against a uniform expectation, in its
    standard deviations above the mean.
    """
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def neighbour_distances(orders: np.ndarray) -> float:
    """Whether what follows a sample is any other, equally often: `excess` of the
    distances in ``[keys, n]`` orders.
    """
    n = orders.shape[1]
    counts = np.bincount((np.diff(orders, axis=1) % n).ravel(), minlength=n)[1:]
    return excess(counts, counts.sum() / (n - 1))


def places(orders: np.ndarray) -> float:
    """Whether every sample comes at every place equally often."""
    keys, n = orders.shape
    return excess(np.bincount((orders + n * np.arange(n)).ravel(), minlength=n * n), keys / n)


@pytest.mark.parametrize("n", [17, 200, 1000])
def test_looks_uniform(n: int) -> None:
    """Batches must be as mixed as from a true shuffle; neighbours in the text must not stay neighbours."""
    orders = np.stack([permute(np.arange(n), n, derive_key(9, k)) for k in range(500)])
    assert neighbour_distances(orders) < 5
    assert places(orders) < 5


def test_uniformity_check_catches_bad_orders() -> None:
    """The tests above fail for a random affine map, a bijection too, and for an
    identity that ignores its key.
    """
    n, rng = 1009, np.random.default_rng(0)
    affine = np.stack([(np.arange(n) * rng.integers(1, n) + rng.integers(n)) % n for _ in range(500)])
    assert places(affine) < 5 < neighbour_distances(affine)
    assert places(np.tile(np.arange(n), (500, 1))) > 5


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_order_of_few(n: int) -> None:
    """On tiny corpora each of the n! orders comes up equally often over the epochs."""
    every = list(permutations(range(n)))
    seen = Counter(
        tuple(permute(np.arange(n), n, derive_key(7, epoch)).tolist()) for epoch in range(100 * len(every))
    )
    assert excess(np.array([seen[order] for order in every]), 100) < 5


def test_keys_differ() -> None:
    """Seeds, corpora and epochs each have an order of their own, also where their numbers are swapped."""
    keys = {
        derive_key(seed, corpus, epoch) for seed in range(10) for corpus in range(10) for epoch in range(10)
    }
    assert len(keys) == 1000
    assert derive_key(1) != derive_key(1, 0) != derive_key(0, 1)
    assert len({derive_key(seed) for seed in (0, *(1 << bit for bit in range(64)))}) == 65, (
        "of a number every bit counts"
    )
    orders = {tuple(permute(np.arange(50), 50, key).tolist()) for key in keys}
    assert len(orders) == 1000
