"""Every engine, with everything that the table in docs/engine_features.md says it takes, trains as
the native engine on one process.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import training
from tests.engines import (
    ENGINES,
    FEATURES,
    FLOATING,
    PRECISIONS,
    WORLD,
    covered,
    missing,
    refusal,
    whole_leg,
)
from tests.training import Figures, difference, figures

STEPS, HALF = 4, 2
PRECISE = 3  # steps of a precision


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a small model, clipped in every step; without decay_steps a run that is cut
    short would have another schedule.
    """
    folder = tmp_path_factory.mktemp("corpus")
    model = {**training.BASE["model"], "num_layers": 3}
    train = {**training.BASE["train"], "steps": STEPS, "micro_batch_size": 1}
    optim = {**training.BASE["optim"], "decay_steps": 20, "warmup_steps": 1}
    return training.write_config(folder, training.write_corpus(folder), model=model, train=train, optim=optim)


@pytest.fixture(scope="module")
def native(
    pool: Any, config_path: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Figures]]:
    """`native(*overrides)`: the figures of the native engine on one process, trained once."""
    known: dict[tuple[str, ...], Figures] = {}

    def run(*overrides: str) -> Figures:
        if overrides not in known:
            folder = tmp_path_factory.mktemp("native")
            pool.run(1, training.run_rank, config_path, list(overrides), str(folder))
            known[overrides] = figures(folder)
        return known[overrides]

    yield run


def skip_if_missing(engine: str) -> None:
    if why := missing(engine):
        pytest.skip(why)


@pytest.mark.parametrize("engine", ENGINES)
def test_everything_at_once_then_another_layout(
    pool: Any, config_path: str, native: Any, tmp_path: Path, engine: str
) -> None:
    """Norms, sums over tensor ranks and tied stages, recomputation, and a checkpoint's every tensor
    and count show in the figures.
    """
    skip_if_missing(engine)
    features = whole_leg(config_path, engine)
    overrides = [*ENGINES[engine], *(override for feature in features for override in FEATURES[feature])]
    ranks = 8 if "pp" in features else 4
    pool.run(ranks, training.run_rank, config_path, [*overrides, f"train.steps={HALF}"], str(tmp_path))
    pool.run(WORLD, training.run_rank, config_path, ENGINES[engine], str(tmp_path))
    right = native()
    assert all(norm > training.BASE["optim"]["grad_clip"] for _, norm in right), "clipping must be active"
    assert right[-1][0] < 0.98 * right[0][0], "the model learns nothing, so equal losses would prove nothing"
    assert difference(figures(tmp_path), right) < FLOATING


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "native"])
def test_precisions(pool: Any, config_path: str, native: Any, tmp_path: Path, engine: str) -> None:
    """Masters, sums and moments are in fp32 at least: of a 16-bit run only the order of sums
    differs, rounded now and then.
    """
    skip_if_missing(engine)
    for precision, tolerance in PRECISIONS.items():
        if refusal(config_path, engine, [precision]):
            continue
        given = [f"train.precision={precision}", f"train.steps={PRECISE}", "train.global_batch_size=4"]
        ranks = WORLD if "shard_size" in engine else 2  # whose parts must have copies
        pool.run(ranks, training.run_rank, config_path, [*ENGINES[engine], *given], str(tmp_path / precision))
        assert difference(figures(tmp_path / precision), native(*given)) < tolerance, precision


def test_every_cell_is_refused_or_trained(config_path: str) -> None:
    """A tick that nobody has tried would be a promise."""
    for engine in ENGINES:
        assert {feature for feature in FEATURES if not refusal(config_path, engine, [feature])} == covered(
            config_path, engine
        ), engine
