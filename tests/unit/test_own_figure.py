"""Another metric of a logged step: a callback in a custom model's file adds it, and metrics.jsonl and
TensorBoard have it.
"""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megacore.records import FIGURES
from megacore.tools.monitoring.cost import HOURS
from tests import training

SOURCE = """
from megacore.model.block import Block
from megacore.train.callbacks import Callback

class Halved(Callback):
    def metrics(self, metrics, stages):
        return {NAME: metrics["loss"] / 2, "parameters": float(sum(p.numel() for stage in stages for p in stage.parameters()))}

CALLBACKS = [Halved]
"""  # noqa: E501


# Draws the steps in place of lines; deletes the records behind the first step, and then cannot begin anew.
FRAGILE = """
from megacore.model.block import Block
from megacore.train.callbacks import Callback

class Fragile(Callback):
    shows_steps = True

    def on_records_open(self, folder, first_step):
        self.file = folder / "metrics.jsonl"
        if first_step > 1:
            raise RuntimeError("there is nothing to write to")

    def on_record(self, record):
        if record["step"] > 1:
            raise RuntimeError("there is still nothing")

    def on_log(self, report):
        self.file.unlink()

CALLBACKS = [Fragile]
"""


def left_out(name: str, method: str, reason: str) -> str:
    """What is printed of a callback that failed."""
    return f"WARNING: rank 0: {name} failed in {method} and is left out; training continues: {reason}\n"


def run(tmp_path: Path, source: str, steps: int = 2) -> Path:
    path = training.write_config(
        tmp_path, training.write_corpus(tmp_path), train=training.BASE["train"] | {"steps": steps}
    )
    (tmp_path / "own.py").write_text(source)
    training.run_rank(
        path, ["log.tensorboard=true", f"model.source={tmp_path}/own.py"], str(tmp_path / "run")
    )
    return tmp_path / "run"


def test_another_figure_is_recorded_and_shown(tmp_path: Path) -> None:
    """Whoever adds one would find it in the file, and wait for it in TensorBoard."""
    folder = run(tmp_path, SOURCE.replace("NAME", "'halved_loss'"))
    logged = training.metrics(folder)
    assert [figures["halved_loss"] for figures in logged] == [figures["loss"] / 2 for figures in logged]
    assert logged[0]["parameters"] > 1000, "it is given the stages"
    assert logged[0].keys() <= FIGURES | {HOURS, "halved_loss", "parameters"}, (
        "a model's loss might have such a name"
    )
    shown = EventAccumulator(str(folder / "tensorboard"))
    shown.Reload()
    assert [event.step for event in shown.Scalars("train/halved_loss")] == [1, 2]


def test_a_figure_that_cannot_be_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A record whose loss is something else would be believed; and no run may end,
    before its checkpoint, for a figure.
    """
    folder = run(tmp_path, SOURCE.replace("NAME", "'loss'"))
    reason = "ValueError: loss is another metric's name"
    assert left_out("Halved", "metrics", reason) in capsys.readouterr().err
    assert len(training.metrics(folder)) == 2 and "parameters" not in training.metrics(folder)[0]
    assert (folder / "checkpoints/step_00000002").is_dir()


def test_a_callback_that_cannot_begin_anew_takes_nothing_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run would go on without its records, or without a line about its steps, for
    what another's file does wrong.
    """
    folder = run(tmp_path, FRAGILE, steps=3)
    said, warned = capsys.readouterr()
    assert warned.count("is left out; training continues") == 1
    assert left_out("Fragile", "on_records_open", "RuntimeError: there is nothing to write to") in warned
    assert [figures["step"] for figures in training.metrics(folder)] == [2, 3]
    assert "step 3/3" in said and "step 1/3" not in said, "lines begin where nobody draws the steps any more"


def test_a_callback_that_cannot_begin_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A figure that cannot be written, on a disk that is not there, is no reason to train nothing."""
    folder = run(tmp_path, FRAGILE.replace("first_step > 1", "True").replace("RuntimeError(", "OSError("))
    reason = "OSError: there is nothing to write to"
    assert left_out("Fragile", "on_records_open", reason) in capsys.readouterr().err
    assert len(training.metrics(folder)) == 2
