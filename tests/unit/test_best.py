"""checkpoint.best: the checkpoint with the least validation loss stays, whatever
retention deletes, and scripts find it.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

from megacore.checkpoint import locate
from megacore.tools.monitoring.best import keep_if_best
from tests.commands import run_script
from tests.training import lines, write_config, write_corpus


def kept(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "best").iterdir())


def save(run: Path, step: int) -> Path:
    path = run / f"checkpoints/step_{step:08}"
    path.mkdir(parents=True)
    (path / "rank_00000.safetensors").write_bytes(bytes([step]))
    return path


def record(run: Path, losses: dict[int, float | None]) -> None:
    """Writes a run's records, a step and a validation each."""
    texts = [
        json.dumps({"step": step, "loss": 0.1}) + "\n" + json.dumps({"step": step, "valid_loss": loss})
        for step, loss in losses.items()
    ]
    (run / "metrics.jsonl").write_text("\n".join([*texts, '{"step": 9, "valid_loss": "x"}', ""]))


@pytest.mark.parametrize("links", [True, False])
def test_the_least_loss_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    """A later checkpoint of equal or more loss, or without one, would take its place; or the one
    that is deleted take it along.
    """
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError()))
    losses: dict[int, float | None] = {}
    for step, loss, best in ((2, 3.0, 2), (4, None, 2), (6, 3.0, 2), (8, 2.5, 8), (10, 2.6, 8)):
        losses[step] = loss
        path = save(tmp_path, step)
        record(tmp_path, losses)
        said = keep_if_best(tmp_path, path)
        assert kept(tmp_path) == [f"step_{best:08}"] and (said is not None) == (step == best)
        assert keep_if_best(tmp_path, path) is None, "it is told of the last one again"
    shutil.rmtree(tmp_path / "checkpoints")
    assert (tmp_path / "best/step_00000008/rank_00000.safetensors").read_bytes() == b"\x08"
    record(tmp_path, {2: 3.0, 4: 2.9})  # the run has gone back behind it
    assert keep_if_best(tmp_path, save(tmp_path, 4)) is not None and kept(tmp_path) == ["step_00000004"]


def test_a_run_keeps_its_best_one(tmp_path: Path) -> None:
    """The last step's loss, too, which is known only behind its save; scripts take the
    folder, and what is in it is whole.
    """
    train = {"steps": 6, "eval_every": 2, "eval_batches": 1}
    prefix = write_corpus(tmp_path)
    data, saves = {"train": prefix, "valid": prefix}, {"every": 2, "keep": 1, "best": True}
    for rate, best in ((3e-3, 6), (30.0, 2)):  # at which it learns, and forgets
        run = tmp_path / str(best)
        config = write_config(
            tmp_path,
            prefix,
            train=train,
            data=data,
            checkpoint=saves,
            optim={"lr": rate},
            log={"dir": str(run)},
        )
        done = run_script("launch/pretrain.py", "--config", config)
        losses = {line["step"]: line["valid_loss"] for line in lines(run) if "valid_loss" in line}
        assert done.returncode == 0 and min(losses, key=losses.__getitem__) == best, done.stderr
        assert kept(run) == [f"step_{best:08}"] and locate(run / "best") == run / f"best/step_{best:08}"
        assert f"best so far: {run}/best/step_{best:08}, validation loss {losses[best]:.4f}" in done.stdout
    shown = run_script("launch/checkpoint.py", "verify", str(run / "best"))
    assert shown.returncode == 0 and "step_00000002" in shown.stdout and "yes" in shown.stdout
    done = run_script("launch/pretrain.py", "--config", config, "checkpoint.resume=never", "train.steps=2")
    assert done.returncode == 0 and kept(run) == ["step_00000002", "step_00000002.aside1"], (
        "the best one of a run before is deleted by nobody"
    )
