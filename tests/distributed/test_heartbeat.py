"""The heartbeats of hosts: three hosts that a clock of the test's own drives, so that a busy machine
loses none; and real processes.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megacore.distributed.processes import STOPPED, process_state
from megacore.distributed.rank_info import RankInfo
from megacore.tools.diagnosis import beats, heartbeat
from megacore.tools.diagnosis import heartbeat_client as pulse
from megacore.tools.diagnosis.beats import MOST_LISTED, Beat, Failure, RankStates, unpacked
from megacore.tools.diagnosis.failure_note import FAILURE, FailureNote
from megacore.tools.local_ranks import free_port
from tests.pool import CONTEXT, PATIENCE, ROOT
from tests.strangers import GARBAGE

SECONDS = 30.0  # of silence, after which a host is lost here, by the test's clock
BEAT = SECONDS / heartbeat.BEATS
TOKEN = "ours"


class Rank:
    """A rank that says to its host's process what `heartbeat_client.HeartbeatClient` does."""

    def __init__(self, cluster: "Cluster", host: str, rank: int, pid: int = 0) -> None:
        self.connection, self.received = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), b""
        self.states = RankStates()
        self.connection.connect(cluster.hosts[host].door.getsockname())
        self.tell(rank=rank, pid=pid)
        while not (answer := self.told()):
            cluster.hosts[host].act()
        self.port = json.loads(answer)["port"]

    def tell(self, **message: Any) -> None:
        self.connection.send(f"{TOKEN}{json.dumps(message)}\n".encode())

    def told(self) -> str:
        """The next line that has come from its host's process; empty if there is none."""
        with contextlib.suppress(BlockingIOError):
            self.received += self.connection.recv(1 << 16, socket.MSG_DONTWAIT)
        line, newline, rest = self.received.partition(b"\n")
        if newline:
            self.received = rest
        return line.decode() if newline else ""

    def verdict(self) -> str:
        """What it was told to end with; empty if nothing."""
        while line := self.told():
            message = json.loads(line)
            if "verdict" in message:
                return str(message["verdict"])
            self.states = RankStates(**message["states"])
        return ""

    def report(self, reason: str, *ranks: int) -> None:
        """Ends for a reason that blames some ranks."""
        self.tell(reason=reason, ranks=list(ranks))
        self.end()

    def leave(self) -> None:
        self.tell(farewell=True)
        self.end()

    def end(self) -> None:
        """Ends without a farewell, as a killed process does."""
        self.connection.shutdown(socket.SHUT_RDWR)


class PlayedHost(heartbeat.Heartbeat):
    """A host's process with its real sockets, which acts when its cluster tells it to."""

    def __init__(self, name: str, cluster: "Cluster", folder: Path) -> None:
        super().__init__(name, TOKEN, SECONDS, cluster.world_size, FailureNote(folder, "this start"))
        self.cluster, self.due = cluster, cluster.now + self.beat
        self.said: list[str] = []
        self.paused = self.ended = False
        self.coming = 0  # datagrams that others have sent, and that it has not read yet
        self.accepted = 0  # connections
        wait = self.selector.select
        self.selector.select = lambda timeout=None: wait(0)  # type: ignore[method-assign]

    def _send(self, address: Any, parting: bool = False) -> None:
        super()._send(address, parting)
        self.cluster.by_port[address[1]].coming += 1

    def _hear(self, beat: Beat, address: Any) -> None:
        self.coming -= 1
        super()._hear(beat, address)

    def _accept(self) -> None:
        self.accepted += 1
        super()._accept()

    def act(self) -> None:
        """Takes turns until it would wait for the next beat."""
        if self.paused or self.ended:
            return
        self.cluster.acting = self
        while self.coming:  # however late the kernel delivers them
            assert select.select([self.datagrams], [], [], PATIENCE)[0], "a datagram is lost"
            self._guarded(self._receive)
        while not self._over():
            self.due = self._turn(self.due)
            if self.due > self.cluster.now:
                return
        self._finish()
        self.ended = True


