"""Steps with a bad gradient: all ranks skip them alike, say which samples they had, and go around
them where there are too many.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megacore import checkpoint
from megacore.train.recovery import TooManySkips
from tests import training
from tests.checkpoints import find_latest
from tests.rollback import poisoned_rank

OVERRIDES = ["train.steps=8", "checkpoint.every=2"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bad")
    return training.write_config(folder, training.write_corpus(folder))


def skipped(folder: Path) -> list[tuple[int, int, int]]:
    lines = [json.loads(line) for line in (folder / "skipped.jsonl").read_text().splitlines()]
    return [(line["step"], line["first_sample"], line["last_sample"]) for line in lines]


def digests(folder: Path) -> dict[str, str]:
    """The digest of every tensor of a run's newest checkpoint, by name."""
    path = find_latest(folder)
    assert path is not None
    return {name: tensor.digest for name, tensor in checkpoint.Reader(path).manifest.tensors.items()}


def updates(folder: Path) -> float:
    return engine_state(folder)["updates"]


def norms(folder: Path) -> list[float]:
    """The gradient norms by which the newest checkpoint goes on to judge spikes."""
    return engine_state(folder)["norms"]


def engine_state(folder: Path) -> dict[str, Any]:
    """What the newest checkpoint holds for the engine's `load_state`."""
    path = find_latest(folder)
    assert path is not None
    return checkpoint.Reader(path).state["engine"]


@pytest.mark.parametrize("engine", [[], ["engine.kind=fsdp"]])
def test_a_gradient_that_is_bad_on_one_rank_is_skipped_by_all(
    pool: Any, config: str, tmp_path: Path, engine: list[str]
) -> None:
    """After the reduction, data ranks could take different decisions, and from
    there on have different weights. Two rules and an average count the steps, each by itself: a count that
    grew in a skipped step would be another in the run that resumes after it, on every rank.
    """
    overrides = [*OVERRIDES, "optim.kind=soap", "optim.ema=0.9", "checkpoint.keep=9", *engine]
    pool.run(2, poisoned_rank, config, overrides, str(tmp_path / "run"), [3, 5], float("nan"))
    assert skipped(tmp_path / "run") == [(3, 16, 23), (5, 32, 39)]
    assert [m["skipped"] for m in training.metrics(tmp_path / "run")] == [0, 0, 1, 1, 2, 2, 2, 2]
    assert updates(tmp_path / "run") == 6
    resume = f"checkpoint.resume={tmp_path}/run/checkpoints/step_00000004"
    pool.run(2, poisoned_rank, config, [*overrides, resume], str(tmp_path / "resumed"), [5], float("nan"))
    assert training.figures(tmp_path / "resumed")[1:] == training.figures(tmp_path / "run")[5:]
    assert digests(tmp_path / "resumed") == digests(tmp_path / "run")


def test_a_spike_is_skipped_and_its_threshold_decides(pool: Any, config: str, tmp_path: Path) -> None:
    """By the norms of the steps before it, also of those before a resume: eight alone would judge nothing."""
    longer = ["train.steps=24", "checkpoint.every=12", "optim.spike_threshold=30"]
    pool.run(2, poisoned_rank, config, longer, str(tmp_path / "run"), [20], 1e4)
    assert skipped(tmp_path / "run") == [(20, 152, 159)]
    resume = f"checkpoint.resume={tmp_path}/run/checkpoints/step_00000012"
    pool.run(2, poisoned_rank, config, [*longer, resume], str(tmp_path / "resumed"), [20], 1e4)
    assert skipped(tmp_path / "resumed") == skipped(tmp_path / "run")
    assert norms(tmp_path / "resumed") == norms(tmp_path / "run")
    pool.run(
        2, poisoned_rank, config, [*longer, "optim.spike_threshold=1e9"], str(tmp_path / "all"), [20], 1e4
    )
    assert not (tmp_path / "all/skipped.jsonl").exists()


def test_too_many_in_a_row_are_gone_around(pool: Any, config: str, tmp_path: Path) -> None:
    """Batches 5, 6 and 7 are bad: back to the checkpoint of step 4, and on with
    batch 8, also after a restart.
    """
    limits = ["checkpoint.every=4", "optim.max_skips=3", "optim.max_rollbacks=1"]
    read = pool.run(
        2, poisoned_rank, config, [*OVERRIDES, *limits], str(tmp_path / "run"), [5, 6, 7], float("nan")
    )
    assert read[0] == read[1] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert [m["step"] for m in training.metrics(tmp_path / "run")] == list(range(1, 9))
    assert updates(tmp_path / "run") == 8, "every step was taken in the end"
    again = pool.run(
        2, poisoned_rank, config, [*OVERRIDES, *limits, "train.steps=9"], str(tmp_path / "run"), [], 1.0
    )
    assert again[0] == [12]
    # the run's one rollback is used up
    with pytest.raises(Exception, match=f"{TooManySkips.__name__}: 3 steps in a row"):
        pool.run(
            2,
            poisoned_rank,
            config,
            [*OVERRIDES, *limits, "train.steps=14"],
            str(tmp_path / "run"),
            [13, 14, 15],
            float("nan"),
        )
    with pytest.raises(Exception, match=f"{TooManySkips.__name__}: 3 steps in a row"):
        pool.run(
            2,
            poisoned_rank,
            config,
            [*OVERRIDES, "optim.max_skips=3"],
            str(tmp_path / "fails"),
            [5, 6, 7],
            float("nan"),
        )


def test_a_run_goes_back_to_the_checkpoint_that_it_was_started_from(
    pool: Any, config: str, tmp_path: Path
) -> None:
    """Before its own first save a run that resumes another's checkpoint would find none, or take an
    older one that is in its folder.
    """
    pool.run(1, poisoned_rank, config, [*OVERRIDES, "train.steps=4"], str(tmp_path / "first"), [], 1.0)
    saved = tmp_path / "first/checkpoints"
    shutil.copytree(saved / "step_00000002", tmp_path / "run/checkpoints/step_00000002")
    limits = [
        "checkpoint.every=8",
        "optim.max_skips=3",
        "optim.max_rollbacks=1",
        f"checkpoint.resume={saved / 'step_00000004'}",
    ]
    read = pool.run(
        2, poisoned_rank, config, [*OVERRIDES, *limits], str(tmp_path / "run"), [5, 6, 7], float("nan")
    )
    assert read[0] == [5, 6, 7, 8, 9, 10, 11]
    assert updates(tmp_path / "run") == 8, "every step was taken in the end"


def test_skips_are_on_record_behind_a_rollback_and_a_restart(pool: Any, config: str, tmp_path: Path) -> None:
    """Back at step 4 the count of skips begins lower, and samples are ahead of steps: bad batches still are
    named, also the first one, by their own samples. A run that is started again has skipped nothing new.
    """
    limits = ["checkpoint.every=4", "optim.max_skips=3", "optim.max_rollbacks=1"]
    read = pool.run(
        2, poisoned_rank, config, [*OVERRIDES, *limits], str(tmp_path / "run"), [5, 6, 7, 8, 10], float("nan")
    )
    assert read[0] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    expected = [(5, 32, 39), (6, 40, 47), (7, 48, 55), (5, 56, 63), (7, 72, 79)]
    assert skipped(tmp_path / "run") == expected
    pool.run(
        2, poisoned_rank, config, [*OVERRIDES, *limits, "train.steps=10"], str(tmp_path / "run"), [], 1.0
    )
    assert skipped(tmp_path / "run") == expected
    assert [m["skipped"] for m in training.metrics(tmp_path / "run")] == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2]
