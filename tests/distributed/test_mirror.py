"""checkpoint.mirror: every checkpoint has a second copy, and a run whose first one is
damaged or gone goes on from it.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from launch import pretrain
from megacore.checkpoint import checkpoints_in, opened
from megacore.distributed.rank_info import RankInfo
from megacore.errors import CheckpointError, ConfigError
from megacore.tools import mirror
from megacore.tools.inputs import Inputs
from megacore.tools.launchers import place_from_environment
from megacore.tools.mirror import Mirror, copied
from tests.build import run_of
from tests.training import figures, write_config, write_corpus

OVERRIDES = ["checkpoint.every=2", "checkpoint.keep=2", "optim.decay_steps=8"]


@pytest.fixture
def config(tmp_path: Path) -> str:
    return write_config(
        tmp_path, write_corpus(tmp_path), model={"num_layers": 1}, log={"dir": str(tmp_path / "run")}
    )


def rank(config: str, *overrides: str) -> int:
    return pretrain.run(["--config", config, *OVERRIDES, *overrides], place_from_environment())


@pytest.fixture
def train(pool: Any, config: str, tmp_path: Path) -> Iterator[Any]:
    """Runs on two ranks; the run's folder, and that of the second copies."""

    def run(*overrides: str) -> None:
        assert pool.run(2, rank, config, f"checkpoint.mirror={tmp_path}/second", *overrides) == [0, 0]

    return run


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoints_in(folder)]


@pytest.mark.parametrize("loss", ["damaged", "gone"])
def test_the_second_copy_is_used(train: Any, pool: Any, config: str, tmp_path: Path, loss: str) -> None:
    """A disk that fails takes the run with it; and what went on would train on other
    weights, had the copy another content.
    """
    train("train.steps=6")
    first, second = tmp_path / "run/checkpoints", tmp_path / "second"
    assert names(first) == names(second) == ["step_00000006", "step_00000004"]
    for path in checkpoints_in(second):
        opened(path, deep=True)  # raises, if it is damaged
    inputs = Inputs(run_of(config, f"checkpoint.mirror={second}"), rank=0)
    steps = ("step_00000006", "step_00000004")
    assert [inputs.checkpoint, *inputs.candidates] == [
        folder / name for name in steps for folder in (first, second)
    ], "of each step the run's own, and its copy only where that is damaged"
    for path in checkpoints_in(first):
        if loss == "gone":
            shutil.rmtree(path)
        else:
            file = path / "rank_00001.safetensors"
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
    train("train.steps=8")
    assert pool.run(2, rank, config, "train.steps=8", f"log.dir={tmp_path}/whole") == [0, 0]
    assert figures(tmp_path / "run") == figures(tmp_path / "whole"), (
        "it goes on from step 6, on the same weights and samples"
    )
    assert names(second) == ["step_00000008", "step_00000006"] and names(first)[0] == "step_00000008"


def test_what_was_not_copied_is_copied_at_the_next_start(
    train: Any, config: str, pool: Any, tmp_path: Path
) -> None:
    """A run that was killed while it copied would have no second copy until its next save."""
    assert pool.run(2, rank, config, "train.steps=2") == [0, 0]
    train("train.steps=3", "checkpoint.last=false")
    assert names(tmp_path / "second") == ["step_00000002"]


def test_a_run_that_begins_anew_sets_the_old_copies_aside(train: Any, tmp_path: Path) -> None:
    """They are another run's, and would be newer than its own."""
    train("train.steps=4")
    train("train.steps=2", "checkpoint.resume=never")
    assert names(tmp_path / "second") == ["step_00000002"]
    assert sorted(path.name for path in (tmp_path / "second").glob("*.aside*")) == [
        "step_00000002.aside1",
        "step_00000004.aside1",
    ]


def one(config: str, folder: Path, *overrides: str) -> Mirror:
    return Mirror(
        run_of(config, f"checkpoint.mirror={folder}", *overrides), RankInfo(0, 1, 0, 1, "localhost", 0)
    )