class Cluster:
    """Hosts a, b and c with their ranks, the first with rank 0, all of which have heard of each other."""

    def __init__(self, folder: Path, ranks: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.world_size = 1000.0, sum(map(len, ranks.values()))
        FailureNote(folder, "this start").begin()
        monkeypatch.setattr(
            heartbeat, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=lambda seconds: None)
        )
        monkeypatch.setattr(heartbeat, "say", lambda line: self.acting.said.append(line))
        self.hosts = {name: PlayedHost(name, self, folder) for name in ranks}
        self.by_port = {host.port: host for host in self.hosts.values()}
        self.acting = self.hosts["a"]
        self.ranks = {rank: Rank(self, name, rank) for name, those in ranks.items() for rank in those}
        for those in ranks.values():
            if 0 not in those:
                self.ranks[those[0]].tell(hub=["127.0.0.1", self.ranks[0].port])
        self.wait(3 * BEAT)

    def wait(self, seconds: float) -> None:
        """Lets time pass for all hosts."""
        end = self.now + seconds
        while self.now < end:
            self.now += BEAT / 4
            for host in self.hosts.values():
                host.act()

    def stop(self, *names: str) -> None:
        for name in names:
            self.hosts[name].paused = True

    def go_on(self, *names: str) -> None:
        for name in names:
            self.hosts[name].paused = False

    def verdicts(self) -> dict[int, str]:
        """The verdicts that ranks have been told since this was last asked."""
        return {rank: verdict for rank, each in self.ranks.items() if (verdict := each.verdict())}

    def ended(self) -> str:
        """The hosts whose processes have ended."""
        return "".join(name for name, host in self.hosts.items() if host.ended)

    def close(self) -> None:
        for host in self.hosts.values():
            host.selector.close()
            for each in (host.door, host.datagrams, *(seat.connection for seat in host.seats)):
                each.close()
        for rank in self.ranks.values():
            rank.connection.close()


def note(folder: Path) -> dict[str, Any]:
    """The record of why the run has ended."""
    values: dict[str, Any] = json.loads((folder / FAILURE).read_text())
    return values


