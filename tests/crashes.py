"""Saves that die, or meet a full disk, at a chosen one of the calls with which they change the disk."""

import errno
import os
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megacore.checkpoint import LocalTensor, Ranks, Reader, Saver, disk
from megacore.distributed.shard import Shard
from megacore.tools.retention import retention
from tests.checkpoints import Alone, find_latest, save
from tests.pieces import piece
from tests.thread_ranks import run_threads

CHANGES = ("open", "write", "fsync", "rename", "replace", "unlink", "mkdir", "rmdir")
DIED = 77


class Interposer:
    """Counts the calls that change the disk, in any thread; at number `at` lets `end` decide what happens."""

    def __init__(self, at: int, end: Callable[..., Any]) -> None:
        self.at, self.end, self.count = at, end, 0
        self.calls: Counter[str] = Counter()
        # by inode, a descriptor of a file with writes that no fsync has followed
        self.unsynced: dict[int, int] = {}
        self.lock = threading.RLock()

    def wrap(self, name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            if name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR):
                return real(*args, **options)
            with self.lock:
                self.count += 1
                self.calls[name] += 1
                if self.count == self.at:
                    return self.end(self, name, args, real)
                result = real(*args, **options)
                if name == "write" and os.fstat(args[0]).st_ino not in self.unsynced:
                    self.unsynced[os.fstat(args[0]).st_ino] = os.dup(args[0])
                elif name == "fsync":
                    self.unsynced.pop(os.fstat(args[0]).st_ino, None)
                return result

        return call

    @contextmanager
    def entered(self) -> Iterator["Interposer"]:
        with mock.patch.multiple(os, **{name: self.wrap(name) for name in CHANGES}):
            yield self


def killed(interposer: Interposer, name: str, args: tuple[Any, ...], real: Callable[..., Any]) -> None:
    """The process dies before the call."""
    os._exit(DIED)


def torn(interposer: Interposer, name: str, args: tuple[Any, ...], real: Callable[..., Any]) -> None:
    """It dies in the middle of a write."""
    if name == "write":
        real(args[0], args[1][: len(args[1]) // 2])
    os._exit(DIED)


def power_cut(interposer: Interposer, name: str, args: tuple[Any, ...], real: Callable[..., Any]) -> None:
    """The machine dies: of files whose last writes were not followed by an fsync
    nothing is left but their names.
    """
    for descriptor in interposer.unsynced.values():
        os.ftruncate(descriptor, 0)
    os._exit(DIED)


def full(interposer: Interposer, name: str, args: tuple[Any, ...], real: Callable[..., Any]) -> None:
    """The disk is full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model/w": torch.randn(40, 30, generator=generator),
        "adam_m/w": torch.randn(40, 30, generator=generator).double(),
    }


def pieces(seed: int, ranks: Ranks) -> dict[str, LocalTensor]:
    """A rank's rows of `values`."""
    boxes = {
        name: piece(tuple(whole.shape), 0, ranks.rank, ranks.world) for name, whole in values(seed).items()
    }
    starts = {name: box.offset[0] for name, box in boxes.items()}
    return {
        n: (whole[starts[n] :][: boxes[n].local_shape[0]].clone(), boxes[n])
        for n, whole in values(seed).items()
    }


def save_as(directory: Path, step: int, seed: int, world: int, background: bool) -> None:
    """Save `values(seed)` from so many ranks, and go on training (which overwrites
    them) while that is under way.
    """

    def on(ranks: Ranks) -> None:
        tensors = pieces(seed, ranks)
        saver = Saver(directory, ranks, clean=retention(directory, keep=1), background=background)
        saver.start(step, tensors, {})
        if background:
            saver.hold_update()
            for tensor, _ in tensors.values():
                tensor.fill_(-1.0)
        saver.finish()

    with mock.patch.object(disk, "BLOCK_BYTES", 4096):  # or all would be one write
        if world == 1:
            on(Alone())
        else:
            run_threads(world, on)


def content(path: Path) -> int:
    """The seed of the values that a checkpoint holds in every bit."""
    reader = Reader(path)
    for seed in (1, 2):
        if all(
            torch.equal(reader.read(name, Shard(tuple(whole.shape))), whole)
            for name, whole in values(seed).items()
        ):
            return seed
    raise AssertionError(f"{path} holds a mixture")


def audited(directory: Path) -> Counter[str]:
    """From now on, what the interpreter itself reports of changes under a folder: an interposer
    that misses a call is noticed.
    """
    names = {"os.rename": "rename", "os.remove": "unlink", "os.mkdir": "mkdir", "os.rmdir": "rmdir"}
    seen: Counter[str] = Counter()

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in names:
            seen[names[event]] += 1
        elif (
            event == "open"
            and isinstance(args[2], int)
            and args[2] & (os.O_WRONLY | os.O_RDWR)
            and str(directory) in str(args[0])
        ):
            seen["open"] += 1

    sys.addaudithook(hook)
    return seen


def in_child(work: Callable[[], None]) -> int:
    """`work` in a forked process; its exit status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def count_calls(directory: Path, step: int, world: int, background: bool) -> int:
    """How many calls a save makes that change the disk."""
    record = directory.with_suffix(".calls")

    def work() -> None:
        seen = audited(directory)
        with Interposer(0, full).entered() as interposer:
            save_as(directory, step, 2, world, background)
        for name in ("open", "rename", "unlink", "mkdir", "rmdir"):
            assert interposer.calls[name] == seen[name], (
                f"{name}: {interposer.calls[name]} calls interposed, {seen[name]} made"
            )
        assert interposer.calls["write"] > interposer.calls["open"]
        record.write_text(str(interposer.count))

    assert in_child(work) == 0
    return int(record.read_text())


def crash_everywhere(folder: str, end: Any, step: int, world: int, background: bool) -> tuple[int, list[str]]:
    """With step 10 whole on the disk, a save of `step` dies at each of its calls in turn.

    How many points, and where it was not survived: a whole checkpoint of the old or the new content is found,
    and the next save leaves nothing else.
    """

    before = Path(folder) / "before"
    save_as(before, 10, 1, 1, False)

    def prepared(name: str) -> Path:
        return Path(shutil.copytree(before, before.with_name(name)))

    points = count_calls(prepared("counted"), step, world, background)
    lost = []
    for at in range(1, points + 1):
        directory = prepared(f"point{at}")

        def work(at: int = at, directory: Path = directory) -> None:
            with Interposer(at, end).entered():
                save_as(directory, step, 2, world, background)

        status = in_child(work)
        try:
            # threads may make a call less, or more: of waiting
            assert status == DIED or world > 1, f"ended with status {status}"
            found = find_latest(directory)
            assert found is not None, "no whole checkpoint is left"
            content(found)
            save(directory, 30, pieces(2, Alone()), {}, keep=1)
            assert sorted(path.name for path in directory.iterdir()) == ["step_00000030"]
        except Exception as error:
            lost.append(f"call {at} of {points}: {error}")
    return points, lost
