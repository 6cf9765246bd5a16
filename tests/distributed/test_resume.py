"""A stopped run goes on as if it had not been: bitwise in its own layout, within rounding in another."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from launch import evaluate
from megacore.errors import CheckpointError
from megacore.tools.inputs import Inputs
from megacore.tools.launchers import place_from_environment
from megacore.train.step import StepResult
from megacore.train.trainer import STOPPED, Trainer
from tests import training
from tests.build import run_of
from tests.manifests import edit_manifest

TP2 = ["parallel.tensor=2", "parallel.sequence=true"]
PP2 = ["parallel.pipeline=2"]
BACKGROUND = ["checkpoint.async=true"]
SHARDED = ["parallel.data=2", "engine.shard_optimizer=true", "engine.bucket_mib=0.01"]
STEPS = 10
# Dropout and a validation in between: neither may disturb the numbers behind a resumed step.
COMMON = ["checkpoint.every=5", "model.dropout=0.1", "train.eval_every=3"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    prefix = training.write_corpus(folder)
    more = {"train": {"steps": STEPS}, "optim": {"decay_steps": STEPS}}
    training.write_config(
        folder,
        prefix,
        **more,
        data={"train": prefix, "valid": training.write_corpus(folder, "valid", 500, seed=1)},
    )
    return folder


def figures(folder: Path) -> dict[int, tuple[float, float]]:
    """(loss, gradient norm) by step."""
    return {m["step"]: (m["loss"], m["grad_norm"]) for m in training.metrics(folder)}


def interrupted_rank(config_path: str, overrides: list[str], log_dir: str, step: int, number: int) -> int:
    """A run in which the last rank alone receives a signal while `step` is under way."""
    log = Trainer.log

    def log_and_interrupt(self: Trainer, result: StepResult[float]) -> None:
        if self.step == step - 1 and self.mesh.place.rank == self.mesh.place.world_size - 1:
            os.kill(os.getpid(), number)  # arrives before the next step's log
        log(self, result)

    Trainer.log = log_and_interrupt  # type: ignore[method-assign]
    try:
        return training.run_rank(config_path, overrides, log_dir)
    finally:
        Trainer.log = log  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("layout", "precision"),
    [(TP2, "fp32"), (PP2, "fp32"), (PP2 + BACKGROUND, "bf16"), (SHARDED + BACKGROUND, "bf16")],
)
def test_stopped_run_goes_on_bitwise(
    pool: Any, corpus: Path, tmp_path: Path, layout: list[str], precision: str
) -> None:
    config = str(corpus / "config.json")
    overrides = [*COMMON, *layout, f"train.precision={precision}"]
    assert pool.run(2, training.run_rank, config, overrides, str(tmp_path / "whole")) == [0, 0]
    stopped = pool.run(2, interrupted_rank, config, overrides, str(tmp_path / "stopped"), 7, signal.SIGTERM)
    assert stopped == [STOPPED, STOPPED], (
        "a signal to one rank must stop all, with the status that asks to be started again"
    )
    assert max(figures(tmp_path / "stopped")) < STEPS
    assert pool.run(2, training.run_rank, config, overrides, str(tmp_path / "stopped")) == [0, 0]
    assert figures(tmp_path / "stopped") == figures(tmp_path / "whole")


@pytest.mark.parametrize(
    ("before", "after"),
    [(TP2, [*PP2, "parallel.data=2"]), (SHARDED, [*TP2, *PP2]), (PP2, [*SHARDED, "parallel.tensor=2"])],
    ids=["tp2 to pp2dp2", "sharded to tp2pp2", "pp2 to sharded tp2dp2"],
)
def test_goes_on_in_another_layout(
    pool: Any, corpus: Path, tmp_path: Path, before: list[str], after: list[str]
) -> None:
    config = str(corpus / "config.json")
    assert pool.run(1, training.run_rank, config, COMMON, str(tmp_path / "whole")) == [0]
    assert (
        pool.run(2, interrupted_rank, config, [*COMMON, *before], str(tmp_path / "moved"), 6, signal.SIGINT)
        == [STOPPED] * 2
    )
    first = max(figures(tmp_path / "moved"))
    assert pool.run(4, training.run_rank, config, [*COMMON, *after], str(tmp_path / "moved")) == [0] * 4
    whole, moved = figures(tmp_path / "whole"), figures(tmp_path / "moved")
    assert first < STEPS and moved.keys() == whole.keys()
    for step, values in whole.items():
        assert moved[step] == pytest.approx(values, rel=1e-5), (
            f"step {step}, of which the first {first} ran as tp2"
        )


def test_a_resume_that_repeats_a_step_is_noticed(pool: Any, corpus: Path, tmp_path: Path) -> None:
    """The planted fault: a checkpoint whose step counter lags by one reads a batch
    twice, and the losses show it.
    """
    config = str(corpus / "config.json")
    assert pool.run(1, training.run_rank, config, COMMON, str(tmp_path / "whole")) == [0]
    assert pool.run(1, training.run_rank, config, [*COMMON, "train.steps=5"], str(tmp_path / "right")) == [0]
    shutil.copytree(tmp_path / "right", tmp_path / "lagging")
    saved = tmp_path / "lagging/checkpoints/step_00000005"

    def lag(manifest: dict[str, Any]) -> None:
        manifest["step"] = 4
        manifest["state"]["engine"]["updates"] = 4.0  # else the counts betray it

    edit_manifest(saved, lag)
    saved.rename(saved.with_name("step_00000004"))
    for run in ("right", "lagging"):
        assert pool.run(1, training.run_rank, config, COMMON, str(tmp_path / run)) == [0]
    assert figures(tmp_path / "right") == figures(tmp_path / "whole")
    assert figures(tmp_path / "lagging")[6] != figures(tmp_path / "whole")[6]


def test_a_run_that_goes_on_says_what_is_new(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A setting that has changed unnoticed, or that has no effect, would be looked for in the losses."""
    for overrides in (["train.steps=1"], ["train.steps=2", "optim.lr=0.001", "model.init_std=0.5"]):
        assert training.run_rank(str(corpus / "config.json"), overrides, str(tmp_path / "run")) == 0
    lines = capfd.readouterr().out.splitlines()
    (said,) = (line for line in lines if line.startswith("changed since: "))
    assert "optim.lr=0.001 (was 0.003)" in said and "train.steps=2 (was 1)" in said and "init_std" not in said
    assert "WARNING: without effect, because a checkpoint has weights: model.init_std=0.5 (was 0.02)" in lines


