"""Which checkpoints stay, what a full or garbling disk leaves, and how files are written."""

import errno
import fcntl
import itertools
import os
import shutil
import subprocess
from pathlib import Path
from typing import IO

import pytest
import torch

from megacore.checkpoint import Saver, checkpoints_in, disk, locate
from megacore.distributed.shard import Shard
from megacore.errors import CheckpointError
from megacore.tools import records
from megacore.tools.choices.run import trainer_of
from megacore.tools.inputs import Inputs
from megacore.tools.retention import retention, set_aside
from tests import crashes, training
from tests.build import mesh_of, run_of
from tests.checkpoints import Alone, find_latest
from tests.unit.test_checkpoint_format import assert_holds, save_alone, tensors, truncate


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_at_any_call_leaves_the_earlier_one(background, tmp_path):
    """Each call that changes the disk is refused in turn: the save is whole, or nothing is
    left of it and the reason is said.
    """
    earlier = save_alone(tmp_path, 10, tensors(1))
    outcomes = {"saved": 0, "refused": 0}
    for at in itertools.count(1):
        interposer = crashes.Interposer(at, crashes.full)
        saver = Saver(tmp_path, Alone(), background=background)
        pieces = {name: (tensor, Shard(tuple(tensor.shape))) for name, tensor in tensors(2).items()}
        try:
            with interposer.entered():
                saver.start(20, pieces, {})
                saver.finish()
        except CheckpointError as error:
            assert "step_00000020: was not saved: rank 0 of 1: No space left on device" in str(error)
            left = {path.name for path in tmp_path.iterdir()} - {"step_00000010", "step_00000020"}
            assert not left, f"call {at} left {left}"
            outcomes["refused"] += 1
        else:
            outcomes["saved"] += 1
        assert_holds(earlier, tensors(1))
        if interposer.count < at:
            break
        if (tmp_path / "step_00000020").exists():
            assert_holds(tmp_path / "step_00000020", tensors(2))
            shutil.rmtree(tmp_path / "step_00000020")
    assert outcomes["refused"] > 15 and outcomes["saved"] >= 1


def test_a_full_disk_says_what_was_needed(tmp_path, monkeypatch):
    monkeypatch.setattr("os.write", lambda *_: crashes.full(None, "write", (), None))
    with pytest.raises(
        CheckpointError,
        match=r"No space left on device; it needs 550 B in all and 550 B for this rank, and .* was free",
    ):
        save_alone(tmp_path, 20, tensors(2))