def test_a_copy_that_fails_ends_no_run(
    pool: Any,
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Other bytes than were saved never get a checkpoint's name, and the next copy tries again."""
    assert pool.run(1, rank, config, "train.steps=4") == [0]
    older, newer = reversed(checkpoints_in(tmp_path / "run"))
    blocks = mirror.blocks
    # the planted fault
    monkeypatch.setattr(mirror, "blocks", lambda *args: [bytes(len(part)) for part in blocks(*args)])
    with one(config, tmp_path / "second") as second:
        second.on_checkpoint(older)
        second.thread.submit(lambda: None).result()
        assert (
            "step_00000002 has no second copy" in capsys.readouterr().out and names(tmp_path / "second") == []
        )
        monkeypatch.setattr(mirror, "blocks", blocks)
        second.on_checkpoint(newer)
    assert [path.name for path in (tmp_path / "second").iterdir()] == ["step_00000004"], (
        "and nothing is left of the one that failed"
    )


def test_saves_that_come_faster_than_copies(pool: Any, config: str, tmp_path: Path) -> None:
    """The newest one counts, and those of `keep_every` are copied all the same: they are kept for good."""
    assert pool.run(1, rank, config, "train.steps=4") == [0]
    newer, older = checkpoints_in(tmp_path / "run")
    for keep_every, copies in ((0, [newer]), (2, [newer, older])):
        folder, saved = tmp_path / f"second{keep_every}", Event()
        with one(config, folder, "checkpoint.keep=1", f"checkpoint.keep_every={keep_every}") as second:
            second.thread.submit(saved.wait)
            second.on_checkpoint(older)
            second.on_checkpoint(newer)
            saved.set()
        assert names(folder) == [path.name for path in copies]


def test_a_copy_with_other_content_is_none(
    pool: Any, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison itself: one bit of one file."""
    assert pool.run(1, rank, config, "train.steps=2") == [0]
    (path,) = checkpoints_in(tmp_path / "run")
    copied(path, tmp_path / "step_00000002", Event())
    assert opened(tmp_path / "step_00000002", deep=True).step == 2
    monkeypatch.setattr(mirror, "blocks", lambda file, _: [file.read_bytes()[:-1], b"\xff"])
    with pytest.raises(CheckpointError):
        copied(path, tmp_path / "step_00000003", Event())


def test_a_run_that_fails_waits_for_no_copy(config: str, tmp_path: Path) -> None:
    """Of a checkpoint of some terabytes, a copy goes on for an hour, and a
    launcher waits for the rank to end.
    """
    with pytest.raises(KeyError), one(config, tmp_path / "second") as second:
        raise KeyError
    (tmp_path / "file").write_bytes(b"some")
    assert second.stopped.is_set()
    with pytest.raises(OSError, match="the run has failed"):
        list(mirror.blocks(tmp_path / "file", second.stopped))


@pytest.mark.parametrize(
    ("folder", "wrong"),
    [
        ("run", "has the checkpoints themselves"),
        ("run/checkpoints", "has the"),
        ("run/best", "has the"),  # of which a better checkpoint would delete the copies
        ("config.json/a", "cannot write"),
    ],
)
def test_a_place_that_cannot_be_is_refused(config: str, tmp_path: Path, folder: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"checkpoint.mirror: .*{wrong}"):
        one(config, tmp_path / folder)


def test_another_runs_copies_are_not_taken(train: Any, config: str, tmp_path: Path) -> None:
    """A new run would go on from another's weights, or say that it is done, and delete its copies."""
    train("train.steps=2")
    with pytest.raises(ConfigError, match=rf"checkpoint.mirror: .*second has the copies of {tmp_path}/run "):
        one(config, tmp_path / "second", f"log.dir={tmp_path}/other")
    (tmp_path / "second/copies_of").unlink()
    one(config, tmp_path / "second", f"log.dir={tmp_path}/other")
