"""Checkpoints in real runs: moved from layout to layout, saved beside training, passed over where
damaged, missed on a full disk.
"""

import errno
import json
import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megacore import checkpoint
from megacore.checkpoint import Ranks, Reader
from megacore.checkpoint.manifest import sealed
from megacore.checkpoint.saver import Staging
from megacore.errors import CheckpointError
from megacore.model.batch import Microbatch
from megacore.tools.choices.run import trainer_of
from megacore.tools.inputs import Inputs
from megacore.tools.launchers import place_from_environment
from megacore.tools.machine.device import pick_device
from megacore.tools.verify.checkpoint_diff import compare
from megacore.train.trainer import Trainer
from tests import training
from tests.build import mesh_of, run_of
from tests.checkpoints import find_latest, save
from tests.commands import run_script
from tests.engines import zero

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    return training.write_config(
        folder,
        training.write_corpus(folder),
        train={"steps": 10},
        optim={"warmup_steps": 2, "decay_steps": 10},
    )


def figures(folder: Path) -> dict[int, tuple[float, float]]:
    """(loss, gradient norm) by step."""
    return {m["step"]: (m["loss"], m["grad_norm"]) for m in training.metrics(folder)}


def slowly_copied_rank(config_path: str, overrides: list[str], log_dir: str) -> int:
    """A run whose saves take longer to copy what they save than the next forward and backward take."""
    copy = Staging._copy

    def late(self: Staging) -> None:
        time.sleep(0.5)
        copy(self)

    with mock.patch.object(Staging, "_copy", late):
        return training.run_rank(config_path, overrides, log_dir)