THREE = {"a": [0, 1], "b": [2, 3], "c": [4, 5]}


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Three hosts of two ranks each."""
    with contextlib.closing(Cluster(tmp_path, THREE, monkeypatch)) as found:
        yield found


def test_a_host_is_lost_at_the_tenth_beat_that_it_misses() -> None:
    """Counted, because a busy machine's clock proves nothing: rank 0's host and another,
    each of which hears nothing more.
    """
    hub, other = (heartbeat.Heartbeat(name, TOKEN, 1e3, 2, None) for name in "ab")
    hub.ranks, other.ranks, other.heard = [0], [1], True
    hub.hosts["b"] = heartbeat.Host("b", [1], other.datagrams.getsockname(), open=[1])
    other.hub = heartbeat.Host("a", [0], hub.datagrams.getsockname())
    for host in (hub, other):
        verdicts = [host.verdict for _ in range(heartbeat.BEATS) if host._tick() is None]
        assert not any(verdicts[:-1]) and "nothing" in verdicts[-1]


@pytest.mark.parametrize("lost", ["b", "a"])
def test_a_silent_host_is_named_by_all_others(three: Cluster, tmp_path: Path, lost: str) -> None:
    """A collective would wait for it half an hour.

    The silent one's own ranks end too: nobody reads what they compute.
    """
    three.stop(lost)
    three.wait(0.8 * SECONDS)
    assert not three.verdicts()
    three.wait(0.4 * SECONDS)
    verdicts = three.verdicts()
    others = [rank for name, those in THREE.items() if name != lost for rank in those]
    assert sorted(verdicts) == others
    if lost == "b":
        right = (
            f"nothing was heard from host b (ranks 2-3) for {SECONDS:.0f} s: down, or the network to "
            "it is cut"
        )
        assert set(verdicts.values()) == {right}
    else:
        right = (
            "host {} hears nothing from host a (ranks 0-1): it is down, or the network between them is cut"
        )
        assert set(verdicts.values()) == {right.format(name) for name in "bc"}
    for rank in others:
        three.ranks[rank].end()
    three.wait(2 * BEAT)
    assert three.ended() == "abc".replace(lost, "")
    for name in set(THREE) - {lost}:
        assert len(three.hosts[name].said) == 1, three.hosts[name].said
        (said,) = three.hosts[name].said
        assert f"host {lost} (" in said and said.endswith(f"; {name} ends its {heartbeat.named(THREE[name])}")
    if lost == "b":
        assert note(tmp_path)["hosts"] == ["b"]
    three.go_on(lost)
    three.wait(2 * SECONDS)
    assert sorted(three.verdicts()) == THREE[lost]
    for rank in THREE[lost]:
        three.ranks[rank].end()
    three.wait(2 * BEAT)
    assert three.ended() == "abc"


def test_a_host_that_hears_nobody_is_the_one_that_is_cut_off(three: Cluster, tmp_path: Path) -> None:
    """That all others went down together is less likely; a spare must come for this one, not for them."""
    three.stop("b", "c")
    three.wait(1.2 * SECONDS)
    verdicts = three.verdicts()
    assert sorted(verdicts) == [0, 1]
    assert verdicts[0].endswith(", nor from any other host: the network of host a is cut")
    for rank in (0, 1):
        three.ranks[rank].end()
    three.wait(2 * BEAT)
    assert three.ended() == "a"
    assert note(tmp_path)["hosts"] == ["a"]


def test_a_host_that_pauses_is_not_lost(three: Cluster) -> None:
    """A machine may stand still for some seconds, and its clock jump: neither is a fault, however often;
    nor an hour, if all stand still.
    """
    for names in ("b", "a", "b", "a"):
        three.stop(*names)
        three.wait(0.6 * SECONDS)
        three.go_on(*names)
        three.wait(0.5 * SECONDS)
    three.now += 3600.0
    three.wait(SECONDS)
    assert not three.verdicts()
    for rank in three.ranks.values():
        rank.leave()
    three.wait(SECONDS)
    assert three.ended() == "abc" and not any(host.said for host in three.hosts.values())


def test_an_ended_rank_is_named_if_the_others_go_on(three: Cluster) -> None:
    """With NCCL a killed rank's peers may wait for ever, and the launcher of another host sees nothing."""
    three.ranks[3].end()
    three.wait(2 * BEAT)
    assert not three.verdicts(), "those that lost it may know more, and speak first"
    three.wait(0.5 * SECONDS)
    verdicts = three.verdicts()
    assert sorted(verdicts) == [0, 1, 2, 4, 5]
    assert set(verdicts.values()) == {
        "rank 3 on host b has ended without a reason: killed, or out of memory?"
    }
    for rank in verdicts:
        three.ranks[rank].end()
    three.wait(2 * BEAT)
    assert three.ended() == "abc"


def test_ranks_that_leave_at_different_times_are_missed_by_nobody(three: Cluster) -> None:
    """One host may still write a checkpoint when others have done. No process stays behind."""
    for rank in (0, 1, 2, 3):
        three.ranks[rank].leave()
    three.wait(1.5 * SECONDS)
    assert not three.verdicts()
    for rank in (4, 5):
        three.ranks[rank].leave()
    three.wait(SECONDS)
    assert three.ended() == "abc" and not any(host.said for host in three.hosts.values())


def test_a_lost_host_is_not_waited_for_when_all_others_have_failed(three: Cluster, tmp_path: Path) -> None:
    """They lost it as a peer and ended: the job cannot be started again while
    processes beside them hold its output.
    """
    three.stop("b")
    for rank in (0, 1, 4, 5):
        three.ranks[rank].end()
    three.wait((heartbeat.FEW + 2) * BEAT)
    assert three.ended() == "ac"
    lost = note(tmp_path)
    assert lost["hosts"] == ["b"] and f" for {heartbeat.FEW * BEAT:.0f} s: " in lost["reason"]
    assert not three.hosts["a"].said, "no process is there to be ended"


