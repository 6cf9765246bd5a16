"""The process beside a host's ranks that exchanges heartbeats with other hosts, and ends
its ranks when a host is lost.

It is a process of its own, because a rank may be stopped, or hold the interpreter for longer than a host may
be silent. A rank connects to it through a socket that the kernel closes when the rank ends in any way
(`heartbeat_client.HeartbeatClient`).

All hosts send to one, rank 0's, which answers each: a thousand hosts are a thousand small datagrams a beat. A
ring would be cheaper for that host, but the news of a loss would have to travel around it, past the loss; and
a run that has lost rank 0's host has lost the store. No host's clock is compared with another's, and beats
are counted instead of seconds: who was suspended has not missed any. Nothing that anybody sends ends the
watch, or keeps it from beating (`beats` says what is read at all).
Standard library only: the process takes a few MB.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from megacore.distributed.processes import STOPPED, process_state
from megacore.tools.diagnosis.beats import (
    MOST_BYTES,
    MOST_LISTED,
    Beat,
    Failure,
    RankStates,
    behind_token,
    keep_out,
    open_datagrams,
    resolve,
    same_user,
    unpacked,
)
from megacore.tools.diagnosis.failure_note import FailureNote

BEATS = 10  # a host that has missed so many in a row is lost
FEW = 3  # missed beats, after which a host counts as quiet
STOPPED_BEATS = (
    2  # in a row in which a rank is stopped: a profiler that attaches for a moment is not reported
)
GRACE_BEATS = 4  # for ranks that have lost their peer to say so and end: they know more
END_BEATS = 3  # for a rank to end by itself before it is killed
NEVER_SECONDS = 60.0  # without a first answer, after which somebody is told
PARTING = 3  # datagrams that tell the end: some may be lost
# datagrams that are read before it looks at the time again: strangers may send faster than it reads
AT_ONCE = 256
UNNAMED = 64  # connections that have not said who they are; of more, the oldest is closed
LINE_BYTES = 4096  # more than any line of a rank has
# after something that failed: if it fails again and again, it must not take the whole core
FAULT_SECONDS = 0.01


@dataclass
class Host:
    """Another host, as this one knows it."""

    name: str
    ranks: list[int]
    address: Any
    missed: int = 0  # beats in a row
    open: list[int] = field(default_factory=list)  # ranks that have not ended
    gone: dict[int, int] = field(default_factory=dict)  # beats since a rank ended without a farewell
    stopped: list[int] = field(default_factory=list)  # ranks that are stopped


@dataclass
class RankConnection:
    """A connection to a rank of this host."""

    connection: socket.socket
    rank: int = -1  # it has not said yet
    pid: int = 0
    received: bytes = b""
    stopped: int = 0  # beats in a row in which its process was stopped


class Heartbeat:
    """One host's process.

    `run` returns when all ranks of this host have ended, and others need no answer any more.
    """

    def __init__(
        self, name: str, token: str, seconds: float, world_size: int, note: FailureNote | None
    ) -> None:
        """`name`: the host's.

        `token`: the run's, which others do not know. A host that is silent for `seconds` is lost. `note`:
        where the reason for the end of the run is recorded, None for a program that keeps no such record.
        """
        self.name, self.token, self.beat = name, token.encode(), seconds / BEATS
        self.world_size, self.note = world_size, note
        self.seats: list[RankConnection] = []
        self.ranks: list[int] = []  # all that have ever been here
        self.gone: dict[int, int] = {}
        self.stopped: list[int] = []
        self.states: RankStates | None = None  # of all hosts' ranks; None before rank 0's host is heard
        self.failure: Failure | None = None  # the first one
        self.failed_at = 0  # the beat at which it was learned
        self.killed_rank: int | None = None  # the rank that `failure` is about, if that is a guess
        self.hosts: dict[str, Host] = {}  # by address; those that beat to this one, if it is rank 0's
        self.hub: Host | None = None  # rank 0's host, if that is another
        self.heard = self.warned = False  # from the hub; whether it was said that it has never been heard
        self.faults = 0  # messages that were dropped, though their sender knew the token
        self.beats = self.ending = 0  # since the start; since the verdict
        self.verdict = ""
        self.messages: dict[bool, bytes] = {}  # what is sent to all, until something has changed
        self.door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.door.bind("")  # the kernel gives it a name that is in no folder
        self.door.listen(1024)
        self.datagrams = open_datagrams()
        keep_out(self.datagrams, self.token)
        self.port: int = self.datagrams.getsockname()[1]
        self.selector = selectors.DefaultSelector()
        for each, method in ((self.door, self._accept), (self.datagrams, self._receive)):
            each.setblocking(False)
            self.selector.register(each, selectors.EVENT_READ, method)

    @property
    def is_hub(self) -> bool:
        """Whether rank 0 is here."""
        return 0 in self.ranks

    def run(self) -> None:
        """Beats until the end."""
        due = time.monotonic() + self.beat
        while not self._over():
            due = self._turn(due)
        self._finish()

    def _finish(self) -> None:
        """Record a failure for which there was no verdict, because all ranks ended too soon, and part."""
        if self.is_hub and not self.verdict and self.failure is not None:
            self._record(self.failure.reason, is_decision=True)
        if self.is_hub or not self.verdict:
            self.part()

    def _turn(self, due: float) -> float:
        """Takes messages until the beat that is `due`, and does that; returns when the next one is due."""
        for key, _ in self.selector.select(max(0.0, due - time.monotonic())):
            self._guarded(key.data)
        if time.monotonic() < due:
            return due
        self._guarded(self._tick)
        late = time.monotonic() - due
        # after a pause it does not catch up
        return due + (self.beat if late < self.beat else late + self.beat)

    def _guarded(self, method: Callable[[], None]) -> None:
        """Calls a method, whose failure must not end the watch."""
        try:
            method()
        except Exception as error:
            self.faults += 1
            if self.faults == 1:
                say(
                    f"host {self.name} drops what it cannot read, and watches on: {type(error).__name__}: "
                    f"{str(error)[:200]}"
                )
            time.sleep(FAULT_SECONDS)

    def part(self) -> None:
        """Tells the others the verdict once more, or that they need not wait for this host."""
        for _ in range(PARTING):
            for host in [*self.hosts.values(), *([self.hub] if self.hub else [])]:
                self._send(host.address, parting=not self.verdict)
            time.sleep(0.02)

    def _over(self) -> bool:
        """Whether nobody here needs this process, nor anybody elsewhere."""
        if self.seats or not self.ranks:
            return not self.seats and self.beats * self.beat > NEVER_SECONDS  # nobody came
        if self.verdict:
            return True
        if self.is_hub:
            return not any(host.open for host in self.hosts.values())
        return self.hub is None or not self.heard

    def _tick(self) -> None:
        """One beat."""
        self.beats += 1
        self._look_at_ranks()
        for gone in (self.gone, *(host.gone for host in self.hosts.values())):
            gone.update({rank: beats + 1 for rank, beats in gone.items()})
        if self.verdict:
            self._end_ranks()
        elif self.is_hub:
            self._look()
        elif self.hub is not None:
            self._send(self.hub.address)
            self.hub.missed += 1
            if self.heard and self.hub.missed >= BEATS:
                loss = (
                    f"host {self.name} hears nothing from {at(self.hub)}: it is down, or the network "
                    "between them is cut"
                )
                verdict = self._explain(loss, self.hub.ranks, self.hub.missed)
                self.decide(verdict, [self.hub.name])
            elif not self.heard and not self.warned and self.beats * self.beat > NEVER_SECONDS:
                self.warned = True
                say(
                    f"host {self.name} gets no answer over UDP from {self.hub.name}, port "
                    f"{self.hub.address[1]}: it is not watched"
                )
        self._share_states()

    def _look_at_ranks(self) -> None:
        """Notice which ranks of this host are stopped."""
        for seat in self.seats:
            is_stopped = seat.pid > 0 and process_state(seat.pid) in STOPPED
            seat.stopped = seat.stopped + 1 if is_stopped else 0
            if seat.stopped == STOPPED_BEATS and not self.verdict:
                say(
                    f"rank {seat.rank} on host {self.name} is stopped (by SIGSTOP or a debugger): the run "
                    "waits for it"
                )
        stopped = [seat.rank for seat in self.seats if seat.stopped >= STOPPED_BEATS]
        if stopped != self.stopped:
            self.stopped = stopped
            self.messages.clear()

    def _share_states(self) -> None:
        """Find out which ranks do not run: the hub of all hosts, others of the hub's host."""
        if self.is_hub:
            self._set_states(self._all_states())
        elif self.hub is not None and self.states is not None and self.hub.missed >= FEW:
            quiet = sorted({*self.states.quiet, *self.hub.ranks})
            self._set_states(RankStates(self.states.gone, self.states.stopped, quiet))

    def _set_states(self, states: RankStates) -> None:
        """Tell this host's ranks, and other hosts in the next beats, if other ranks do not run now."""
        if states == self.states:
            return
        self.states = states
        self.messages.clear()
        for seat in self.seats:
            tell(seat, states=asdict(states))

    def _all_states(self) -> RankStates:
        """The states of the ranks of all hosts, as far as the hub knows. A rank never heard of is quiet."""
        hosts = self.hosts.values()
        known = {*self.ranks, *chain.from_iterable(host.ranks for host in hosts)}
        quiet = [rank for host in hosts if host.missed >= FEW for rank in host.ranks]
        if len(known) < self.world_size:
            quiet += [rank for rank in range(self.world_size) if rank not in known]
        gone = [*self.gone, *chain.from_iterable(host.gone for host in hosts)]
        stopped = [*self.stopped, *chain.from_iterable(host.stopped for host in hosts)]
        return RankStates(gone[:MOST_LISTED], stopped[:MOST_LISTED], quiet[:MOST_LISTED])

    def _look(self) -> None:
        """The hub's look at the others."""
        for host in self.hosts.values():
            host.missed += 1
        going_on = self.seats or any(host.open and host.missed < FEW for host in self.hosts.values())
        # where all others have failed, nothing is lost by a mistake
        limit = BEATS if going_on or not self.gone else FEW
        if any(host.missed >= limit for host in self.hosts.values()):
            # of those lost together some were heard later
            lost = [host for host in self.hosts.values() if host.missed > limit - 2]
            those = ", ".join(at(host) for host in lost[:8]) + (
                f" and {len(lost) - 8} more" if len(lost) > 8 else ""
            )
            heard = f"nothing was heard from {those} for {limit * self.beat:.0f} s"
            silent_beats = max(host.missed for host in lost)
            if len(lost) == len(self.hosts) > 1:
                loss = f"{heard}, nor from any other host: the network of host {self.name} is cut"
                lost_hosts = [Host(self.name, self.ranks, None)]
            else:
                several = "they are down, or the network to them is cut"
                why = "down, or the network to it is cut" if len(lost) == 1 else several
                loss, lost_hosts = f"{heard}: {why}", lost
            lost_ranks = [rank for host in lost_hosts for rank in host.ranks]
            verdict = self._explain(loss, lost_ranks, silent_beats)
            self.decide(verdict, [host.name for host in lost_hosts])
            return
        if any(host.missed >= FEW for host in self.hosts.values()):
            return  # if that host is down, a rank that has ended may only be one that has lost its peer
        for gone in (self.gone, *(host.gone for host in self.hosts.values())):
            if self.failure is not None and any(beats >= GRACE_BEATS for beats in gone.values()):
                self.decide(self.failure.reason)
                return

    def _explain(self, loss: str, lost_ranks: Sequence[int], silent_beats: int) -> str:
        """Return the reason to end with when hosts are lost that were last heard `silent_beats` ago.

        An earlier failure explains more than the loss, and so does one that blames a rank of these hosts.
        """
        failure = self.failure
        if failure is None:
            return loss
        is_earlier = self.beats - self.failed_at > silent_beats
        blames_lost = self.killed_rank is None and not set(failure.ranks).isdisjoint(lost_ranks)
        return failure.reason if is_earlier or blames_lost else loss

    def _learn(self, failure: Failure) -> None:
        """Keep the first failure that is reported; it replaces a guess about a rank that it blames."""
        if self.failure is not None and self.killed_rank not in failure.ranks:
            return
        self.failure, self.failed_at, self.killed_rank = failure, self.beats, None
        self.messages.clear()
        self._record(failure.reason)
        if self.hub is not None and not self.is_hub:
            self._send(self.hub.address)  # the hub must hear of it before it hears that the rank has ended

    def _guess(self, rank: int, host: str) -> None:
        """A rank has ended without a farewell, and has not reported why. Only the hub guesses."""
        if self.failure is None:
            reason = f"rank {rank} on host {host} has ended without a reason: killed, or out of memory?"
            self.failure, self.failed_at, self.killed_rank = Failure(reason, [rank]), self.beats, rank

    def _record(self, reason: str, hosts: Sequence[str] = (), is_decision: bool = False) -> None:
        """Record why the run ends. Only the hub does so, except where the hub cannot hear of it."""
        is_apart = self.hub is None or not self.heard or self.hub.missed >= FEW
        if self.note is not None and (self.is_hub or is_apart):
            self.note.add(reason, hosts, is_decision=is_decision and self.is_hub)

    def decide(self, verdict: str, lost: Sequence[str] = ()) -> None:
        """Print the verdict, and have all ranks end.

        The hub passes it on. The verdict is recorded in the run's folder, with the hosts that were `lost`.
        """
        self.verdict = verdict
        self.messages.clear()
        if self.ranks_here:
            say(f"{verdict}; {self.name} ends its {named(self.ranks_here)}")
        for host in self.hosts.values():
            self._send(host.address)
        self._end_ranks()
        self._record(verdict, lost, is_decision=True)

    @property
    def ranks_here(self) -> list[int]:
        """Ranks of this host that have not ended."""
        return sorted(seat.rank for seat in self.seats if seat.rank >= 0)

    def _end_ranks(self) -> None:
        """Tells the verdict, again and again to other hosts, and kills the ranks
        that do not end by themselves.
        """
        self.ending += 1
        for host in self.hosts.values():
            self._send(host.address)
        for seat in list(self.seats):
            if self.ending == 1:
                tell(seat, verdict=self.verdict)
            elif self.ending > END_BEATS and seat.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(seat.pid, signal.SIGKILL)

    def _send(self, address: Any, parting: bool = False) -> None:
        """A beat, or the answer to one."""
        if parting not in self.messages:
            states = RankStates(list(self.gone), self.stopped)
            if self.is_hub and self.states is not None:
                states = self.states
            failure = (
                Failure() if self.is_hub else self.failure or Failure()
            )  # hosts report theirs to the hub
            beat = Beat(self.name, self.verdict, parting, self.ranks, self.ranks_here, states, failure)
            self.messages[parting] = beat.packed(self.token)
        with contextlib.suppress(OSError):  # this host's own network is down: the others' silence will tell
            self.datagrams.sendto(self.messages[parting], address)

    def _receive(self) -> None:
        """Takes datagrams that have come."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            for _ in range(AT_ONCE):
                data, address = self.datagrams.recvfrom(MOST_BYTES)
                if (ours := behind_token(data, self.token)) is not None:
                    self._hear(unpacked(ours), address)

    def _hear(self, beat: Beat, address: Any) -> None:
        """Another host's beat, or the hub's answer."""
        if self.hub is not None and not self.is_hub:
            self.heard, self.hub.missed = True, 0
            self.hub.name, self.hub.ranks = beat.name, beat.ranks
            self._set_states(beat.states)
            if beat.verdict and not self.verdict:
                self.decide(beat.verdict)
            if beat.parting:
                self.hub = None
            return
        key = str(address)
        if beat.parting:
            self.hosts.pop(key, None)
            return
        host = self.hosts.setdefault(key, Host(beat.name, beat.ranks, address))
        host.missed, host.ranks, host.open = 0, beat.ranks, beat.open
        host.stopped = beat.states.stopped
        if beat.failure.reason:
            self._learn(beat.failure)
        for rank in beat.states.gone:
            if rank not in host.gone:
                self._guess(rank, host.name)
        host.gone = {rank: host.gone.get(rank, 0) for rank in beat.states.gone}
        self._send(address)

    def _accept(self) -> None:
        """Takes a connection, unless it is of another user: anybody on this machine can find the door."""
        connection, _ = self.door.accept()
        if not same_user(connection):
            connection.close()
            return
        connection.setblocking(False)
        unnamed = [seat for seat in self.seats if seat.rank < 0]
        if len(unnamed) >= UNNAMED:
            self._drop(unnamed[0])
        seat = RankConnection(connection)
        self.seats.append(seat)
        self.selector.register(connection, selectors.EVENT_READ, lambda: self._read(seat))

    def _read(self, seat: RankConnection) -> None:
        """What a rank says: who it is, where the hub is, that it leaves; or, with
        nothing, that it has ended.
        """
        if seat not in self.seats:
            return  # closed since the look that found something to read
        try:
            data = seat.connection.recv(LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, seat.received = (seat.received + data).split(b"\n")
        ours = [behind_token(line, self.token) for line in lines]
        if None in ours or len(seat.received) > LINE_BYTES:
            self._drop(seat)  # another program of this user
            return
        for message in map(json.loads, filter(None, ours)):
            if "farewell" in message:
                self._drop(seat)
                return
            self._obey(seat, message)
        if not data:
            if seat.rank >= 0:
                self.gone[seat.rank] = 0
                if self.is_hub:
                    self._guess(seat.rank, self.name)
            self._drop(seat)

    def _obey(self, seat: RankConnection, message: dict[str, Any]) -> None:
        if "rank" in message:
            seat.rank, seat.pid = int(message["rank"]), max(0, int(message["pid"]))
            self.ranks = sorted({*self.ranks, seat.rank})
            self.messages.clear()
            tell(seat, port=self.port)
            if self.states is not None:
                tell(seat, states=asdict(self.states))
        elif "reason" in message:
            self._learn(Failure(str(message["reason"]), [int(rank) for rank in message["ranks"]]))
        elif "hub" in message and self.hub is None and not self.is_hub:
            name, port = message["hub"]
            self.hub = Host(name, [], resolve(name, port, self.datagrams.family))
            self._send(self.hub.address)

    def _drop(self, seat: RankConnection) -> None:
        self.selector.unregister(seat.connection)
        seat.connection.close()
        self.seats.remove(seat)
        self.messages.clear()
        if seat.rank >= 0 and self.hub is not None and not self.is_hub:
            self._send(self.hub.address)  # so that the hub need not wait for the next beat to know


def tell(seat: RankConnection, **message: Any) -> None:
    """Sends a line to a rank, which may have ended."""
    with contextlib.suppress(OSError):
        seat.connection.send(json.dumps(message).encode() + b"\n")


def named(ranks: Sequence[int]) -> str:
    """Ranks in words: rank 3; ranks 0-7; ranks 0, 2-3."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) != 1 else ''} {text}"


def at(host: Host) -> str:
    """A host with its ranks."""
    return f"host {host.name}" + (f" ({named(host.ranks)})" if host.ranks else "")


def say(line: str) -> None:
    """Writes a line to stderr in one write. Nobody may read it any more."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"heartbeat: {line}\n")
        sys.stderr.flush()


def main() -> None:
    """Reads its settings from stdin, and writes the name of its door to stdout,
    for the rank that has started it.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # launchers send them to all below them; it ends when its ranks have
        signal.signal(number, signal.SIG_IGN)
    settings = json.loads(sys.stdin.readline())
    note = settings.pop("note")
    if note is not None:
        note = FailureNote(Path(note["folder"]), note["start"])
    heartbeat = Heartbeat(**settings, note=note)
    print(heartbeat.door.getsockname()[1:].decode(), flush=True)
    sys.stdout.close()
    try:
        heartbeat.run()
    except Exception as error:  # a mistake in here must end no run
        say(
            f"that of host {heartbeat.name} fails, which is not watched any more: {type(error).__name__}: "
            f"{error}"
        )
        heartbeat.part()


if __name__ == "__main__":
    main()
