"""Ranks that exchange through memory get what they would get through gloo, however far one of them
lags; what cannot be is noticed.
"""

import fcntl
import mmap
import os
import random
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from megacore.distributed import collectives as comm
from megacore.distributed import shared_memory
from megacore.distributed.communicator import Communicator, Group
from megacore.distributed.mesh import Mesh
from megacore.distributed.shared_memory import PROCESS, PUBLISHED, READ, SharedMemory
from megacore.tools.diagnosis.failure import lost_peer
from megacore.tools.launchers import place_from_environment
from megacore.tools.machine.device import pick_device
from tests import training
from tests.build import mesh_of, run_of
from tests.pool import PATIENCE

ROUNDS = 40


def opened(config_path: str, *overrides: str) -> Mesh:
    place = place_from_environment()
    config = run_of(config_path, f"parallel.tensor={place.world_size}", *overrides, world=place.world_size)
    return mesh_of(config, device=pick_device(config, place))


def results(group: Group, dtype: torch.dtype, rows: int, seed: int) -> list[torch.Tensor]:
    """Of each operation, on numbers that every type adds up exactly."""
    generator = torch.Generator().manual_seed(1000 * group.rank + seed)
    x = torch.randint(-8, 8, (group.size * rows, 3), generator=generator).to(dtype)
    started = x.clone()
    inside = x.flatten().clone()
    work = comm.all_reduce_start(started, group)
    gathered, other = comm.all_gather_start(x, group)
    work.wait()
    other.wait()
    comm.reduce_scatter_inside(inside, group).wait()
    comm.all_gather_inside(inside, group).wait()
    scalar = comm.all_reduce(torch.tensor(float(group.rank), dtype=dtype), group)
    return [
        started,
        gathered,
        comm.all_reduce(x.clone(), group),
        comm.reduce_scatter(x, group),
        inside,
        scalar,
    ]


def without(group: Group) -> Group:
    """The same ranks, over gloo alone."""
    assert group.communicator is not None
    return replace(group, communicator=Communicator(group.communicator.process_group, group.size))


def compared_with_gloo(config_path: str) -> tuple[bool, list[str]]:
    """Whether memory is shared, and where it differs from gloo."""
    mesh = opened(config_path)
    apart = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64):
        for rows in (1, 7, 5000):  # the last does not fit
            pairs = zip(
                results(mesh.tp, dtype, rows, rows), results(without(mesh.tp), dtype, rows, rows), strict=True
            )
            apart += [
                f"{dtype} {rows} operation {i}"
                for i, (ours, theirs) in enumerate(pairs)
                if not torch.equal(ours, theirs)
            ]
    wire = mesh.tp.communicator
    shared = wire is not None and wire.shared is not None and not wire.carries(torch.empty(5000, 3))
    mesh.close()
    return shared, apart


@pytest.mark.parametrize("world", [2, 4])
def test_the_same_as_gloo(pool: Any, tmp_path: Path, world: int) -> None:
    """Every operation, type and shape that layers use; what does not fit goes by gloo."""
    config = training.write_config(tmp_path, "nothing")
    assert pool.run(world, compared_with_gloo, config) == [(True, [])] * world


def test_sums_are_taken_in_the_order_of_the_ranks() -> None:
    """Ranks whose replicated weights differ in a bit drift apart; PyTorch's own sum over
    a dim does not keep the order.
    """
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for ranks, shape in ((2, (7,)), (5, (3, 5)), (8, (1000,)), (8, (7,))):
            parts = torch.randn(ranks, *shape, generator=torch.Generator().manual_seed(ranks)).to(dtype)
            wide = torch.float32 if dtype == torch.bfloat16 else dtype
            expected = parts[0].to(wide)
            for part in parts[1:]:
                expected = expected + part.to(wide)
            out = torch.empty(shape, dtype=dtype)
            shared_memory.add_up(parts, out)
            assert torch.equal(out, expected.to(dtype)), (dtype, ranks, shape)


def wait_for_others(group: Group) -> None:
    """Returns when all others have begun an operation that this rank has not: they have
    used a slot of its last two again.
    """
    assert group.communicator is not None and group.communicator.shared is not None
    shared = group.communicator.shared
    while any(
        shared.counts[other * shared_memory.LINE + PUBLISHED] <= shared.published for other in shared.others
    ):
        time.sleep(1e-3)