def test_a_rank_that_cannot_end_is_killed(three: Cluster) -> None:
    """A stopped process ends by no message; it would hold its GPU, and its host could not be used again."""
    sleeper = subprocess.Popen(["sleep", "3600"])
    os.kill(sleeper.pid, signal.SIGSTOP)
    try:
        stuck = Rank(three, "c", 6, sleeper.pid)
        three.ranks[3].end()
        three.wait(SECONDS)
        assert stuck.verdict() and sleeper.wait(10) == -signal.SIGKILL
    finally:
        sleeper.kill()


def send_and_wait(pid: int, number: signal.Signals, states: Sequence[str]) -> None:
    """Sends a signal, and waits until it has put the process into one of some states."""
    os.kill(pid, number)
    deadline = time.monotonic() + PATIENCE
    while process_state(pid) not in states:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that may be stopped."""
    process = subprocess.Popen(["sleep", "3600"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_ranks_that_end_for_a_reason_are_not_blamed(
    three: Cluster, tmp_path: Path, sleeper: "subprocess.Popen[bytes]"
) -> None:
    """A stopped rank stays, and the others end with the watchdog's verdict on it: a user would look for a
    killed process on a healthy host. The stopped one must end too, or the job cannot start again.
    """
    send_and_wait(sleeper.pid, signal.SIGSTOP, STOPPED)
    three.ranks[6] = Rank(three, "c", 6, sleeper.pid)
    reason = "rank 6 (host c) is stopped (by SIGSTOP or a debugger)"
    for rank in range(6):
        three.ranks[rank].report(reason, 6)
    three.wait(BEAT)
    assert note(tmp_path)["reason"] == reason, "the supervisor must learn it though no verdict follows"
    three.wait(SECONDS)
    assert sleeper.wait(10) == -signal.SIGKILL
    assert [three.hosts[name].verdict for name in "abc"] == [reason] * 3
    assert note(tmp_path)["reason"] == reason and note(tmp_path)["hosts"] == []


@pytest.mark.parametrize(
    ("reason", "blamed", "is_better"),
    [("rank 3 (host b) is dead", 3, True), ("rank 4 (host c) failed: RuntimeError: timed out", 4, False)],
)
def test_a_killed_rank_comes_before_those_that_fail_without_it(
    three: Cluster, tmp_path: Path, reason: str, blamed: int, is_better: bool
) -> None:
    """The first failure is the cause: a later one explains it only if it names that rank."""
    three.ranks[3].end()
    three.wait(BEAT)
    three.ranks[4].report(reason, blamed)
    three.wait(SECONDS)
    guess = "rank 3 on host b has ended without a reason: killed, or out of memory?"
    verdict = reason if is_better else guess
    assert set(three.verdicts().values()) == {verdict} and note(tmp_path)["reason"] == verdict


def test_a_killed_rank_is_recorded_though_all_end_at_once(three: Cluster, tmp_path: Path) -> None:
    """The others often end within a second, so there is no verdict: the supervisor would know no reason."""
    three.ranks[3].end()
    three.wait(BEAT)
    for rank in (0, 1, 2, 4, 5):
        three.ranks[rank].report(f"rank {rank} failed: RuntimeError: Connection closed by peer", rank)
    three.wait(3 * BEAT)
    assert three.ended() == "abc"
    assert note(tmp_path)["reason"].startswith("rank 3 on host b has ended")


def test_the_answers_of_rank_0s_host_carry_no_failure(
    three: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other hosts ignore it there, and thousands of answers a beat would be longer."""
    answers: list[Beat] = []
    hear = PlayedHost._hear

    def keep(self: PlayedHost, beat: Beat, address: Any) -> None:
        answers.extend([beat] if beat.name == "a" else [])
        hear(self, beat, address)

    monkeypatch.setattr(PlayedHost, "_hear", keep)
    three.ranks[3].report("rank 3 failed", 3)
    three.wait(2 * BEAT)
    assert three.hosts["a"].failure == Failure("rank 3 failed", [3])
    assert answers and all(beat.failure == Failure() for beat in answers)


