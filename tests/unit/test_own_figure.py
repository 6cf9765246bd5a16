"""Another figure of a logged step, as docs/tour.md says: a line in `Reporter.report`, and the records and TensorBoard have it."""

from pathlib import Path
from typing import Any
from unittest import mock

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megacore.records import FIGURES
from megacore.train.metrics import Reporter
from tests import training


def test_another_figure_is_recorded_and_shown(tmp_path: Path) -> None:
    """Whoever adds one would find it in the file, and wait for it in TensorBoard."""
    report = Reporter.report

    def longer(self: Reporter, *arguments: Any) -> Any:
        made, stragglers = report(self, *arguments)
        made.figures["halved_loss"] = made.figures["loss"] / 2
        return made, stragglers

    path = training.write_config(tmp_path, training.write_corpus(tmp_path), train=training.BASE["train"] | {"steps": 2})
    with mock.patch.object(Reporter, "report", longer):
        training.run_rank(path, ["log.tensorboard=true"], str(tmp_path / "run"))
    logged = [figures["halved_loss"] for figures in training.metrics(tmp_path / "run")]
    assert logged == [figures["loss"] / 2 for figures in training.metrics(tmp_path / "run")]
    assert training.metrics(tmp_path / "run")[0].keys() <= FIGURES | {"halved_loss"}, "a model's loss might have such a name"
    shown = EventAccumulator(str(tmp_path / "run/tensorboard"))
    shown.Reload()
    assert [event.step for event in shown.Scalars("halved_loss")] == [1, 2]
