"""Contenders that take turns: each in its own processes, which stay alive and sleep while the others run."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.peers.process import OWN, difference
from megacore.tools.crowd import SPIN_COUNT
from megacore.tools.local_ranks import free_port, rank_environment
from megacore.tools.verify.line_workers import LineWorker, WorkerFailed, Workers

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Contender:
    """How to start a contender, and how many tokens it trains on in a turn.

    `kind`, `settings`: see `benchmarks.contender`.
    """

    name: str
    kind: str
    tokens: int
    overrides: tuple[str, ...] = ()
    ranks: int = 1
    threads: int | None = 1  # None: as many as it takes by itself
    apart: bool = False  # the ranks are runs of their own, which only share the machine
    python: str = sys.executable
    checkout: Path = ROOT  # whose benchmarks and megacore it runs
    settings: str = OWN
    environment: Mapping[str, str] = field(default_factory=dict)  # variables of its own
    config: str | None = None  # a file of its own
    # what its processes must turn out to have set (`benchmarks.peers.process`), if that matters
    process: dict[str, Any] | None = None


@dataclass
class Record:
    """What a contender did: for every turn, each measured duration, of the slowest rank."""

    contender: Contender
    turns: list[list[float]] = field(default_factory=list)
    memory_bytes: int = 0  # peak, of the largest rank
    # for every turn, cores that were busy with something else
    others: list[float] = field(default_factory=list)
    # for every turn, the mean of what its ranks say, if they do
    losses: list[float] = field(default_factory=list)
    process: dict[str, Any] = field(default_factory=dict)  # what its processes have set, by their own account

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
            "process": self.process,
            "overrides": list(self.contender.overrides),
            "tokens_a_step": self.contender.tokens,
            "seconds": self.turns,
            "tokens_per_second": {"median": median(speeds), "lowest": min(speeds), "highest": max(speeds)},
            "memory_bytes": self.memory_bytes,
            "cores_busy_with_others": self.others,
            "losses": self.losses,
        }


@dataclass
class Race:
    """Who ran, who could not and why, and the machine's load averages before each round."""

    records: dict[str, Record] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    loads: list[list[float]] = field(default_factory=list)


class Failed(RuntimeError):
    """A contender that could not be built or ended; the message is its own reason."""


class Rank(LineWorker):
    """One process of `benchmarks.contender`."""

    def receive(self) -> dict[str, Any]:
        """See `LineWorker`; what it cannot do it answers as `failed`, and an
        earlier megacore's contender so too.
        """
        answer = super().receive()
        return {"error": answer["failed"]} if "failed" in answer else answer


class Processes(Workers):
    """A contender's ranks, started and waiting."""

    def __init__(self, contender: Contender, config: str, limit: float) -> None:
        self.contender, self.limit = contender, limit  # seconds for a turn
        command = [
            contender.python,
            "-m",
            "benchmarks.contender",
            contender.kind,
            contender.config or config,
            *contender.overrides,
        ]
        command += ["--settings", contender.settings]
        path = os.pathsep.join([str(contender.checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment: dict[str, str | None] = {
            "OMP_NUM_THREADS": str(contender.threads) if contender.threads else None,
            "OMP_WAIT_POLICY": None,
            SPIN_COUNT: None,
            "PYTHONPATH": path,
            **contender.environment,
        }
        self.process: dict[str, Any] = {}
        port = free_port()

        def start(rank: int) -> Rank:
            place = (0, 1, port) if contender.apart else (rank, contender.ranks, port)
            return Rank(command, contender.checkout, environment | rank_environment(*place))

        super().__init__(start)

    def wait_until_ready(self) -> None:
        """All ranks are built, and `process` says what theirs have set.

        Raises `Failed` where that is not what it must be.
        """
        states = [
            answer["process"] for answer in self.answered(lambda: self.grow(self.contender.ranks, self.limit))
        ]
        for state in states:
            if reason := difference(
                state, states[0] if self.contender.process is None else self.contender.process
            ):
                raise Failed(reason)
        self.process = states[0]

    def answered(self, asked: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """The answers of every rank; raises `Failed` when one has none, or none in time."""
        try:
            return asked()
        except WorkerFailed as failure:
            raise Failed(
                failure.answer["error"] if failure.answer else f"no answer in {self.limit:.0f} s"
            ) from None

    def turn(self, record: Record) -> None:
        """Lets all ranks take a step, and adds it to the record."""
        machine, own, started = busy_seconds(), self.cpu_seconds(), time.monotonic()
        answers = self.answered(lambda: self.ask([None] * len(self.running), self.limit))
        others = (busy_seconds() - machine) - (self.cpu_seconds() - own)
        record.turns.append([max(values) for values in zip(*(a["seconds"] for a in answers), strict=True)])
        record.memory_bytes = max(record.memory_bytes, *(a["memory_bytes"] for a in answers))
        record.others.append(max(0.0, others / (time.monotonic() - started)))
        record.losses += (
            [mean(said)] if (said := [a["loss"] for a in answers if a["loss"] is not None]) else []
        )

    def cpu_seconds(self) -> float:
        """What the ranks have used so far, in user and system."""
        used = 0.0
        for rank in self.running:
            path = Path(f"/proc/{rank.process.pid}/stat")
            if path.is_file():
                fields = path.read_text().rpartition(")")[2].split()
                used += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return used


def busy_seconds() -> float:
    """What all cores together have worked since the machine started, for whomever, stolen time
    included; 0 where Linux does not say.
    """
    path = Path("/proc/stat")
    if not path.is_file():
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, path.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def race(
    contenders: Sequence[Contender],
    config: str,
    rounds: int,
    say: Callable[[str], None],
    rivals: Sequence[Sequence[str]] = (),
    limit: float = 1800.0,
) -> Race:
    """Two warm-up turns each, then `rounds` rounds of one turn each, in alternating order.

    Of each group of contenders in `rivals` only the one that was fastest in its second warm-up turn goes on.
    Who fails is out, with the reason; a turn, or a start, that takes longer than `limit` seconds is a
    failure.
    """
    say("starting " + ", ".join(c.name for c in contenders))
    result = Race()
    running: dict[str, Processes] = {}
    warm: dict[str, float] = {}

    def failed(name: str, reason: Failed) -> None:
        result.failures[name] = str(reason)
        result.records.pop(name, None)
        running.pop(name).close()
        say(f"{name} cannot run: {reason}")

    try:
        for contender in contenders:
            running[contender.name] = processes = Processes(contender, config, limit)
            try:
                processes.wait_until_ready()  # one after the other: building takes cores too
                record = Record(contender)
                for _ in range(2):
                    processes.turn(record)
                warm[contender.name] = record.seconds[-1]
            except Failed as reason:
                failed(contender.name, reason)
        say("warm-up: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in warm.items()))
        for group in rivals:
            for name in sorted((name for name in group if name in warm), key=lambda name: warm[name])[1:]:
                running.pop(name).close()
        result.records = {
            name: Record(processes.contender, process=processes.process)
            for name, processes in running.items()
        }
        for number in range(1, rounds + 1):
            result.loads.append(list(os.getloadavg()))
            say(
                f"round {number} of {rounds}; load average of the last minute {result.loads[-1][0]:.2f} "
                f"on {os.cpu_count()} cores"
            )
            for name in list(running)[:: 1 if number % 2 else -1]:
                try:
                    running[name].turn(result.records[name])
                except Failed as reason:
                    failed(name, reason)
        return result
    finally:
        for processes in running.values():
            processes.close()
