"""Sums and gathers over ranks of one machine through shared memory. gloo's sockets
would take several times as long.

Each rank copies its part into its slot, and then raises its count of published parts. A rank that sees the
counts of all others reads their parts. A slot is used again when every rank has read it; nearly always that
is so before the slot is needed.
"""

import contextlib
import fcntl
import mmap
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.distributed.processes import ENDED, process_state

SLOTS = 2  # an operation may begin before the one before is finished
LARGEST_SLOT = 64 * 2**20  # bytes: for larger tensors sockets are as fast
LINE = 8  # words from one rank's counts to the next: a cache line
PUBLISHED, READ, PROCESS = range(3)  # a rank's words: operations begun, operations read, its process id
# looks at a count, some 10 µs, before a rank sleeps: another program, or the very rank it waits for, may want
# its core
SPINS = 200
PAUSE = 50e-6  # seconds between looks from then on
NAME = "megacore"  # the memory file's name in /proc
# its size stays
SEALS = 0 if sys.platform != "linux" else fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
PATIENCE = 0.2  # seconds between checks whether the other processes live


class SharedMemory:
    """One rank's view of the memory that `size` ranks map.

    Operations begin in the same order on every rank, and in one thread.
    """

    def __init__(self, memory: mmap.mmap, rank: int, size: int, *, timeout: float) -> None:
        """`timeout`: seconds."""
        self.rank, self.size, self.timeout = rank, size, timeout
        self.counts = memoryview(memory)[: mmap.PAGESIZE].cast("q")
        self.slot_bytes = (len(memory) - mmap.PAGESIZE) // (SLOTS * size)
        data = torch.frombuffer(memory, dtype=torch.uint8, offset=mmap.PAGESIZE)
        self.slots = data.view(SLOTS, size, self.slot_bytes)
        self.views: dict[tuple[int, torch.dtype, torch.Size], Tensor] = {}
        self.others = [other for other in range(size) if other != rank]
        self.published = 0
        self.begun: set[int] = set()  # operations that this rank has not read yet
        self.counts[rank * LINE + PROCESS] = os.getpid()

    def carries(self, x: Tensor) -> bool:
        """Whether `x` fits; the same on every rank."""
        return x.numel() * x.element_size() <= self.slot_bytes

    def all_reduce(self, x: Tensor) -> "Parts":
        """Begins to sum `x` in place. Until `wait` returns, `x` may be read but not written."""
        return self._publish(x, lambda parts: add_up(parts, x))

    def reduce_scatter(self, x: Tensor, out: Tensor) -> "Parts":
        """Begins to sum `[size · n, …]`; this rank's `[n, …]` of the sum goes to `out`,
        which may lie in `x`.
        """
        own = slice(self.rank * len(out), (self.rank + 1) * len(out))
        return self._publish(x, lambda parts: add_up(parts[:, own], out))

    def all_gather(self, x: Tensor, out: Tensor) -> "Parts":
        """Begins to gather `[n, …]` into `[size · n, …]`; `x` may lie in `out`."""
        return self._publish(x, lambda parts: out.view(parts.shape).copy_(parts))

    def _publish(self, x: Tensor, finish: Callable[[Tensor], object]) -> "Parts":
        number = self.published + 1
        reused = number - SLOTS
        if reused in self.begun:
            raise RuntimeError(
                f"operation {reused} is not waited for, and {SLOTS} more begin: its slot would be lost"
            )
        self._wait(READ, reused)
        key = (number % SLOTS, x.dtype, x.shape)
        if key not in self.views:
            size = x.numel() * x.element_size()
            with torch.inference_mode(False):  # a view made inside could not be written outside
                self.views[key] = self.slots[key[0], :, :size].view(x.dtype).unflatten(1, x.shape or (1,))
        parts = self.views[key]
        parts[self.rank].copy_(x.detach())
        self.published = number
        self.begun.add(number)
        # after the copy: other cores see this processor's stores in order
        self.counts[self.rank * LINE + PUBLISHED] = number
        return Parts(self, number, parts, finish)

    def finished(self, number: int) -> None:
        """Notes that this rank has read all parts of an operation."""
        self.begun.discard(number)
        self.counts[self.rank * LINE + READ] = min(self.begun, default=self.published + 1) - 1

    def wait_for(self, number: int) -> None:
        """Returns when every rank has published its part of an operation."""
        self._wait(PUBLISHED, number)

    def _wait(self, word: int, number: int) -> None:
        counts = self.counts
        for other in self.others:
            index = other * LINE + word
            for _ in range(SPINS):
                if counts[index] >= number:
                    break
            else:
                self._sleep_until(index, number)

    def _sleep_until(self, index: int, number: int) -> None:
        counts, start = self.counts, time.monotonic()
        asked = start
        while counts[index] < number:
            time.sleep(PAUSE)
            now = time.monotonic()
            if now - asked > PATIENCE:
                asked = now
                for other in self.others:
                    if process_state(counts[other * LINE + PROCESS]) in ENDED and counts[index] < number:
                        raise dist.DistNetworkError(
                            f"connection closed: the process of rank {other} of the group is gone"
                        )
            if now - start > self.timeout:
                raise dist.DistNetworkError(
                    f"timed out: a rank of the group has not come for {self.timeout:g} s"
                )