def test_ranks_that_a_launcher_ends_after_a_failure_are_not_blamed(three: Cluster, tmp_path: Path) -> None:
    """It kills the failed rank's neighbours, which can report nothing."""
    three.ranks[3].report("rank 3 (host b) failed: ValueError: nothing", 3)
    three.ranks[2].end()
    three.wait(SECONDS)
    assert set(three.verdicts().values()) == {"rank 3 (host b) failed: ValueError: nothing"}


@pytest.mark.parametrize("beats_later", [1, 3])
def test_a_host_that_is_down_comes_before_the_ranks_that_lose_it(
    three: Cluster, tmp_path: Path, beats_later: int
) -> None:
    """A rank that has lost its peer ends before the host counts as lost: the supervisor must still leave out
    the host, or the next start fails too.
    """
    three.stop("b")
    three.wait(beats_later * BEAT)
    three.ranks[4].report("rank 4 (host c) failed: RuntimeError: Connection closed by peer", 4)
    three.wait(1.2 * SECONDS)
    verdicts = three.verdicts()
    assert sorted(verdicts) == [0, 1, 5]
    assert all(verdict.startswith("nothing was heard from host b") for verdict in verdicts.values())
    assert note(tmp_path)["hosts"] == ["b"]


def test_every_host_knows_which_ranks_do_not_run(three: Cluster, sleeper: "subprocess.Popen[bytes]") -> None:
    """The watchdog of another host would say that a host is down of whose only rank is stopped."""
    three.ranks[6] = Rank(three, "c", 6, sleeper.pid)
    send_and_wait(sleeper.pid, signal.SIGSTOP, STOPPED)
    three.wait(BEAT)
    three.verdicts()
    assert three.ranks[0].states.state(6) == "R", "a profiler attaches for a moment"
    three.wait(4 * BEAT)
    three.verdicts()
    assert [three.ranks[rank].states.state(6) for rank in (0, 2, 4)] == ["T"] * 3
    stopped = "rank 6 on host c is stopped (by SIGSTOP or a debugger): the run waits for it"
    assert three.hosts["c"].said == [stopped]
    send_and_wait(sleeper.pid, signal.SIGCONT, ("S",))
    three.stop("b")
    three.wait((heartbeat.FEW + 2) * BEAT)
    three.verdicts()
    assert [three.ranks[0].states.state(rank) for rank in (1, 2, 3, 4, 6)] == [
        "R",
        "quiet",
        "quiet",
        "R",
        "R",
    ]
    three.go_on("b")
    three.wait(2 * BEAT)
    three.ranks[5].end()
    three.wait(2 * BEAT)
    assert not three.verdicts()
    assert [three.ranks[2].states.state(rank) for rank in (2, 3, 5)] == ["R", "R", "gone"]
    three.stop("a")
    three.wait((heartbeat.FEW + 2) * BEAT)
    three.verdicts()
    assert [three.ranks[4].states.state(rank) for rank in (0, 2)] == ["quiet", "R"]


def test_a_host_that_is_cut_off_does_not_have_the_last_word(three: Cluster, tmp_path: Path) -> None:
    """It cannot tell which side of the cut is healthy, and may still reach the shared folder first."""
    reason = "host c hears nothing from host a (ranks 0-1): it is down, or the network between them is cut"
    three.stop("a", "b")
    three.wait(1.2 * SECONDS)
    assert note(tmp_path)["reason"] == reason and note(tmp_path)["hosts"] == ["a"]
    three.go_on("a", "b")
    three.stop("c")
    three.wait(1.2 * SECONDS)
    assert note(tmp_path)["reason"].startswith("nothing was heard from host c (ranks 4-5)")
    assert note(tmp_path)["hosts"] == ["c"], "the next start would leave out the healthy side too"


def test_a_beat_about_thousands_of_ranks_fits_a_datagram() -> None:
    """One that is too long would not be sent, and everybody would count as lost."""
    many = list(range(100_000))
    beat = Beat(
        "a" * 200,
        "v" * 9000,
        False,
        many[:64],
        many[:64],
        RankStates(many, many, many),
        Failure("r" * 9000, many),
    )
    data = beat.packed(b"")
    assert len(data) < 16_000
    read = unpacked(data)
    assert read.states == RankStates(*[many[:MOST_LISTED]] * 3) and read.failure.ranks == many[:MOST_LISTED]
    assert read.states.state(5) == "gone" and read.states.state(5000) == "?", "the lists may have ended early"