def warned_rank(config_path: str, overrides: list[str], log_dir: str) -> str:
    """A run, and what it warned of while it looked for its checkpoint."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megacore.checkpoint.folder").addHandler(handler)
    try:
        assert training.run_rank(config_path, overrides, log_dir) == 0
    finally:
        logging.getLogger("megacore.checkpoint.folder").removeHandler(handler)
    return "\n".join(lines)


def hop(config_path: str, overrides: list[str], log_dir: str) -> None:
    """Goes on from the newest checkpoint; before the first step, and so in this layout,
    it is saved once more, as a copy.
    """
    place = place_from_environment()
    config = run_of(config_path, *overrides, f"log.dir={log_dir}", world=place.world_size)
    inputs = Inputs(config, place.rank)
    mesh = mesh_of(config, device=pick_device(config, place))
    trainer = trainer_of(config, mesh, inputs)
    if trainer.step:
        save(Path(log_dir) / "copies", trainer.step, trainer.engine.tensors(), {}, keep=9, ranks=Ranks(mesh))
    assert trainer.run() == 0
    mesh.close()


CHAINS = {  # each of four ranks but the last
    "layouts": [
        ["parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence=true"],
        ["parallel.data=4", "engine.kind=fsdp"],
        ["parallel.tensor=4"],
        ["parallel.pipeline=4", "checkpoint.async=true"],
        ["parallel.tensor=1"],
    ],
    "schedules": [
        ["parallel.pipeline=4"],
        ["parallel.pipeline=2", "parallel.schedule=zb_v", "parallel.data=2", "engine.shard_optimizer=true"],
        ["parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.tensor=2"],
        ["parallel.pipeline=4", "parallel.schedule=zb_h1"],
        ["parallel.schedule=v_half"],
    ],
    "context": [
        ["parallel.context=4", "parallel.context_method=ring", "engine.shard_optimizer=true"],
        ["parallel.context=2", "parallel.context_method=ulysses", "engine.kind=fsdp"],
        [
            "parallel.context=2",
            "parallel.context_method=gather",
            "parallel.tensor=2",
            "parallel.sequence=true",
        ],
        ["parallel.context=2", "parallel.pipeline=2"],
        ["parallel.context=1"],
    ],
}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_chain_carries_the_same_tensors(pool: Any, config: str, tmp_path: Path, chain: str) -> None:
    """Layouts, or schedules with one chunk a rank and two, in a row, two steps each: contents have the same
    digests behind each hop, moments too, and training is the unmoved run's within 1e-5.
    """
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    assert pool.run(1, training.run_rank, config, [], str(whole)) == [0]
    for index, layout in enumerate(CHAINS[chain]):
        steps = 2 * index + 2
        pool.run(
            1 if index == 4 else 4,
            hop,
            config,
            [*layout, f"train.steps={steps}", "checkpoint.every=2", "checkpoint.keep=9"],
            str(moved),
        )
    for step in (2, 4, 6, 8):
        saved, again = (Reader(moved / folder / f"step_{step:08d}") for folder in ("checkpoints", "copies"))
        digests = {name: tensor.digest for name, tensor in saved.manifest.tensors.items()}
        assert {name.partition("/")[0] for name in digests} == {"model", "adam_m", "adam_v"}
        assert digests == {name: tensor.digest for name, tensor in again.manifest.tensors.items()}
        assert saved.manifest.files != again.manifest.files, "the layout did not change"
        assert not list(compare(saved, again))
    assert figures(moved).keys() == figures(whole).keys()
    for step, values in figures(whole).items():
        assert figures(moved)[step] == pytest.approx(values, rel=1e-5), f"step {step}"


SAVES: dict[str, list[int]] = {  # overrides, and the steps whose checkpoints a run of 3 steps leaves
    "": [3],
    "checkpoint.last=false": [],
    "checkpoint.every=2": [2, 3],
    "checkpoint.every=2 checkpoint.last=false": [2],
    "checkpoint.every=3 checkpoint.async=true": [3],
}


def test_a_finished_run_leaves_its_model(pool: Any, config: str, tmp_path: Path) -> None:
    """Hours of training must not end with nothing because a key was not set. Who wants nothing says so."""
    for number, (overrides, steps) in enumerate(SAVES.items()):
        folder = tmp_path / str(number)
        assert pool.run(1, training.run_rank, config, ["train.steps=3", *overrides.split()], str(folder)) == [
            0
        ]
        assert sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*")) == steps, (
            overrides
        )
    assert pool.run(1, training.run_rank, config, ["train.steps=3"], str(tmp_path / "0")) == [0]
    assert sorted(figures(tmp_path / "0")) == [1, 2, 3], "the same command finds that all is done"


def flip_last_bit(step_folder: Path) -> None:
    file = step_folder / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.fixture(scope="module")
def saved_run(pool: Any, config: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 2 and 4, saved beside training by two ranks."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    overrides = ["train.steps=4", "checkpoint.every=2", "checkpoint.async=true", "parallel.tensor=2"]
    assert pool.run(2, training.run_rank, config, overrides, str(folder)) == [0, 0]
    assert [m["save_seconds"] > 0 for m in training.metrics(folder)] == [False, False, True, False], (
        "step 2's save is seen in step 3's line"
    )
    return folder


def test_a_damaged_newest_is_named_and_the_one_before_used(
    pool: Any, config: str, saved_run: Path, tmp_path: Path
) -> None:
    """One bit of one tensor, which only reading everything shows: two ranks share that,
    and agree to go back to step 2.
    """
    run = Path(shutil.copytree(saved_run, tmp_path / "run"))
    flip_last_bit(run / "checkpoints/step_00000004")
    said, silent = pool.run(2, warned_rank, config, ["train.steps=6", "parallel.data=2"], str(run))
    assert "A CHECKPOINT IS DAMAGED AND WAS SKIPPED" in said and "step_00000002" in said and silent == ""
    assert "step_00000004: tensor model/" in said and "has changed in rank_00000.safetensors" in said
    assert sorted(figures(run)) == [1, 2, 3, 4, 5, 6] and figures(run)[3] != figures(saved_run)[3], (
        "data=2 sums in another order"
    )
    assert figures(run)[4] == pytest.approx(figures(saved_run)[4], rel=1e-4)


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_script("launch/pretrain.py", *arguments)


def test_nothing_whole_is_refused_and_never_trained_over(
    config: str, saved_run: Path, tmp_path: Path
) -> None:
    """All damaged, in a bit of a tensor: status 2 and one line, and not a run from nothing.

    What was named is not replaced either.
    """
    run = Path(shutil.copytree(saved_run, tmp_path / "run"))
    for path in (run / "checkpoints").iterdir():
        flip_last_bit(path)
    before = (run / "metrics.jsonl").read_text()
    refused = start("--config", config, f"log.dir={run}")
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    last = refused.stderr.strip().splitlines()[-1]
    assert (
        last.startswith("checkpoint error: ")
        and "tensor model/" in last
        and "no checkpoint before it is whole" in last
    )
    assert (run / "metrics.jsonl").read_text() == before
    # of which nothing is said where 4 is named
    (run / "checkpoints/step_00000002").rename(run / "checkpoints/step_00000003")
    refused = start(
        "--config", config, f"log.dir={run}", f"checkpoint.resume={run}/checkpoints/step_00000004"
    )
    assert (
        refused.returncode == 2
        and refused.stderr.count("\n") == 1
        and "step_00000004: tensor model/" in refused.stderr
    )


STATES: dict[str, Any] = {
    "engine": [1.0],
    "engine.updates": "many",
    "engine.loss_scale": -1.0,
    "engine.skipped": True,
    "rollbacks": "once",
    "config": 3,
    "config.train": None,
    "model": [1],
}


@pytest.mark.parametrize("key", STATES)
def test_a_hostile_state_is_refused_in_one_line(
    config: str, saved_run: Path, tmp_path: Path, key: str
) -> None:
    """Of a checkpoint that is whole: the run must not stumble over what it holds once ranks have met."""
    run = Path(shutil.copytree(saved_run, tmp_path / "run"))
    manifest = json.loads((run / "checkpoints/step_00000004/manifest.json").read_text())
    del manifest["manifest_sha256"]
    *above, last = key.split(".")
    section = manifest["state"][above[0]] if above else manifest["state"]
    section[last] = STATES[key]
    (run / "checkpoints/step_00000004/manifest.json").write_bytes(sealed(manifest))
    with pytest.raises(CheckpointError, match="step_00000004: [^\n]*$"):
        Inputs(run_of(config, f"log.dir={run}"), rank=0)


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param([], id="native"),
        pytest.param(["engine.shard_optimizer=true"], id="sharded"),
        pytest.param(["engine.kind=fsdp"], id="fsdp"),
        pytest.param(
            zero("zero3"),
            id="zero3",
            marks=pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
        ),
    ],
)
def test_an_update_waits_until_what_it_changes_is_copied(
    pool: Any, config: str, tmp_path: Path, engine: list[str]
) -> None:
    """Or a checkpoint saved beside training would hold some tensors of its own step and some of the next."""
    saved = ["train.steps=4", "checkpoint.every=2", *engine]
    assert pool.run(2, training.run_rank, config, saved, str(tmp_path / "loop")) == [0, 0]
    assert pool.run(
        2, slowly_copied_rank, config, [*saved, "checkpoint.async=true"], str(tmp_path / "beside")
    ) == [0, 0]
    loop, beside = (
        Reader(tmp_path / name / "checkpoints/step_00000002").manifest.tensors for name in ("loop", "beside")
    )
    assert {name: tensor.digest for name, tensor in loop.items()} == {
        name: tensor.digest for name, tensor in beside.items()
    }


def full_rank(config_path: str, overrides: list[str], log_dir: str, full_at: int) -> tuple[str, int]:
    """A run in which rank 1's disk is full while step `full_at` is saved; how it ended, and its last step."""
    write = os.write

    def refuse(descriptor: int, data: Any) -> int:
        if f"step_{full_at:08d}" in os.readlink(f"/proc/self/fd/{descriptor}") and os.environ["RANK"] == "1":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    steps = []
    next_batch = Trainer.next_batch

    def noted(self: Trainer) -> list[Microbatch]:
        for thread in threading.enumerate():  # the save has failed before this step's boundary
            if thread.name == "checkpoint" and self.mesh.place.rank == 1:
                thread.join()
        steps.append(self.step)
        return next_batch(self)

    with mock.patch("os.write", refuse), mock.patch.object(Trainer, "next_batch", noted):
        try:
            return str(training.run_rank(config_path, overrides, log_dir)), steps[-1]
        except Exception as error:
            return str(error), steps[-1]