def lagging(config_path: str, careless: bool) -> int:
    """Two operations in flight, one rank late with reading; returns wrong sums.

    `careless`: slots are used again without asking.
    """
    mesh = opened(config_path)
    wait, wrong, lags = SharedMemory._wait, 0, random.Random(mesh.place.rank)

    def unasked(self: SharedMemory, word: int, number: int) -> None:
        if word != READ:
            wait(self, word, number)

    with patch.object(SharedMemory, "_wait", unasked if careless else wait):
        for number in range(ROUNDS):
            x, y = torch.full((50,), float(number)), torch.full((20, 3), 2.0 * number)
            works = [comm.all_reduce_start(x, mesh.tp), comm.all_reduce_start(y, mesh.tp)]
            if mesh.place.rank == number % mesh.tp.size:
                if careless and number + 1 < ROUNDS:
                    wait_for_others(mesh.tp)
                else:
                    time.sleep(0.02 * lags.random())
            for work in works:
                work.wait()
            wrong += int(not (x == number * mesh.tp.size).all()) + int(
                not (y == 2.0 * number * mesh.tp.size).all()
            )
    mesh.close()
    return wrong


def test_a_rank_that_lags_loses_nothing(pool: Any, tmp_path: Path) -> None:
    """And the planted fault: a slot that is written before everybody has read it gives
    some rank a wrong sum.
    """
    config = training.write_config(tmp_path, "nothing")
    assert pool.run(4, lagging, config, False) == [0, 0, 0, 0]
    assert sum(pool.run(4, lagging, config, True)) > 0


def test_a_part_is_kept_until_it_is_read_whatever_was_read_before() -> None:
    """Of two operations in flight the second may be waited for first: the first one's
    slot must not count as read then.
    """
    memory = mmap.mmap(-1, mmap.PAGESIZE * (1 + 2 * shared_memory.SLOTS))
    early, late = (SharedMemory(memory, rank, 2, timeout=0.01) for rank in range(2))
    sums = {
        rank: [torch.full((3,), 10.0 * number + rank.rank) for number in range(3)] for rank in (early, late)
    }
    works = {rank: [rank.all_reduce(x) for x in sums[rank][:2]] for rank in sums}
    for work in works[early]:
        work.wait()
    works[late][1].wait()
    with pytest.raises(dist.DistNetworkError, match="timed out"):
        early.all_reduce(sums[early][2])
    works[late][0].wait()
    third = [rank.all_reduce(x[2]) for rank, x in sums.items()]
    for work in third:
        work.wait()
    assert all(
        torch.equal(x, torch.full((3,), 20.0 * number + 1))
        for own in sums.values()
        for number, x in enumerate(own)
    )


def apart(config_path: str) -> bool:
    """Whether a rank of another machine, or a switch, leaves all with gloo."""
    elsewhere = "elsewhere" if place_from_environment().rank == 1 else shared_memory.machine()
    with patch.object(shared_memory, "machine", lambda: elsewhere):
        mesh = opened(config_path)
    wire = mesh.tp.communicator
    mesh.close()
    return wire is not None and wire.shared is None


def test_ranks_of_two_machines_use_the_network(pool: Any, tmp_path: Path) -> None:
    assert pool.run(2, apart, training.write_config(tmp_path, "nothing")) == [True, True]


