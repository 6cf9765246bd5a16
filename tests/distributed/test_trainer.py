"""launch/pretrain.py itself, from data to checkpoint: what it saves and logs is what plain fp64 code says."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import plain
from tests.build import run_of
from tests.plain import HALF, SKIPPED, STEPS

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one process": (1, []),
    "tp2dp2, sharded": (
        4,
        ["parallel.tensor=2", "parallel.sequence=true", "parallel.data=2", "engine.shard_optimizer=true"],
    ),
}


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return plain.write_config(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def right(pool: Any, config_path: str) -> plain.Run:
    run = pool.run(1, plain.expected, config_path)[0]
    norms = [figures["grad_norm"] for step, figures in run.logged.items() if step != SKIPPED]
    clip = run_of(config_path).optim.grad_clip
    assert min(norms) < clip < max(norms), "some steps must be clipped, and some not"  # type: ignore[type-var]
    assert len({figures["lr"] for figures in run.logged.values()}) == STEPS, (
        "two steps of one rate would hide which of them it is"
    )
    return run


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_trainer_leaves_is_what_plain_code_says(
    run_ranks: Any, config_path: str, right: plain.Run, tmp_path: Path, layout: str
) -> None:
    """Six steps with a stop between, of which the second is skipped: the rate that is used, and not only
    the one that is logged, the count of updates behind a resume, the samples of a validation. `verify`
    runs the step, but not this loop.
    """
    ranks, overrides = LAYOUTS[layout]
    for steps in (HALF, STEPS):
        assert (
            run_ranks(
                ranks, plain.run_leg, config_path, [*overrides, f"train.steps={steps}"], str(tmp_path / "run")
            )
            == [0] * ranks
        )
    run = plain.found(tmp_path / "run")
    assert plain.difference(run, right) == ""
    run.saved[STEPS]["model/norm.weight"] += 1e-6 * torch.eye(1, 32, dtype=torch.float64)[0]
    assert plain.difference(run, right) == f"other weights are saved after step {STEPS}", (
        "the comparison itself must see little"
    )
