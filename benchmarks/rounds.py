"""Contenders that take turns: each in its own processes, which stay alive and sleep while the others run."""

import json
import os
import re
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.peers.process import OWN, difference

ROOT = Path(__file__).resolve().parents[1]
LAST_WORDS = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Killed)\b.*")


@dataclass(frozen=True)
class Contender:
    """How to start a contender, and how many tokens it trains on in a turn. `kind`, `settings`: see `benchmarks.contender`."""

    name: str
    kind: str
    tokens: int
    overrides: tuple[str, ...] = ()
    ranks: int = 1
    threads: int = 1
    apart: bool = False  # the ranks are runs of their own, which only share the machine
    python: str = sys.executable
    checkout: Path = ROOT  # whose benchmarks and megacore it runs
    settings: str = OWN
    process: dict[str, Any] | None = None  # what its processes must turn out to have set (`benchmarks.peers.process`), if that matters


@dataclass
class Record:
    """What a contender did: for every turn, each measured duration, of the slowest rank."""

    contender: Contender
    turns: list[list[float]] = field(default_factory=list)
    memory_bytes: int = 0  # peak, of the largest rank
    others: list[float] = field(default_factory=list)  # for every turn, cores that were busy with something else
    losses: list[float] = field(default_factory=list)  # for every turn, the mean of what its ranks say, if they do
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


class Processes:
    """A contender's ranks, started and waiting."""

    def __init__(self, contender: Contender, config: str, limit: float) -> None:
        self.contender, self.limit = contender, limit  # seconds for a turn
        command = [contender.python, "-m", "benchmarks.contender", contender.kind, config, *contender.overrides]
        command += ["--settings", contender.settings]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.process: dict[str, Any] = {}
        self.ranks, self.complaints = [], tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `end`)
        for rank in range(contender.ranks):
            env = os.environ | {"OMP_NUM_THREADS": str(contender.threads), "PYTHONPATH": str(contender.checkout), "MASTER_PORT": str(port)}
            number, world = (0, 1) if contender.apart else (rank, contender.ranks)
            env |= {"RANK": str(number), "LOCAL_RANK": str(number), "MASTER_ADDR": "127.0.0.1"}
            env |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, cwd=contender.checkout, env=env, stdin=pipe, stdout=pipe, stderr=self.complaints, text=True)
            self.ranks.append(process)

    def wait_until_ready(self) -> None:
        """All ranks are built, and `process` says what theirs have set. Raises `Failed` where that is not what it must be."""
        states = [answer["process"] for answer in self.answers()]
        for state in states:
            if reason := difference(state, states[0] if self.contender.process is None else self.contender.process):
                raise Failed(reason)
        self.process = states[0]

    def answers(self) -> list[dict[str, Any]]:
        """Of every rank; raises `Failed` when one has none, or none in time."""
        deadline, answers = time.monotonic() + self.limit, []
        for process in self.ranks:
            assert process.stdout is not None
            if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise Failed(f"no answer in {self.limit:.0f} s")
            line = process.stdout.readline()
            if not line:
                raise Failed(f"status {process.wait()}: {self.last_words()}")
            answers.append(json.loads(line))
            if "failed" in answers[-1]:
                raise Failed(answers[-1]["failed"])
        return answers

    def last_words(self) -> str:
        """The line of what the ranks wrote to stderr that most likely says why they ended."""
        self.complaints.seek(0)
        lines = [line.strip() for line in self.complaints if line.strip()]
        return next((line for line in reversed(lines) if LAST_WORDS.match(line)), lines[-1] if lines else "said nothing")

    def turn(self, record: Record) -> None:
        """Lets all ranks take a step, and adds it to the record."""
        machine, own, started = busy_seconds(), self.cpu_seconds(), time.monotonic()
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        answers = self.answers()
        others = (busy_seconds() - machine) - (self.cpu_seconds() - own)
        record.turns.append([max(values) for values in zip(*(a["seconds"] for a in answers), strict=True)])
        record.memory_bytes = max(record.memory_bytes, *(a["memory_bytes"] for a in answers))
        record.others.append(max(0.0, others / (time.monotonic() - started)))
        record.losses += [mean(said)] if (said := [a["loss"] for a in answers if a["loss"] is not None]) else []

    def cpu_seconds(self) -> float:
        """What the ranks have used so far, in user and system."""
        used = 0.0
        for process in self.ranks:
            path = Path(f"/proc/{process.pid}/stat")
            if path.is_file():
                fields = path.read_text().rpartition(")")[2].split()
                used += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return used

    def end(self) -> None:
        """Ends the ranks, whatever they are doing."""
        for process in self.ranks:
            process.kill()
            process.communicate()
        self.complaints.close()


def busy_seconds() -> float:
    """What all cores together have worked since the machine started, for whomever, stolen time included; 0 where Linux does not say."""
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

    Of each group of contenders in `rivals` only the one that was fastest in its second warm-up turn goes on. Who fails is out,
    with the reason; a turn, or a start, that takes longer than `limit` seconds is a failure.
    """
    say("starting " + ", ".join(c.name for c in contenders))
    result = Race()
    running: dict[str, Processes] = {}
    warm: dict[str, float] = {}

    def failed(name: str, reason: Failed) -> None:
        result.failures[name] = str(reason)
        result.records.pop(name, None)
        running.pop(name).end()
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
                running.pop(name).end()
        result.records = {name: Record(processes.contender, process=processes.process) for name, processes in running.items()}
        for number in range(1, rounds + 1):
            result.loads.append(list(os.getloadavg()))
            say(f"round {number} of {rounds}; load average of the last minute {result.loads[-1][0]:.2f} on {os.cpu_count()} cores")
            for name in list(running)[:: 1 if number % 2 else -1]:
                try:
                    running[name].turn(result.records[name])
                except Failed as reason:
                    failed(name, reason)
        return result
    finally:
        for processes in running.values():
            processes.end()
