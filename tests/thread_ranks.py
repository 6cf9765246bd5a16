"""Ranks that are threads of one process: saving and reading checkpoints takes no process group."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.pool import PATIENCE


@dataclass
class Meeting:
    """Where threads exchange values."""

    world: int

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.world, timeout=PATIENCE)
        self.values: list[Any] = [None] * self.world

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


@dataclass
class ThreadRanks:
    """`checkpoint.Ranks` of a thread."""

    rank: int
    meeting: Meeting

    @property
    def world(self) -> int:
        return self.meeting.world

    def first(self, text: str) -> str:
        return next(filter(None, self.meeting.exchange(self.rank, text)), "")

    def total(self, number: int) -> int:
        return sum(self.meeting.exchange(self.rank, number))

    def share(self, content: bytes) -> bytes:
        return self.meeting.exchange(self.rank, content)[0]


def run_threads(world: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """`work` on so many ranks at once; their results, or the first rank's error."""
    meeting = Meeting(world)

    def on(rank: int) -> Any:
        try:
            return work(ThreadRanks(rank, meeting))
        except BaseException:
            meeting.barrier.abort()  # as a launcher ends the other ranks
            raise

    with ThreadPoolExecutor(world) as threads:
        futures = [threads.submit(on, rank) for rank in range(world)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next(
            (error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0]
        )
    return [future.result() for future in futures]
