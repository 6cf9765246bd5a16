"""A save that dies anywhere leaves a whole checkpoint behind.

All points are tried, not some: each call that changes the disk.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megacore.checkpoint import disk, saver
from tests import crashes

WAYS: list[tuple[Any, int, int, bool]] = [
    (end, step, world, background)
    for end in (crashes.killed, crashes.torn, crashes.power_cut)
    for step in (20, 10)  # a new step, and the same once more
    for world in (1, 2)
    for background in (False, True)
    if world == 1 or step == 20
    if end is not crashes.torn or (step, world) == (20, 1)
]


@pytest.fixture
def fast_folder(tmp_path: Path) -> Iterator[str]:
    """In memory where that can be had: there are thousands of fsyncs, which take their
    time on a disk that others use.
    """
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield str(tmp_path)
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield folder


@pytest.mark.parametrize(("end", "step", "world", "background"), WAYS)
def test_every_crash_point_leaves_a_whole_checkpoint(
    pool: Any, fast_folder: str, end: Any, step: int, world: int, background: bool
) -> None:
    ((points, lost),) = pool.run(1, crashes.crash_everywhere, fast_folder, end, step, world, background)
    assert points > 15 and lost == []


class Forgetful:
    """`os`, with an fsync that does nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, descriptor: int) -> None:
        pass


def no_fsync(folder: str) -> tuple[int, list[str]]:
    with mock.patch.object(disk, "os", Forgetful()):
        return crashes.crash_everywhere(folder, crashes.power_cut, 20, 1, False)


def in_place(folder: str) -> tuple[int, list[str]]:
    """Saving as many do: into the folder that is the checkpoint of that step."""
    with (
        mock.patch.object(saver, "partial_of", lambda directory, step, token: directory / f"step_{step:08d}"),
        mock.patch.object(saver, "commit"),
    ):
        return crashes.crash_everywhere(folder, crashes.killed, 10, 1, False)


@pytest.mark.parametrize("fault", [no_fsync, in_place])
def test_a_save_that_can_be_lost_is_noticed(pool: Any, fast_folder: str, fault: Any) -> None:
    """Planted faults: without them nobody knows that the points above are the ones that matter."""
    ((_, lost),) = pool.run(1, fault, fast_folder)
    assert lost