def test_strangers_neither_end_a_run_nor_blind_its_watch(three: Cluster) -> None:
    """Whoever finds a port or a door could end the process that watches, keep it busy, or fill it;
    nobody would notice a loss then.
    """
    targets = [f"udp:127.0.0.1:{host.port}" for host in three.hosts.values()]
    targets += [f"unix:{host.door.getsockname()[1:].decode()}" for host in three.hosts.values()]
    stranger = [sys.executable, "-m", "tests.strangers", "3600", *targets]
    those = [subprocess.Popen([*stranger, *who], cwd=ROOT) for who in ([], ["--nobody"])]
    try:
        while any(host.accepted < 2 * heartbeat.UNNAMED for host in three.hosts.values()):
            three.wait(BEAT)
            assert not three.ended() and not any(one.poll() for one in those)
        three.wait(2 * SECONDS)
        assert not three.verdicts()
        late = Rank(three, "c", 6)  # who comes now is still let in
        three.stop("b")
        three.wait(1.2 * SECONDS)
        assert three.verdicts()[0].startswith("nothing was heard from host b (ranks 2-3)")
        assert late.verdict() and not any(one.poll() for one in those)
    finally:
        for one in those:
            one.kill()
            one.wait()
    for host in ("a", "c"):
        assert not any("watches on" in line for line in three.hosts[host].said)


def test_nothing_is_read_before_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is parsed can end the parser.

    With the token, what does not fit its lengths is counted, and nothing of it is kept.
    """
    ours = heartbeat.Heartbeat("a", TOKEN, SECONDS, 3, None)
    ours.ranks = [0]
    good = Beat("b", "", False, [1, 2], [2], RankStates([1], [2])).packed(TOKEN.encode())
    monkeypatch.setattr(heartbeat, "say", lambda line: None)
    monkeypatch.setattr(heartbeat, "FAULT_SECONDS", 0.0)
    with ours.door, ours.datagrams, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:

        def heard(data: bytes) -> int:
            before = ours.faults
            other.sendto(data, ("127.0.0.1", ours.port))
            ours._guarded(ours._receive)
            return ours.faults - before

        with monkeypatch.context() as never:
            never.setattr(heartbeat, "unpacked", None)  # calling it would be a fault
            assert not any(
                heard(message) for message in (*GARBAGE, good[1:], good[:3], good[:3].swapcase() + good[3:])
            )
        bad = [
            good[:-1],
            good + b"\0",
            good[: len(TOKEN)],
            good[: len(TOKEN) + 3],
            TOKEN.encode() + b"\xff" * 200,
        ]
        assert [heard(message) for message in bad] == [1] * len(bad) and not ours.hosts
        assert heard(good) == 0 and [
            (host.name, host.ranks, host.open, host.gone, host.stopped) for host in ours.hosts.values()
        ] == [("b", [1, 2], [2], {1: 0}, [2])]
        for _ in range(heartbeat.AT_ONCE + 20):
            other.sendto(good, ("127.0.0.1", ours.port))
        ours._guarded(ours._receive)
        assert ours.datagrams.recvfrom(len(good))[0] == good, "it must look at the time between them"


def test_a_flood_takes_no_beats_place() -> None:
    """A host whose beats find no place in the queue is taken for lost, and the run ends."""
    ours = heartbeat.Heartbeat("a", TOKEN + "1234567", SECONDS, 2, None)
    ours.ranks = [0]
    with ours.door, ours.datagrams, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        room = ours.datagrams.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        for stranger in (
            b"x" * 60000,
            TOKEN.encode() + b"x" * 60000,
            b"x",
        ):  # the last fill what is left between the others
            for _ in range(room // 60000 + 200):
                other.sendto(stranger, ("127.0.0.1", ours.port))
        other.sendto(Beat("b", "", False, [1], [1]).packed(ours.token), ("127.0.0.1", ours.port))
        ours._receive()
        assert [host.name for host in ours.hosts.values()] == ["b"]


def test_another_users_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody on the machine can find the door; and this user's own programs may fill neither
    its memory nor its descriptors.
    """
    ours = heartbeat.Heartbeat("a", TOKEN, SECONDS, 3, None)
    monkeypatch.setattr(heartbeat, "say", lambda line: None)
    with ours.door, ours.datagrams, contextlib.ExitStack() as opened:

        def come() -> socket.socket:
            connection = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            connection.connect(ours.door.getsockname())
            ours._guarded(ours._accept)
            return connection

        user = os.geteuid()
        monkeypatch.setattr(beats.os, "geteuid", lambda: user + 1)
        assert come().recv(1) == b"" and not ours.seats
        monkeypatch.setattr(beats.os, "geteuid", lambda: user)
        first, *_ = [come() for _ in range(heartbeat.UNNAMED + 1)]
        assert len(ours.seats) == heartbeat.UNNAMED and first.recv(1) == b""
        for message in (b"x" * heartbeat.LINE_BYTES + b"x", b"theirs{}\n"):
            one, seat = come(), ours.seats[-1]
            one.send(message)
            for _ in range(3):
                ours._guarded(lambda seat=seat: ours._read(seat))
            assert seat not in ours.seats
        one, seat = come(), ours.seats[-1]
        one.send(TOKEN.encode() + b"[" * 3000 + b"\n")
        ours._guarded(lambda: ours._read(seat))
        assert ours.faults == 1 and seat in ours.seats, "it knows the token: what it says next may be whole"
        for seat in list(ours.seats):
            ours._drop(seat)
        assert not ours._over(), "no rank has come yet"


