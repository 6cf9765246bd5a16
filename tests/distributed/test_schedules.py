"""Every schedule trains as one process does, in pairs with all that goes with it;
`python -m tests.schedules` proves the product.
"""

import contextlib
from collections.abc import Callable
from itertools import combinations, product
from typing import Any
from unittest import mock

import pytest

from megacore.config.parallel import CHUNKS, V_SHAPED
from megacore.engine.param_all_gather import ParameterGatherer, start_gather
from megacore.tools.verify.layouts import parse
from tests import training
from tests.steps import Found, apart, train_rank

TOLERANCE = 1e-10  # fp64: sums of some thousand terms in another order, over two steps
LAYOUTS = ("pp2", "pp4", "tp2pp2", "tp2pp2sp", "pp2dp2")
ENGINES = {"native": [], "sharded": ["engine.shard_optimizer=true"], "fsdp": ["engine.kind=fsdp"]}


def rows() -> list[dict[str, Any]]:
    """Each schedule in each layout, with the other settings dealt so that each value of
    one meets each value of another.
    """
    found = []
    for i, schedule in enumerate(CHUNKS):
        for j, layout in enumerate(LAYOUTS):
            row: dict[str, Any] = {
                "schedule": schedule,
                "layout": layout,
                "tied": (i + j) % 2 == 0,
                "few": (i + j // 2) % 2 == 0,
            }
            row |= {"recompute": ("none", "full")[(i // 2 + j) % 2], "layers": (5, 8)[(i + j // 3) % 2]}
            if row["layers"] < parse(layout).size("pipeline") * CHUNKS[schedule]:
                row["layers"] = 8
            found += [row | {"engine": engine} for engine in (ENGINES if layout == "pp2dp2" else ["native"])]
    for i, row in enumerate(found):  # fsdp cannot divide an embedding that both ends of a V on one rank share
        if row["schedule"] in V_SHAPED and row["engine"] == "fsdp":
            found[i] = row | {"tied": False}
    return found


def overrides_of(row: dict[str, Any]) -> list[str]:
    """Of the model and the batch, then of the layout.

    A batch of few microbatches has one, fewer than stages.
    """
    layout = parse(f"{row['layout']}@{row['schedule']}")
    batch = 2 * layout.size("data") if row["few"] else 12
    tied = str(row["tied"]).lower()
    model = [
        f"model.tie_embeddings={tied}",
        f"model.num_layers={row['layers']}",
        f"train.global_batch_size={batch}",
    ]
    return [*model, f"train.recompute={row['recompute']}", *layout.overrides(), *ENGINES[row["engine"]]]


def run_row(
    config_path: str,
    overrides: list[str],
    fault: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
) -> Found:
    with contextlib.nullcontext() if fault is None else fault():
        return train_rank(config_path, overrides)


def second_chunk_not_gathered() -> contextlib.AbstractContextManager[Any]:
    """Of a rank's chunks only the first one's parameters are gathered."""

    def start(self: ParameterGatherer) -> None:
        for i, (buffer, bucket) in enumerate(self.buckets):
            if buffer.chunk == 0:
                self.work[i] = start_gather(buffer.values[bucket.start : bucket.stop], buffer.sum.levels)

    return mock.patch.object(ParameterGatherer, "start", start)


def test_pairs_are_all_there() -> None:
    """A pair that no row has is a pair that no test runs."""
    dealt = rows()
    for a, b in combinations(("schedule", "layout", "tied", "few", "recompute"), 2):
        pairs = {(row[a], row[b]) for row in dealt}
        assert len(pairs) == len({row[a] for row in dealt}) * len({row[b] for row in dealt}), (a, b)
    for other, values in (
        ("schedule", CHUNKS),
        ("tied", (True, False)),
        ("few", (True, False)),
        ("recompute", ("none", "full")),
    ):
        assert {(row["engine"], row[other]) for row in dealt} == set(product(ENGINES, values)), other


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("schedules")
    return training.write_config(folder, "unused", train={"precision": "fp64"}, engine={"bucket_mib": 0.01})


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, ...], Found]:
    """Runs of one process, by what is of the model and the batch."""
    return {}


@pytest.mark.parametrize("row", rows(), ids=lambda row: "-".join(map(str, row.values())))
def test_a_schedule_trains_as_one_process(
    pool: Any, config_path: str, known: dict[tuple[str, ...], Found], row: dict[str, Any]
) -> None:
    """A weight's gradient lost, doubled or late, a chunk in another's place, a
    bucket that is summed too early.
    """
    overrides = overrides_of(row)
    alone = tuple(overrides[:3])
    if alone not in known:
        (known[alone],) = pool.run(1, train_rank, config_path, list(alone))
    assert (
        apart(pool.run(parse(row["layout"]).world, run_row, config_path, overrides), known[alone]) < TOLERANCE
    )


def test_a_mistake_of_one_pair_is_noticed(pool: Any, config_path: str) -> None:
    """The planted fault: only an interleaved schedule has it, and only with a sharded optimizer."""
    (row,) = (row for row in rows() if row["schedule"] == "interleaved" and row["engine"] == "sharded")
    overrides = overrides_of(row)
    (alone,) = pool.run(1, train_rank, config_path, overrides[:3])
    assert (
        apart(pool.run(4, run_row, config_path, overrides, second_chunk_not_gathered), alone)
        > 1e6 * TOLERANCE
    )
