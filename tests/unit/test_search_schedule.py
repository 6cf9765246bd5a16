"""The search for a schedule: never worse than those that are known, and on small pipelines as good as any."""

import random
from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest

from megacore.pipeline.generators import GENERATORS, generated
from megacore.pipeline.schedule import looped, lower, v_shaped
from megacore.tools.choices import search_schedule as auto
from megacore.tools.choices.search_schedule import Costs, fits, search
from megacore.tools.schedules.validate import validate

SETTINGS = 200


@pytest.mark.parametrize("quarter", range(4))
def test_no_known_schedule_is_faster(quarter: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With random times, transfers and limits.

    `auto` would be a name for something slower, or would hold more than it may.
    """
    monkeypatch.setattr(auto, "MOST_MOVES", 0)  # before single actions are moved
    better = 0
    for seed in range(quarter * SETTINGS // 4, (quarter + 1) * SETTINGS // 4):
        draw = random.Random(seed)
        ranks, microbatches, chunks = draw.choice([1, 2, 3, 4]), draw.randint(1, 8), draw.choice([1, 2])
        stages = ranks * chunks
        times = [tuple(draw.uniform(0.5, 2.0) for _ in range(stages)) for _ in range(3)]
        costs = Costs(*times, transfer=draw.choice([0.0, 0.1, 0.5]))
        limit = draw.choice([ranks + 1, stages, 2 * stages, 999])
        placements = [looped(ranks, chunks), *([v_shaped(ranks)] if chunks == 2 else [])]
        plan = search(placements, microbatches, costs, limit)
        validate(lower(plan), microbatches)
        assert max(costs.held(plan)) <= max(limit, chunks)
        known = [generated(name, ranks, microbatches, chunks) for name in GENERATORS if fits(name, chunks)]
        spans = [
            costs.makespan(lower(other)) for other in known if max(costs.held(other)) <= max(limit, chunks)
        ]
        if spans:
            assert costs.makespan(lower(plan)) <= min(spans) + 1e-9, seed
            better += costs.makespan(lower(plan)) < min(spans) - 1e-9
    assert better > SETTINGS // 4 // 10, "it finds nothing of its own"


def can_end(ranks: int, microbatches: int, limit: int, span: int) -> bool:
    """Whether any plan of one chunk a rank, whose actions all take a unit, needs no more than `span`
    on each rank. Tries all of them.
    """
    whole = 3 * microbatches
    # forwards, inputs' and weights' backwards done, and the first action's time, -1 before it
    Row = tuple[int, int, int, int]

    def options(rank: int, rows: tuple[Row, ...], now: int) -> Iterator[Row]:
        f, b, w, first = rows[rank]
        began, left = now if first < 0 else first, whole - f - b - w
        if began + span >= now + left:
            if f < microbatches and f - w < limit and (rank == 0 or rows[rank - 1][0] > f):
                yield f + 1, b, w, began
            if b < f and (rank == ranks - 1 or rows[rank + 1][1] > b):
                yield f, b + 1, w, began
            if w < b:
                yield f, b, w + 1, began
        if first < 0 or left == 0 or began + span > now + left:
            yield rows[rank]

    @cache
    def from_here(rows: tuple[Row, ...], now: int) -> bool:
        if all(sum(row[:3]) == whole for row in rows):
            return True
        if now > span + ranks:
            return False
        return any(
            from_here(after, now + 1)
            for after in product(*(list(options(rank, rows, now)) for rank in range(ranks)))
        )

    return from_here(((0, 0, 0, -1),) * ranks, 0)


SIZES = [(1, 4), (2, 1), (2, 2), (2, 3), (2, 4), (3, 2), (3, 3), (3, 4), (4, 2), (4, 3), (4, 4)]


LIMITED = [(*size, 2) for size in SIZES if size[0] * size[1] < 12]  # more takes long


@pytest.mark.parametrize(("ranks", "microbatches", "limit"), [*((*size, 8) for size in SIZES), *LIMITED])
def test_no_plan_is_faster_than_the_one_found(ranks: int, microbatches: int, limit: int) -> None:
    """Against every plan there is: one that needs a unit less would have been missed."""
    ones = (1.0,) * ranks
    costs = Costs(ones, ones, ones)
    span = round(costs.makespan(lower(search([looped(ranks)], microbatches, costs, limit))))
    assert can_end(ranks, microbatches, limit, span), "the check itself finds what was found"
    assert not can_end(ranks, microbatches, limit, span - 1)


# Qi et al. 2023, Zero Bubble Pipeline Parallelism, tables 5 and 9: 8 stages, milliseconds; microbatches,
# forward, backward of inputs and of weights, a transfer, and the bubble of ZB-2p. Of what a forward leaves,
# sbh(34 + 5as/h), 32·sbh wait for the weights (section 2); their models have 24 and 32 heads, 2304 and 4096
# features and 1024 tokens.
SMALL, LARGE = 32 / (34 + 5 * 24 * 1024 / 2304), 32 / (34 + 5 * 32 * 1024 / 4096)
ZB_2P = [
    (24, 18.522, 18.086, 9.337, 0.601, SMALL, 0.0433),
    (32, 18.513, 18.086, 9.331, 0.626, SMALL, 0.0039),
    (64, 18.546, 18.097, 9.321, 0.762, SMALL, 0.0026),
    (24, 29.718, 29.444, 19.927, 0.527, LARGE, 0.0029),
    (32, 29.802, 29.428, 19.530, 0.577, LARGE, 0.0022),
    (64, 29.935, 29.621, 19.388, 0.535, LARGE, 0.0010),
]


@pytest.mark.parametrize(
    ("microbatches", "forward", "inputs", "weights", "transfer", "waiting", "published"), ZB_2P
)
def test_twice_the_memory_leaves_no_more_bubble_than_published(
    microbatches: int,
    forward: float,
    inputs: float,
    weights: float,
    transfer: float,
    waiting: float,
    published: float,
) -> None:
    """A search that used no memory beyond 1F1B's would be at ZB-H1's bubble, up to 0.16.

    The rate is that of the longest stage.
    """
    ranks = 8
    costs = Costs((forward,) * ranks, (inputs,) * ranks, (weights,) * ranks, transfer, (), (waiting,) * ranks)
    plan = lower(search([looped(ranks)], microbatches, costs, 2 * ranks))
    validate(plan, microbatches)
    cost, least = costs.makespan(plan), microbatches * (forward + inputs + weights)
    assert max(costs.held(plan)) <= 2 * ranks
    assert (cost - least) / cost < published + 0.002