class Parts:
    """The handle of an operation that has begun."""

    __slots__ = ("finish", "memory", "number", "parts")

    def __init__(
        self, memory: SharedMemory, number: int, parts: Tensor, finish: Callable[[Tensor], object]
    ) -> None:
        self.memory, self.number, self.parts, self.finish = memory, number, parts, finish

    def wait(self) -> None:
        """Waits for all parts and writes the result."""
        self.memory.wait_for(self.number)
        with torch.no_grad():
            self.finish(self.parts)
        self.memory.finished(self.number)


def add_up(parts: Tensor, out: Tensor) -> None:
    """Sums over the first dim, in the order of the ranks. 16-bit numbers are summed in
    fp32 and rounded once.
    """
    out = out.detach()
    if len(parts) == 2:
        torch.add(parts[0].view_as(out), parts[1].view_as(out), out=out)
        return
    # One after the other: PyTorch's sum over a dim takes another order at the ends of vectors, so ranks with
    # more threads would differ.
    wide = torch.float32 if out.dtype in (torch.float16, torch.bfloat16) else out.dtype
    total = parts[0].view_as(out).to(wide, copy=True)
    for part in parts[1:]:
        total += part.view_as(out)
    out.copy_(total)


def join(
    group: dist.ProcessGroup,
    key: str,
    rank: int,
    size: int,
    slot_bytes: int,
    store: dist.Store,
    *,
    timeout: float,
) -> SharedMemory | None:
    """Maps memory that the ranks of a group share; collective.

    Returns None on every rank if any of them cannot: on another machine or in another container, on a
    processor that does not keep the order of stores, or without memory. The file has no name.

    Anybody who reaches the store could name any file. Only a file that a process of this user made here is
    mapped (`open_peers`).
    """
    slot_bytes = -(-min(slot_bytes, LARGEST_SLOT) // mmap.PAGESIZE) * mmap.PAGESIZE
    total = mmap.PAGESIZE + SLOTS * size * slot_bytes
    able = sys.platform == "linux" and platform.machine() == "x86_64" and size * LINE * 8 <= mmap.PAGESIZE
    memory = None
    with contextlib.ExitStack() as opened:
        if rank == 0:
            found = "none"
            if able:
                with contextlib.suppress(OSError):
                    descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                    opened.callback(os.close, descriptor)
                    os.posix_fallocate(descriptor, 0, total)
                    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
                    found = f"{machine()} /proc/{os.getpid()}/fd/{descriptor}"
            store.set(key, found)
        found = store.get(key).decode()
        if able and found.startswith(machine() + " "):
            with contextlib.suppress(OSError):
                descriptor = open_peers(found.split(" ", 1)[1], total)
                opened.callback(os.close, descriptor)
                memory = mmap.mmap(descriptor, total)
        vote = torch.tensor(int(memory is not None))
        dist.all_reduce(vote, dist.ReduceOp.MIN, group=group)  # all have opened it, or will not
    if memory is None or not vote:
        return None
    shared = SharedMemory(memory, rank, size, timeout=timeout)
    dist.barrier(group=group)  # all process ids are written before anybody reads one
    return shared


def open_peers(path: str, size: int) -> int:
    """Opens the memory of `size` bytes that a peer has made.

    Raises:
        OSError: `path` is not a memory file of that size that `join` made, open in a process of this user.
    """
    found = re.fullmatch(r"/proc/([0-9]+)/fd/[0-9]+", path)
    if (
        found is None
        or os.stat(f"/proc/{found[1]}").st_uid != os.geteuid()
        or not os.readlink(path).startswith(f"/memfd:{NAME} ")
    ):
        raise PermissionError(f"{path} is no memory of a peer")
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        # Only a memory file can have these seals, which keep everybody from removing pages that others have
        # mapped.
        if (
            status.st_uid != os.geteuid()
            or status.st_size != size
            or fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) != SEALS
        ):
            raise PermissionError(f"{path} is no memory of a peer, of {size} bytes")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def machine() -> str:
    """A text that is equal for ranks that can see each other's files and processes."""
    with contextlib.suppress(OSError):
        namespaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "mnt")]
        return (
            f"{socket.gethostname()}:{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
            f":{namespaces}"
        ).replace(" ", "")
    return f"{socket.gethostname()}:{os.getpid()}"  # only itself