@pytest.mark.parametrize("background", ["false", "true"])
def test_one_ranks_full_disk_ends_or_spares_the_run_on_all(
    pool: Any, config: str, tmp_path: Path, background: str
) -> None:
    overrides = [
        "train.steps=6",
        "checkpoint.every=2",
        f"checkpoint.async={background}",
        "parallel.pipeline=2",
    ]
    ended = pool.run(2, full_rank, config, overrides, str(tmp_path / "run"), 4)
    checkpoints = tmp_path / "run/checkpoints"
    boundary = 5 if background == "true" else 4
    for text, last in ended:
        assert last == boundary, (
            "an error of the background must come out at the next step's boundary, on every rank"
        )
        assert (
            "step_00000004: was not saved: rank 1 of 2: No space left on device; it needs 775.5 KiB in "
            "all and" in text
        )
    assert [path.name for path in checkpoints.iterdir()] == ["step_00000002"]
    checkpoint.opened(checkpoints / "step_00000002", deep=True)  # raises, if it is damaged
    ended = pool.run(
        2, full_rank, config, [*overrides, "checkpoint.on_failure=continue"], str(tmp_path / "run"), 4
    )
    assert ended == [("0", 6), ("0", 6)]
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_00000002", "step_00000006"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint and a half."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("background", ["false", "true"])
def test_a_disk_that_is_really_full(pool: Any, config: str, small_disk: Path, background: str) -> None:
    """The second checkpoint does not fit beside the first: the run ends with what was
    needed, and the first is whole.
    """
    overrides = ["train.steps=4", "checkpoint.every=2", "checkpoint.keep=1", f"checkpoint.async={background}"]
    with pytest.raises(
        Exception,
        match=r"step_00000004: was not saved: .*No space left.*it needs 775\.5 KiB in all .* and \d+.* "
        r"KiB was free",
    ):
        pool.run(1, training.run_rank, config, overrides, str(small_disk / "run"))
    assert [path.name for path in (small_disk / "run/checkpoints").iterdir()] == ["step_00000002"]
    assert find_latest(small_disk / "run") is not None
