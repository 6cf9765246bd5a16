"""Requests to stop, whenever they come: agreed by all ranks, saved, status 75, and the
run goes on bitwise.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megacore.tools.choices.run import trainer_of
from megacore.tools.inputs import Inputs
from megacore.tools.launchers import place_from_environment
from megacore.tools.machine.device import pick_device
from megacore.tools.stop_request import STOP, StopRequest
from megacore.train import trainer as trainer_module
from megacore.train.trainer import STOPPED, Trainer
from tests import training
from tests.build import mesh_of, run_of
from tests.commands import run_script

OVERRIDES = [
    "train.steps=6",
    "checkpoint.every=4",
    "train.eval_every=3",
    "train.eval_batches=4",
    "log.every=5",
]


def asked_rank(config_path: str, log_dir: str, when: str) -> tuple[int, int, int]:
    """A run of which one rank is asked to stop at some moment; returns status,
    steps done and batches validated.
    """
    place = place_from_environment()
    config = run_of(config_path, *OVERRIDES, f"log.dir={log_dir}", world=place.world_size)
    plain, save = trainer_module.evaluate, Trainer.save
    batches = 0

    def ask() -> None:
        if place.rank == place.world_size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    def evaluate(*args: Any, between: Any) -> Any:
        def counted() -> None:
            nonlocal batches
            batches += 1
            between()

        if when == "validation":
            ask()
        return plain(*args, between=counted)

    def save_asked(self: Trainer) -> None:
        if when == "save":
            ask()
        save(self)

    trainer_module.evaluate = evaluate  # type: ignore[assignment]
    Trainer.save = save_asked  # type: ignore[method-assign]
    try:
        with StopRequest(Path(log_dir) if place.rank == 0 else None) as stop:
            stop.begin()
            inputs = Inputs(config, place.rank)
            mesh = mesh_of(config, device=pick_device(config, place))
            trainer = trainer_of(config, mesh, inputs)
            status = trainer.run(lambda: stop.requested)
            mesh.close()
            return status, trainer.step, batches
    finally:
        trainer_module.evaluate = plain
        Trainer.save = save  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("when", "step", "batches"),
    [
        ("file", 0, 0),
        ("validation", 3, 1),  # of four batches
        ("save", 4, 4),  # at once: what was just saved needs no second save
    ],
)
def test_asked_at_any_time(pool: Any, tmp_path: Path, when: str, step: int, batches: int) -> None:
    valid = training.write_corpus(tmp_path, "valid", 500, seed=1)
    config = training.write_config(
        tmp_path, prefix := training.write_corpus(tmp_path), data={"train": prefix, "valid": valid}
    )
    run = tmp_path / "run"
    run.mkdir()
    if when == "file":
        (run / STOP).touch()
    assert pool.run(2, asked_rank, config, str(run), when) == [(STOPPED, step, batches)] * 2
    assert [path.name for path in (run / "checkpoints").glob("step_*")] == (
        [f"step_{step:08d}"] if step else []
    )
    (run / STOP).unlink(missing_ok=True)
    assert pool.run(2, asked_rank, config, str(run), "never")[0][:2] == (0, 6)
    if when == "validation":
        pool.run(2, asked_rank, config, str(tmp_path / "whole"), "never")
        assert training.metrics(run)[-1]["loss"] == training.metrics(tmp_path / "whole")[-1]["loss"]


def test_a_stop_file_that_is_still_there_is_reported(tmp_path: Path) -> None:
    """The same command would stop again at once, and the user would not know why."""
    config = training.write_config(tmp_path, training.write_corpus(tmp_path))
    run = tmp_path / "run"
    run.mkdir()
    (run / STOP).touch()
    done = run_script("launch/pretrain.py", "--config", config, f"log.dir={run}")
    assert done.returncode == STOPPED
    assert f"remove {run / STOP} before you start the run again" in done.stdout
