"""Ranks find out together whether their machines share the run's folder."""

import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megacore.errors import ConfigError
from megacore.tools.folder_lock import FolderLock, apart_from_owner
from megacore.tools.launchers import LAUNCHERS, place_from_environment
from megacore.tools.machine.device import pick_device
from tests.build import mesh_of, run_of
from tests.pool import PATIENCE
from tests.training import write_config


def look(config_path: str, folders: list[str], local_world_size: int) -> str:
    """What a rank learns of its folder, as if `local_world_size` ranks were on each machine."""
    place = place_from_environment()
    place = replace(place, local_world_size=local_world_size, local_rank=place.rank % local_world_size)
    folder = Path(folders[place.rank])
    lock = FolderLock(folder)
    if place.rank == 0:
        lock.take()
    config = run_of(config_path, world=place.world_size)
    mesh = mesh_of(config, place, pick_device(config, place))
    try:
        return apart_from_owner(folder, mesh, patience=1.0)
    finally:
        mesh.close()
        if lock.file is not None:
            lock.file.close()


def try_to_take(folder: str, tried: str) -> bool:
    """Whether this process, which resembles the others in nothing but its folder, gets the lock."""
    rank, place = int(os.environ["RANK"]), Path(folder)
    numbers = {name for names in LAUNCHERS.values() for name in names}
    other = {
        "SLURM_ARRAY_TASK_ID",
        "SLURM_ARRAY_JOB_ID",
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "MEGACORE_HOST",
        "HOSTNAME",
        "USER",
        "TMPDIR",
    }
    os.environ.update({name: str(rank) for name in numbers | other})
    link = Path(tried) / f"link{rank}"
    link.symlink_to(place)
    os.chdir(place.parent)
    lock = FolderLock([place, Path(place.name), link][rank], patience=0.0)
    with contextlib.suppress(ConfigError):
        lock.take()
    (Path(tried) / f"tried{rank}").touch()
    deadline = time.monotonic() + PATIENCE
    while len(list(Path(tried).glob("tried*"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)  # it keeps what it has while others try
    got = lock.file is not None
    if lock.file is not None:
        lock.file.close()
    return got


def test_of_several_writers_one_has_the_folder(run_ranks: Any, tmp_path: Path) -> None:
    """Tasks of an array, jobs and machines, under any name of the folder: two that both wrote would
    delete each other's checkpoints.
    """
    folder = tmp_path / "run"
    folder.mkdir()
    assert sorted(run_ranks(3, try_to_take, str(folder), str(tmp_path))) == [False, False, True]


@pytest.mark.parametrize(
    ("folders", "on_a_machine", "apart"),
    [("aa", 1, False), ("ab", 1, True), ("ac", 1, True), ("ab", 2, False)],
    ids=["shared", "own", "own, of an earlier run", "one machine"],
)
def test_folders_apart_are_noticed_on_every_rank(
    run_ranks: Any, tmp_path: Path, folders: str, on_a_machine: int, apart: bool
) -> None:
    """Ranks of one machine alone would hang in a save; and a lock that an earlier run
    left must not pass for this run's.
    """
    for name in "abc":
        (tmp_path / name).mkdir()
    (tmp_path / "c" / "lock").write_text("process 12 on node0 since 2026-01-01 00:00:00\n")
    said = run_ranks(
        2, look, write_config(tmp_path, "nothing"), [str(tmp_path / name) for name in folders], on_a_machine
    )
    assert said[0] == said[1]
    assert said[0].startswith(f"{tmp_path}/{folders[1]} on ") if apart else said[0] == ""
