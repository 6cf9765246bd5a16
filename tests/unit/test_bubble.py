"""A pipeline that waits for much of its step is named: in a plan, and before a run starts."""

from pathlib import Path
from typing import Any

import pytest

from launch import pretrain
from megacore.distributed.rank_info import RankInfo
from megacore.tools.choices.bubble import bubble, bubble_warning
from megacore.tools.choices.partition import step_times
from megacore.tools.stop_request import StopRequest
from tests.build import run_of
from tests.commands import run_script
from tests.training import write_config, write_corpus

MODEL = {"num_layers": 16, "hidden_size": 64, "num_heads": 4, "vocab_size": 64}


@pytest.mark.parametrize(
    ("ranks", "microbatches", "schedule", "says"),
    [
        (1, 1, "1f1b", None),
        (2, 1, "1f1b", "1 microbatch for 2 ranks (a larger train.global_batch_size"),  # half of the step
        (2, 2, "1f1b", None),  # a third
        (4, 4, "1f1b", "4 microbatches for 4 ranks (a larger"),  # 3 / 7
        (4, 4, "interleaved", None),  # 3 / 11
        (4, 5, "1f1b", None),  # 3 / 8
    ],
)
def test_a_large_bubble_is_named(ranks: int, microbatches: int, schedule: str, says: str | None) -> None:
    """Devices that are paid for and wait; the bubble of equal stages is known: (p
    - 1) / (chunks · m + p - 1).
    """
    parallel = {"pipeline": ranks, "schedule": schedule}
    train = {"seq_len": 16, "micro_batch_size": 1, "global_batch_size": microbatches}
    config = run_of({"model": MODEL, "train": train, "parallel": parallel}, world=ranks)
    known = (ranks - 1) / (config.chunks * microbatches + ranks - 1)
    assert bubble(*step_times(config)) == pytest.approx(known, abs=0.02)
    said = bubble_warning(config)
    assert (said is None) == (says is None) == (known < 0.4)
    assert says is None or (said is not None and says in said and said.startswith("WARNING: "))


def test_a_run_says_it_before_ranks_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, by rank 0."""
    path = write_config(
        tmp_path, write_corpus(tmp_path), train={"global_batch_size": 2}, log={"dir": str(tmp_path / "run")}
    )
    config = run_of(path, "parallel.pipeline=2", world=2)

    def meet(*_: Any) -> None:
        raise ConnectionError

    monkeypatch.setattr("megacore.distributed.init.joined", meet)
    for rank, times in ((0, 1), (1, 0)):
        with pytest.raises(ConnectionError):
            pretrain.train(config, RankInfo(rank, 2, rank, 2), StopRequest(None))
        assert capsys.readouterr().out.count("WARNING: the pipeline's ranks wait for") == times


def test_a_plan_says_it_and_a_comparison_shows_how_far_it_is() -> None:
    """Minutes without a word, for a large model."""
    command = ["--config", "configs/gpt_tiny.json", "parallel.pipeline=4", "train.global_batch_size=8"]
    assert "\nWARNING: the pipeline's ranks wait for" in run_script("launch/plan.py", *command).stdout
    done = run_script("launch/plan.py", *command, "--compare-schedules", FORCE_COLOR="1")
    assert done.returncode == 0 and "simulating" in done.stderr and "100%" in done.stderr
    assert "simulating" not in run_script("launch/plan.py", *command, "--compare-schedules").stderr