@pytest.mark.parametrize("change", ["train.seed=1", "train.global_batch_size=4", "train.seq_len=8"])
def test_another_sample_order_is_refused(pool: Any, corpus: Path, tmp_path: Path, change: str) -> None:
    """Going on with another order would repeat samples and skip others, without a word."""
    config, overrides = (
        str(corpus / "config.json"),
        ["checkpoint.every=2", "train.steps=2", "model.position=rope"],
    )
    assert pool.run(1, training.run_rank, config, overrides, str(tmp_path / "run")) == [0]
    resolved = run_of(config, *overrides, "train.steps=4", change, f"log.dir={tmp_path / 'run'}")
    with pytest.raises(CheckpointError, match=change.split("=")[0]):
        Inputs(resolved, rank=0)


# A block whose output depends on the step, by a module within it.
BY_STEP = """
from torch import nn
from megacore.model.block import Block as Usual


class Gain(nn.Module):
    gain = 1.0

    def at_step(self, step):
        self.gain = 1.0 + 1.0 / (1 + step)


class Block(Usual):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.by_step = Gain()

    def forward(self, x, context):
        return self.by_step.gain * super().forward(x, context)
"""
SCHEDULE = ["model.window=8", f"model.window_schedule=[[{STEPS},2]]"]
SETTINGS_BY_STEP = {
    "window": (1, SCHEDULE),
    "window, validated behind the last step": (1, [*SCHEDULE, f"train.eval_every={STEPS}"]),
    "window, in stages": (2, [*SCHEDULE, "parallel.pipeline=2"]),
    "own layer": (1, ["model.source=by_step.py"]),
}


def validation_losses(config_path: str, overrides: list[str], log_dir: str) -> list[float | None]:
    """A rank's whole run; returns what its validations found."""
    losses, validate = list[float | None](), Trainer.validate

    def recorded(self: Trainer) -> float | None:
        losses.append(validate(self))
        return losses[-1]

    Trainer.validate = recorded  # type: ignore[method-assign]
    try:
        assert training.run_rank(config_path, overrides, log_dir) == 0
        return losses
    finally:
        Trainer.validate = validate  # type: ignore[method-assign]


def evaluated(arguments: list[str], out: str) -> float:
    """The loss that launch/evaluate.py finds."""
    assert evaluate.run([*arguments, "--json", out], place_from_environment()) == 0
    loss: float = json.loads(Path(out).read_text())["nats_per_token"]
    return loss


@pytest.mark.parametrize("case", SETTINGS_BY_STEP)
def test_a_run_that_is_over_validates_as_in_its_last_step(
    pool: Any, corpus: Path, tmp_path: Path, case: str
) -> None:
    """The same command again prints another final loss, if a setting that depends on the step is not what it
    was; so would `launch/evaluate.py`.
    """
    ranks, overrides = SETTINGS_BY_STEP[case]
    source = tmp_path / "by_step.py"
    source.write_text(BY_STEP)
    overrides = [word.replace("by_step.py", str(source)) for word in overrides]
    config, run = str(corpus / "config.json"), str(tmp_path / "run")
    first, again = (pool.run(ranks, validation_losses, config, overrides, run)[0] for _ in range(2))
    assert again == first[-1:] and first[-1] is not None
    named = ["--source", str(source)] if case == "own layer" else []
    arguments = ["--checkpoint", run, "--batches", "0", *named]
    (loss,) = pool.run(1, evaluated, arguments, str(tmp_path / "figures.json"))
    assert loss == pytest.approx(first[-1], rel=1e-6), "fp32, summed in another order"
