"""Contenders that take turns: each in its own processes, which stay alive and sleep while the others run."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Contender:
    """How to start a contender, and how many tokens it trains on in a turn. `kind`: see `benchmarks.contender`."""

    name: str
    kind: str
    tokens: int
    overrides: tuple[str, ...] = ()
    ranks: int = 1
    threads: int = 1
    apart: bool = False  # the ranks are runs of their own, which only share the machine


@dataclass
class Record:
    """What a contender did: for every turn, each measured duration, of the slowest rank."""

    contender: Contender
    turns: list[list[float]] = field(default_factory=list)
    memory_bytes: int = 0  # peak, of the largest rank

    @property
    def seconds(self) -> list[float]:
        """Of every turn's step."""
        return [turn[0] for turn in self.turns]

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        speeds = [self.contender.tokens / s for s in self.seconds]
        return {
            "processes": self.contender.ranks,
            "threads": self.contender.threads,
            "overrides": list(self.contender.overrides),
            "tokens_a_step": self.contender.tokens,
            "seconds": self.turns,
            "tokens_per_second": {"median": median(speeds), "lowest": min(speeds), "highest": max(speeds)},
            "memory_bytes": self.memory_bytes,
        }


class Processes:
    """A contender's ranks, started and waiting."""

    def __init__(self, contender: Contender, config: str) -> None:
        self.contender = contender
        command = [sys.executable, "-m", "benchmarks.contender", contender.kind, config, *contender.overrides]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.ranks = []
        for rank in range(contender.ranks):
            env = os.environ | {"OMP_NUM_THREADS": str(contender.threads), "PYTHONPATH": str(ROOT), "MASTER_PORT": str(port)}
            number, world = (0, 1) if contender.apart else (rank, contender.ranks)
            env |= {"RANK": str(number), "LOCAL_RANK": str(number), "MASTER_ADDR": "127.0.0.1"}
            env |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
            self.ranks.append(subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

    def answers(self) -> list[str]:
        """A line of every rank; raises `RuntimeError` when one has ended."""
        lines = []
        for process in self.ranks:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"{self.contender.name} ended with status {process.wait()}")
            lines.append(line)
        return lines

    def turn(self) -> tuple[list[float], int]:
        """Lets all ranks take a step: the slowest rank's durations, the largest rank's peak memory."""
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        answers = [json.loads(line) for line in self.answers()]
        durations = [max(values) for values in zip(*(a["seconds"] for a in answers), strict=True)]
        return durations, max(a["memory_bytes"] for a in answers)

    def end(self) -> None:
        """Ends the ranks, whatever they are doing."""
        for process in self.ranks:
            process.kill()
            process.communicate()


@contextmanager
def started(contenders: Sequence[Contender], config: str) -> Iterator[list[Processes]]:
    """The contenders' processes, ready; ended when the block is left."""
    running: list[Processes] = []
    try:
        for contender in contenders:
            running.append(Processes(contender, config))
            running[-1].answers()  # one after the other: building takes cores too
        yield running
    finally:
        for processes in running:
            processes.end()


def race(
    contenders: Sequence[Contender],
    config: str,
    rounds: int,
    say: Callable[[str], None],
    rivals: Sequence[str] = (),
) -> tuple[dict[str, Record], list[list[float]]]:
    """Two warm-up turns each, then `rounds` rounds of one turn each, in alternating order.

    Of the contenders named in `rivals` only the one that was fastest in its second warm-up turn goes on.
    Returns the records by name, and the machine's load averages before each round.
    """
    say("starting " + ", ".join(c.name for c in contenders))
    with started(contenders, config) as running:
        warm = {p.contender.name: [p.turn()[0][0] for _ in range(2)][1] for p in running}
        say("warm-up: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in warm.items()))
        slower = set(rivals) - {min(rivals, key=lambda name: warm[name])} if rivals else set()
        racing = [p for p in running if p.contender.name not in slower]
        records = {p.contender.name: Record(p.contender) for p in racing}
        loads = []
        for number in range(1, rounds + 1):
            loads.append(list(os.getloadavg()))
            say(f"round {number} of {rounds}; load average of the last minute {loads[-1][0]:.2f} on {os.cpu_count()} cores")
            for processes in racing[:: 1 if number % 2 else -1]:
                durations, memory = processes.turn()
                record = records[processes.contender.name]
                record.turns.append(durations)
                record.memory_bytes = max(record.memory_bytes, memory)
        return records, loads