def misled(config_path: str, folder: str) -> dict[str, bool]:
    """By what the store names in place of a peer's memory: whether anything is shared then, or
    whatever it names was touched.
    """
    mesh = opened(config_path)
    assert mesh.store is not None and mesh.tp.process_group is not None
    slot, rank = mmap.PAGESIZE, mesh.tp.rank
    total = mmap.PAGESIZE + shared_memory.SLOTS * mesh.tp.size * slot
    content = b"\1" * total
    victim = Path(folder) / f"victim{rank}"
    victim.write_bytes(content)
    (Path(folder) / f"memfd:megacore {rank}").write_bytes(content)
    memory = {name: os.memfd_create(name, os.MFD_ALLOW_SEALING) for name in ("megacore", "other")}
    for descriptor in memory.values():
        os.write(descriptor, content)
    larger = os.memfd_create("megacore", os.MFD_ALLOW_SEALING)
    os.truncate(larger, 2 * total)
    fcntl.fcntl(larger, fcntl.F_ADD_SEALS, shared_memory.SEALS)
    disguised = os.open(Path(folder) / f"memfd:megacore {rank}", os.O_RDWR)
    named = {
        "a file": str(victim),
        "a file that is open": f"/proc/self/fd/{os.open(victim, os.O_RDWR)}",
        "a file of that name": f"/proc/{os.getpid()}/fd/{disguised}",
        "memory that can shrink": f"/proc/{os.getpid()}/fd/{memory['megacore']}",
        "other memory": f"/proc/{os.getpid()}/fd/{memory['other']}",
        "memory of another size": f"/proc/{os.getpid()}/fd/{larger}",
        "a way out": f"/proc/{os.getpid()}/fd/../../..{victim}",
        "nothing": "",
    }
    found = {}
    for what, path in named.items():
        store = Mock(get=lambda key, path=path: f"{shared_memory.machine()} {path}".encode())
        shared = shared_memory.join(
            mesh.tp.process_group, "key", rank, mesh.tp.size, slot, store, timeout=PATIENCE
        )
        files = [victim, *(f"/proc/self/fd/{each}" for each in (disguised, *memory.values()))]
        found[what] = shared is not None or any(Path(file).read_bytes() != content for file in files)
    mesh.close()
    return found


def test_memory_of_a_peer_and_nothing_else_is_mapped(pool: Any, tmp_path: Path) -> None:
    """Whoever reaches the store of a run may name what they like: a file of this
    user's would be written over.
    """
    for found in pool.run(2, misled, training.write_config(tmp_path, "nothing"), str(tmp_path)):
        assert len(found) == 8 and not any(found.values()), found


def test_only_a_process_of_the_same_user_is_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = os.memfd_create(shared_memory.NAME, os.MFD_ALLOW_SEALING)
    os.truncate(descriptor, mmap.PAGESIZE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, shared_memory.SEALS)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    os.close(shared_memory.open_peers(path, mmap.PAGESIZE))
    with monkeypatch.context() as patched, pytest.raises(PermissionError):
        patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        shared_memory.open_peers(path, mmap.PAGESIZE)
    os.close(descriptor)


def alone_with(process: int, timeout: float = PATIENCE) -> SharedMemory:
    """Rank 0 of 2, whose other rank is said to be `process`."""
    memory = SharedMemory(mmap.mmap(-1, 3 * mmap.PAGESIZE), 0, 2, timeout=timeout)
    memory.counts[shared_memory.LINE + PROCESS] = process
    return memory


def test_a_dead_rank_is_not_waited_for() -> None:
    """gloo would say that the connection is closed; without a word the others would
    wait until the timeout.
    """
    ended = subprocess.Popen(["true"])
    ended.wait()
    for memory, words in (
        (alone_with(ended.pid), "connection closed"),
        (alone_with(os.getpid(), timeout=0.5), "timed out"),
    ):
        with pytest.raises(dist.DistNetworkError, match=words) as caught:
            memory.all_reduce(torch.ones(3)).wait()
        assert lost_peer(caught.value)


def test_a_rank_that_waits_soon_leaves_its_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine another program wants it, or the very rank that is waited for; who only
    yields is queued behind all others.
    """
    memory = alone_with(os.getpid())
    counts, looks = memory.counts, 0

    class Counted:
        def __getitem__(self, index: int) -> int:
            nonlocal looks
            looks += 1
            return counts[index]

        def __setitem__(self, index: int, value: int) -> None:
            counts[index] = value

    def sleep(seconds: float) -> None:
        assert 0 < seconds < 1e-3 and looks < 300
        counts[shared_memory.LINE + PUBLISHED] = 1

    memory.counts = Counted()  # type: ignore[assignment]
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(os, "sched_yield", pytest.fail)
    memory.all_reduce(torch.ones(3)).wait()
    assert looks > 100, "a peer that is a few microseconds late costs a sleep"


def test_a_third_operation_in_flight_is_refused() -> None:
    """It would wait for this very rank to read the first."""
    memory = alone_with(os.getpid())
    handles = [memory.all_reduce(torch.ones(3)) for _ in range(2)]
    with pytest.raises(RuntimeError, match="operation 1 is not waited for"):
        memory.all_reduce(torch.ones(3))
    memory.counts[shared_memory.LINE + PUBLISHED] = memory.counts[shared_memory.LINE + READ] = 2
    for handle in handles:
        handle.wait()
    memory.all_reduce(torch.ones(3))