REMEDIES = {
    "full": (OSError(errno.ENOSPC, "No space left on device"), "No space left on device; .*make room; "),
    "refused": (OSError(errno.EACCES, "Permission denied"), "Permission denied .see to its folder; "),
    "program": (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero .a mistake of the program: "),
}


@pytest.mark.parametrize("failure", REMEDIES)
def test_a_failed_save_advises_what_would_mend_it(tmp_path, monkeypatch, failure):
    """A user who makes room for a mistake of the program loses days, and the run ends there again."""
    error, expected = REMEDIES[failure]

    def fail(*_):
        raise error

    monkeypatch.setattr("os.write", fail)
    with pytest.raises(CheckpointError, match=f"was not saved: rank 0 of 1: {expected}") as raised:
        save_alone(tmp_path, 20, tensors(2))
    assert raised.value.right.endswith("the checkpoints before it are whole")
    assert ("room" in raised.value.right) == (failure == "full")


def test_pieces_that_do_not_fit_together_are_no_matter_of_room(tmp_path):
    """Two ranks that save a parameter of their own each, under one name."""
    whole = torch.ones(4), Shard((4,))
    saver = Saver(tmp_path, Alone())
    saver.start(20, {"w": whole, "w#2": whole}, {})
    with pytest.raises(CheckpointError, match="w has overlapping slices") as raised:
        saver.finish()
    assert raised.value.right.startswith("every element must be in exactly one slice; ")


def test_saving_a_step_again_replaces_it(tmp_path):
    path = save_alone(tmp_path, 10, tensors(1))
    replaced = tmp_path / "step_00000010.old"
    shutil.copytree(path, replaced)
    save_alone(tmp_path, 10, tensors(2))
    assert_holds(path, tensors(2))
    assert list(tmp_path.iterdir()) == [path]
    shutil.copytree(path, replaced)  # as a process leaves it that stops behind the second rename
    assert checkpoints_in(tmp_path) == [path, replaced] and locate(tmp_path) == path, (
        "a run would go on from what it had replaced"
    )


def test_keep_counts_whole_checkpoints_and_spares_the_new_one(tmp_path):
    values = {"w": torch.ones(2)}
    for step in (10, 20, 30):
        save_alone(tmp_path, step, values, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000020", "step_00000030"]
    truncate(tmp_path / "step_00000030")
    save_alone(tmp_path, 40, values, keep=2)
    assert (tmp_path / "step_00000020").exists(), (
        "the damaged one took the room of the last but one whole one"
    )
    save_alone(tmp_path, 5, values, keep=1)  # a run that went back to an earlier step
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000005"]


def test_a_run_that_starts_earlier_sets_later_checkpoints_aside(tmp_path, caplog):
    """They would be taken for its newest, and use up the room of its own.

    They cost a disk's space until somebody deletes them, so one line says where they are, how large, and how.
    """
    saved = {step: save_alone(tmp_path, step, tensors(step)) for step in (100, 200, 300)}
    set_aside(tmp_path, above=100)
    assert find_latest(tmp_path) == saved[100]
    assert_holds(tmp_path / "step_00000300.aside1", tensors(300))
    (line,) = caplog.messages
    size = disk.size_text(sum(file.stat().st_size for file in tmp_path.glob("*.aside1/*")))
    assert (
        f"were set aside, {size}: step_00000200.aside1, step_00000300.aside1. They stay until you delete "
        "them: rm -r" in line
    )
    save_alone(tmp_path, 300, tensors(1))
    set_aside(tmp_path, above=0)
    assert find_latest(tmp_path) is None and (tmp_path / "step_00000300.aside2").exists()
    for message in caplog.messages:
        subprocess.run(message.partition("delete them: ")[2], shell=True, check=True)
    assert not list(tmp_path.iterdir()), "the command that is named deletes them, and works as it stands"
    set_aside(tmp_path, above=0)
    assert len(caplog.messages) == 2


def test_every_kth_is_kept_for_good(tmp_path):
    saver = Saver(tmp_path, Alone(), clean=retention(tmp_path, keep=1, keep_every=20))
    for step in (10, 20, 30, 40, 50):
        saver.start(step, {"w": (torch.ones(2), Shard((2,)))}, {})
        saver.finish()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000020", "step_00000040", "step_00000050"]


def test_a_write_that_the_disk_garbles_is_noticed_before_anything_is_deleted(tmp_path, monkeypatch):
    """A bit flips between memory and disk: the new one is refused when it is read back, and
    `keep` does not take the old one.
    """
    write = os.write

    def garble(descriptor, data):
        changed = bytearray(data)
        changed[-1] ^= 1
        return write(descriptor, changed)

    earlier = save_alone(tmp_path, 10, {"w": torch.ones(2)}, keep=1)
    monkeypatch.setattr("os.write", garble)
    with pytest.raises(CheckpointError, match="what is read back is not what was written"):
        save_alone(tmp_path, 20, {"w": torch.ones(2)}, keep=1)
    assert list(tmp_path.iterdir()) == [earlier]


@pytest.mark.skipif(not disk.DIRECT, reason="this system has no O_DIRECT")
@pytest.mark.parametrize("refuses", ["open", "write", "readv"])
def test_where_files_cannot_be_written_past_the_kernels_memory_they_go_through_it(
    tmp_path, monkeypatch, refuses
):
    """File systems differ in when they say so; every length about the blocks' comes back, and is
    told apart from its neighbours.
    """
    real = getattr(os, refuses)

    def refuse(target, *rest):
        flags = rest[0] if refuses == "open" else fcntl.fcntl(target, fcntl.F_GETFL)
        if flags & disk.DIRECT:
            asked.append(target)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(target, *rest)

    asked = []
    monkeypatch.setattr(disk, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(os, refuses, refuse)
    file, content = tmp_path / "file", os.urandom(3 * 4096 + 1)
    for size in (0, 1, 4095, 4096, 4097, 2 * 4096, 3 * 4096 + 1):
        parts = (b"", content[: size // 3], memoryview(content)[size // 3 : size])
        assert (
            disk.write_file(file, parts) == (size, disk.file_digest(file))
            and file.read_bytes() == content[:size]
        )
    if not asked:
        pytest.skip(f"the file system of {tmp_path} says so at once")


def test_staging_memory_is_used_again(tmp_path):
    saver = Saver(tmp_path, Alone(), background=True)
    places = []
    for step in (10, 20):
        saver.start(
            step, {name: (tensor, Shard(tuple(tensor.shape))) for name, tensor in tensors(step).items()}, {}
        )
        places.append(saver.staging.buffer.data_ptr())
        saved = saver.finish()
        assert_holds(saved.path, tensors(step))
    assert places[0] == places[1]


def test_checkpoints_are_set_aside_before_records_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that dies between the two would leave checkpoints whose steps no record has, and the
    next one would go on from them.
    """
    path = training.write_config(
        tmp_path, training.write_corpus(tmp_path), log={"dir": str(tmp_path / "run")}
    )
    (tmp_path / "run/checkpoints/step_00000004").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step_00000004/manifest.json").write_text("{}")
    seen = list[str]()
    cut = records.open_metrics

    def seen_and_cut(file: Path, first_step: int) -> IO[str]:
        seen.extend(path.name for path in (tmp_path / "run/checkpoints").iterdir())
        return cut(file, first_step)

    monkeypatch.setattr(records, "open_metrics", seen_and_cut)
    config = run_of(path, "checkpoint.resume=never")
    mesh = mesh_of(config)
    trainer_of(config, mesh, Inputs(config, 0)).close()
    mesh.close()
    assert seen == ["step_00000004.aside1"]
