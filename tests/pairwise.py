"""Few rows in which every pair of values occurs together, if any row that is
allowed has it (a pairwise cover).
"""

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations

Row = tuple[str, ...]  # a value of each factor
Pair = tuple[int, str, int, str]  # two factors by their numbers, and their values
# rows with a pair: the one of them that has most is taken, and if all are refused, so is the pair
DRAWS = 400


def pairs_of(row: Row) -> Iterator[Pair]:
    """All pairs of a row's values."""
    return ((i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2))


def cover(rows: Iterable[Row], allowed: Callable[[Row], bool], seed: int = 0) -> tuple[list[Row], set[Pair]]:
    """Some of the rows that are allowed, and the pairs that only others have.

    Greedily: of some rows that have the rarest pair still missing, the next is the one that has most missing
    pairs.
    """
    rng, left, with_pair = random.Random(seed), list(rows), dict[Pair, list[Row]]()
    rng.shuffle(left)
    for row in left:
        for pair in pairs_of(row):
            with_pair.setdefault(pair, []).append(row)
    missing = dict.fromkeys(sorted(with_pair, key=lambda pair: len(with_pair[pair])))
    chosen, never, refused = list[Row](), set[Pair](), set[Row]()
    while missing:
        rarest = next(iter(missing))
        some = [row for row in with_pair[rarest] if row not in refused]
        some = sorted(
            rng.sample(some, min(DRAWS, len(some))),
            key=lambda row: -sum(pair in missing for pair in pairs_of(row)),
        )
        found = next((row for row in some if allowed(row)), None)
        refused.update(some if found is None else some[: some.index(found)])
        if found is None:
            never.add(rarest)
            del missing[rarest]
            continue
        chosen.append(found)
        for pair in pairs_of(found):
            missing.pop(pair, None)
    return chosen, never