LIMIT, HELD = (
    6.0,
    8,
)  # seconds of silence after which a real host is lost, and in which a rank holds its interpreter


def beating_rank(rank: int, port: int, folder: str, fault: str) -> None:
    """A rank on a host of its own, which joins as training does, and then does as `fault` says."""
    pulse.machine = lambda: f"host{rank}"  # type: ignore[assignment]
    pulse.LOOK_SECONDS = 0.05
    store = dist.TCPStore(
        "127.0.0.1", port, 2, rank == 0, timedelta(seconds=PATIENCE), wait_for_workers=False
    )
    ours = pulse.HeartbeatClient(store, RankInfo(rank, 2, 0, 1, "127.0.0.1", port), LIMIT)
    while ours.connection is None or not store.check(["watchdog/heartbeat/hub"]):
        time.sleep(0.05)
    store.set(f"beats{rank}", "yes")
    store.wait(["beats0", "beats1"])
    if rank == 1 and fault == "killed":
        time.sleep(
            LIMIT
        )  # rank 0's host has heard of it by then: a host that it has never heard of is not missed
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:  # a compiler, or a collection of garbage: nothing else in this process runs
        ctypes.PyDLL(None).sleep(HELD)
        ours.close()
        store.set("left", "yes")
    else:
        store.wait(["left"], timedelta(seconds=PATIENCE))  # it holds the store, and has other things to do
        ours.close()
    os._exit(0)


@pytest.mark.parametrize(("fault", "statuses"), [("busy", [0, 0]), ("killed", [1, -signal.SIGKILL])])
def test_a_busy_rank_is_left_alone_and_a_killed_one_is_not(
    tmp_path: Path, fault: str, statuses: list[int]
) -> None:
    """The whole way, from the store in which ranks meet to the end of a process."""
    port = free_port()
    ranks = [
        CONTEXT.Process(target=beating_rank, args=(rank, port, str(tmp_path), fault)) for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(PATIENCE)
    assert [rank.exitcode for rank in ranks] == statuses


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([0, 1, 2, 3], "ranks 0-3"), ([0, 2, 3, 9], "ranks 0, 2-3, 9")]
)
def test_ranks_in_words(ranks: list[int], text: str) -> None:
    assert heartbeat.named(ranks) == text
