"""`train.batch_ramp`: global batches that grow.

Which samples each step has, what is proved, logged and resumed.
"""

from pathlib import Path
from unittest import mock

import pytest

from megacore.config.schema import TrainConfig
from megacore.data.samples import SampleStream
from megacore.errors import CheckpointError
from megacore.tools.inputs import Inputs
from megacore.tools.verify.coverage import Epoch, EpochCoverage, Leg
from tests import training
from tests.build import run_of
from tests.pool import Pool

RAMP = ((2, 4), (5, 8), (6, 12))
GROWING = "train.batch_ramp=[[2,4],[5,8]]"


def test_steps_and_samples_belong_together() -> None:
    """Against a list, written out: a step that begins where another ends by one sample would repeat or
    leave out the rest of the run.
    """
    train, sizes = TrainConfig(global_batch_size=16, batch_ramp=RAMP), [4, 4, 8, 8, 8, 12, 16, 16, 16]
    assert [train.batch_at(number) for number in range(1, 10)] == sizes
    assert [train.samples_through(number) for number in range(10)] == [
        sum(sizes[:number]) for number in range(10)
    ]
    for samples in range(sum(sizes)):
        assert train.batches_in(samples) == max(n for n in range(10) if sum(sizes[:n]) <= samples)
    plain = TrainConfig(global_batch_size=8)
    assert (plain.batch_at(7), plain.samples_through(7), plain.batches_in(57)) == (8, 56, 7)


def coverage(folder: Path) -> EpochCoverage:
    """An epoch, read by four data ranks, and from the middle of the ramp on by two."""
    stream = SampleStream(training.write_corpus(folder), 16, 0, training.VOCAB_SIZE)
    train = TrainConfig(seq_len=16, micro_batch_size=1, global_batch_size=16, batch_ramp=RAMP)
    return Epoch(stream, 0, 0, [Leg(4, 1, 3), Leg(2, 4)], train).check()


def test_an_epoch_is_read_once(tmp_path: Path) -> None:
    found = coverage(tmp_path)
    assert (found.missing, found.repeated) == (0, 0) and found.reads == found.samples
    with mock.patch.object(
        TrainConfig, "samples_through", lambda self, number: sum(self.batch_at(n) for n in range(1, number))
    ):
        assert coverage(tmp_path).repeated, (
            "the planted fault: each step begins with the samples of the step before"
        )
    with mock.patch.object(
        TrainConfig, "samples_through", lambda self, number: number * self.global_batch_size
    ):
        assert coverage(tmp_path).missing, (
            "the planted fault: a step begins where it would among full batches"
        )


@pytest.fixture(scope="module")
def whole(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps, and its config."""
    folder = tmp_path_factory.mktemp("ramp")
    checkpoints = {"every": 1, "keep": 9}
    train = {"steps": 8, "global_batch_size": 16, "precision": "fp64"}
    training.write_config(
        folder, training.write_corpus(folder), train=train, checkpoint=checkpoints, optim={"decay_steps": 8}
    )
    assert pool.run(1, training.run_rank, str(folder / "config.json"), [GROWING], str(folder / "whole")) == [
        0
    ]
    return folder


def test_what_is_logged_counts_the_samples_of_each_step(whole: Path) -> None:
    sizes = [4, 4, 8, 8, 8, 16, 16, 16]
    lines = training.metrics(whole / "whole")
    assert [line["tokens"] for line in lines] == [16 * sum(sizes[:step]) for step in range(1, 9)]
    for line, size in zip(lines, sizes, strict=True):
        assert line["tokens_per_second"] * line["step_seconds"] == pytest.approx(16 * size)


@pytest.mark.parametrize("step", [1, 2, 4, 7])
def test_a_run_goes_on_in_the_middle(whole: Path, pool: Pool, tmp_path: Path, step: int) -> None:
    """On two data ranks: a rank that counts steps as batches of one size would read other samples."""
    resume = f"checkpoint.resume={whole}/whole/checkpoints/step_{step:08d}"
    overrides = [GROWING, resume, "parallel.data=2"]
    assert pool.run(2, training.run_rank, str(whole / "config.json"), overrides, str(tmp_path / "run")) == [
        0,
        0,
    ]
    right, found = training.metrics(whole / "whole")[step:], training.metrics(tmp_path / "run")
    assert [line["step"] for line in found] == list(range(step + 1, 9))
    for before, after in zip(right, found, strict=True):
        assert (
            after["loss"] == pytest.approx(before["loss"], rel=1e-12) and after["tokens"] == before["tokens"]
        )


def test_only_what_is_to_come_may_change(whole: Path) -> None:
    """A batch may grow in a run that did not plan it; but samples that were read stay read."""

    def refused(step: int, *overrides: str) -> str:
        resume = f"checkpoint.resume={whole}/whole/checkpoints/step_{step:08d}"
        try:
            Inputs(run_of(whole / "config.json", *overrides, resume, f"log.dir={whole}/another"), 0)
        except CheckpointError as error:
            return str(error)
        return ""

    for step, ramp in ((4, "[[2,4],[5,8]]"), (4, "[[2,4],[4,8],[6,12]]"), (1, "[[1,4],[3,6]]")):
        assert not refused(step, f"train.batch_ramp={ramp}")
    assert not refused(5, "train.batch_ramp=[[2,4],[5,8]]", "train.global_batch_size=32")
    assert (
        "was saved with train.batch_ramp [[2, 4], [5, 8]], not []: samples would repeat or be skipped"
        in refused(4)
    )
    assert "train.batch_ramp" in refused(4, "train.batch_ramp=[[3,4],[5,8]]")
    assert "train.global_batch_size 16, not 32" in refused(6, GROWING, "train.global_batch_size=32")


def test_the_plan_and_the_samples_say_every_size(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from launch import plan, samples

    config = ["--config", str(whole / "config.json"), GROWING]
    plan.run([*config, "--world", "2"])
    said = capsys.readouterr().out
    assert "to step 2, global_batch_size 4 = micro_batch_size 2 × microbatches 1 × data 2" in said
    assert "then global_batch_size 16 = micro_batch_size 2 × microbatches 4 × data 2" in said
    assert samples.run([*config, "--prove", "--layouts", "dp2:4,dp1"]) == 0
    assert (
        "global_batch_size 4 to step 2; then global_batch_size 8 to step 5; then global_batch_size 16"
        in capsys.readouterr().out
    )
