"""The heartbeats of hosts: three real processes of three hosts, whose ranks are connections of the test's own or processes."""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megacore.distributed.rank_info import RankInfo
from megacore.tools.diagnosis import beats, heartbeat
from megacore.tools.diagnosis import heartbeat_client as pulse
from megacore.tools.diagnosis.beats import Beat
from megacore.tools.local_ranks import free_port
from tests.pool import CONTEXT, ROOT
from tests.strangers import GARBAGE

SECONDS = 1.5  # of silence, after which a host is lost here
TOKEN = "ours"
LATE = 10 * SECONDS  # a verdict that is not there by then never comes


class Rank:
    """A rank that says to its host's process what `heartbeat_client.HeartbeatClient` does."""

    def __init__(self, door: str, rank: int, pid: int = 0) -> None:
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.connection.connect("\0" + door)
        self.connection.settimeout(LATE)
        self.lines = self.connection.makefile("rb")
        self.tell(rank=rank, pid=pid)
        self.port = json.loads(self.lines.readline())["port"]

    def tell(self, **message: Any) -> None:
        self.connection.send(f"{TOKEN}{json.dumps(message)}\n".encode())

    def verdict(self) -> str:
        """What it is told, at the latest after `LATE` seconds; empty if the process ends without a verdict."""
        line = self.lines.readline()
        return str(json.loads(line)["verdict"]) if line else ""

    def calm(self, seconds: float) -> bool:
        """Whether it is told nothing for so long."""
        self.connection.settimeout(seconds)
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self.connection.settimeout(LATE)

    def leave(self) -> None:
        self.tell(farewell=True)
        self.end()

    def end(self) -> None:
        """Ends without a farewell, as a killed process does."""
        self.connection.shutdown(socket.SHUT_RDWR)


class Host:
    """A host's process."""

    def __init__(self, name: str, folder: Path, seconds: float) -> None:
        self.said = folder / f"{name}.txt"
        with self.said.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", heartbeat.__name__],
                cwd=ROOT,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        settings = {"name": name, "token": TOKEN, "seconds": seconds, "folder": str(folder)}
        self.process.stdin.write(json.dumps(settings) + "\n")
        self.process.stdin.close()
        self.door = self.process.stdout.readline().strip()

    def ended(self) -> int:
        """Its status once it has ended."""
        return self.process.wait(LATE)


@contextlib.contextmanager
def run_of(
    folder: Path, ranks: dict[str, list[int]], seconds: float = SECONDS
) -> Iterator[tuple[dict[str, Host], dict[int, Rank]]]:
    """Hosts with their ranks, the first with rank 0, all of which have heard of each other."""
    hosts = {name: Host(name, folder, seconds) for name in ranks}
    try:
        found = {rank: Rank(hosts[name].door, rank) for name, those in ranks.items() for rank in those}
        for those in ranks.values():
            if 0 not in those:
                found[those[0]].tell(hub=["127.0.0.1", found[0].port])
        time.sleep(3 * seconds / heartbeat.BEATS)
        yield hosts, found
    finally:
        for host in hosts.values():
            host.process.kill()
            host.process.wait()


THREE = {"a": [0, 1], "b": [2, 3], "c": [4, 5]}


def test_a_host_is_lost_at_the_tenth_beat_that_it_misses() -> None:
    """Counted, because a busy machine's clock proves nothing: rank 0's host and another, each of which hears nothing more."""
    hub, other = (heartbeat.Heartbeat(name, TOKEN, 1e3, None) for name in "ab")
    hub.ranks, other.ranks, other.heard = [0], [1], True
    hub.hosts["b"] = heartbeat.Host("b", [1], other.datagrams.getsockname(), open=[1])
    other.hub = heartbeat.Host("a", [0], hub.datagrams.getsockname())
    for host in (hub, other):
        verdicts = [host.verdict for _ in range(heartbeat.BEATS) if host._tick() is None]
        assert not any(verdicts[:-1]) and "nothing" in verdicts[-1]


@pytest.mark.parametrize("lost", ["b", "a"])
def test_a_silent_host_is_named_by_all_others(tmp_path: Path, lost: str) -> None:
    """A collective would wait for it half an hour. The silent one's own ranks end too: nobody reads what they compute."""
    with run_of(tmp_path, THREE) as (hosts, ranks):
        hosts[lost].process.send_signal(signal.SIGSTOP)
        others = [rank for name, those in THREE.items() if name != lost for rank in those]
        verdicts = {ranks[rank].verdict() for rank in others}
        if lost == "b":
            assert verdicts == {
                f"nothing was heard from host b (ranks 2-3) for {SECONDS:.0f} s: down, or the network to it is cut"
            }
        else:
            right = "host {} hears nothing from host a (ranks 0-1): it is down, or the network between them is cut"
            assert verdicts == {right.format(name) for name in "bc"}
        for rank in others:
            ranks[rank].end()
        for name in set(THREE) - {lost}:
            assert hosts[name].ended() == 0
            said = hosts[name].said.read_text()
            own = heartbeat.named(THREE[name])
            assert (
                said.count("\n") == 1
                and f"host {lost} (" in said
                and said.endswith(f"; {name} ends its {own}\n")
            )
        if lost == "b":
            assert json.loads((tmp_path / heartbeat.LOST).read_text())["hosts"] == ["b"]
        hosts[lost].process.send_signal(signal.SIGCONT)
        lone = [ranks[rank] for rank in THREE[lost]]
        assert all(rank.verdict() for rank in lone)
        for rank in lone:
            rank.end()
        assert hosts[lost].ended() == 0


def test_a_host_that_hears_nobody_is_the_one_that_is_cut_off(tmp_path: Path) -> None:
    """That all others went down together is less likely; a spare must come for this one, not for them."""
    with run_of(tmp_path, THREE) as (hosts, ranks):
        for name in "bc":
            hosts[name].process.send_signal(signal.SIGSTOP)
        assert ranks[0].verdict().endswith(", nor from any other host: the network of host a is cut")
        for rank in (0, 1):
            ranks[rank].end()
        assert hosts["a"].ended() == 0
        assert json.loads((tmp_path / heartbeat.LOST).read_text())["hosts"] == ["a"]


def test_a_host_that_pauses_is_not_lost(tmp_path: Path) -> None:
    """A machine may stand still for some seconds, and its clock jump: neither is a fault, however often."""
    with run_of(tmp_path, THREE) as (hosts, ranks):
        for name in "ba":
            hosts[name].process.send_signal(signal.SIGSTOP)
            assert ranks[4].calm(0.6 * SECONDS)
            hosts[name].process.send_signal(signal.SIGCONT)
            assert ranks[4].calm(0.5 * SECONDS)
        for rank in ranks.values():
            assert rank.calm(0.01)
            rank.leave()
        assert [host.ended() for host in hosts.values()] == [0, 0, 0]
        assert [host.said.read_text() for host in hosts.values()] == ["", "", ""]


def test_an_ended_rank_is_named_if_the_others_go_on(tmp_path: Path) -> None:
    """With NCCL a killed rank's peers may wait for ever, and the launcher of another host sees nothing."""
    with run_of(tmp_path, THREE) as (hosts, ranks):
        ranks[3].end()
        assert ranks[0].calm(0.2 * SECONDS), "those that lost it may know more, and speak first"
        others = [rank for number, rank in ranks.items() if number != 3]
        right = "rank 3 on host b has ended, and others go on: killed, or out of memory?"
        assert {rank.verdict() for rank in others} == {right}
        for rank in others:
            rank.end()
        assert [host.ended() for host in hosts.values()] == [0, 0, 0]


def test_ranks_that_leave_at_different_times_are_missed_by_nobody(tmp_path: Path) -> None:
    """One host may still write a checkpoint when others have done. No process stays behind."""
    with run_of(tmp_path, THREE) as (hosts, ranks):
        for rank in (0, 1, 2, 3):
            ranks[rank].leave()
        assert ranks[4].calm(1.5 * SECONDS)
        for rank in (4, 5):
            ranks[rank].leave()
        assert [host.ended() for host in hosts.values()] == [0, 0, 0]
        assert not any(host.said.read_text() for host in hosts.values())


def test_a_lost_host_is_not_waited_for_when_all_others_have_failed(tmp_path: Path) -> None:
    """They lost it as a peer and ended: the job cannot be started again while processes beside them hold its output."""
    seconds = 4.0  # c must beat meanwhile, also where many others want its core
    with run_of(tmp_path, THREE, seconds) as (hosts, ranks):
        hosts["b"].process.send_signal(signal.SIGSTOP)
        for rank in (0, 1, 4, 5):
            ranks[rank].end()
        assert [hosts[name].ended() for name in "ac"] == [0, 0]
        lost = json.loads((tmp_path / heartbeat.LOST).read_text())
        assert (
            lost["hosts"] == ["b"]
            and f" for {heartbeat.FEW * seconds / heartbeat.BEATS:.0f} s: " in lost["verdict"]
        )
        assert not hosts["a"].said.read_text(), "nobody is there to be ended"


def test_a_rank_that_cannot_end_is_killed(tmp_path: Path) -> None:
    """A stopped process ends by no message; it would hold its GPU, and its host could not be used again."""
    sleeper = subprocess.Popen(["sleep", "60"])
    os.kill(sleeper.pid, signal.SIGSTOP)
    with run_of(tmp_path, {"a": [0], "b": [1], "c": [2]}) as (hosts, ranks):
        stuck = Rank(hosts["c"].door, 3, sleeper.pid)
        ranks[1].end()
        assert stuck.verdict()
        assert sleeper.wait(LATE) == -signal.SIGKILL


def test_strangers_neither_end_a_run_nor_blind_its_watch(tmp_path: Path) -> None:
    """Whoever finds a port or a door could end the process that watches, keep it busy, or fill it; nobody would notice a loss then."""
    with run_of(tmp_path, THREE) as (hosts, ranks):
        targets = [f"udp:127.0.0.1:{ranks[first].port}" for first in (0, 2, 4)] + [
            f"unix:{host.door}" for host in hosts.values()
        ]
        stranger = [sys.executable, "-m", "tests.strangers", "30", *targets]
        those = [subprocess.Popen([*stranger, *who], cwd=ROOT) for who in ([], ["--nobody"])]
        try:
            assert ranks[0].calm(0.5 * SECONDS) and ranks[5].calm(0.01)
            late = Rank(hosts["c"].door, 6)  # who comes now is still let in
            hosts["b"].process.send_signal(signal.SIGSTOP)
            assert ranks[0].verdict().startswith("nothing was heard from host b (ranks 2-3)")
            assert ranks[4].verdict() and late.verdict() and not any(one.poll() for one in those)
        finally:
            for one in those:
                one.kill()
                one.wait()
        for host in ("a", "c"):
            assert "watches on" not in hosts[host].said.read_text()


def test_nothing_is_read_before_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is parsed can end the parser. With the token, what does not fit its lengths is counted, and nothing of it is kept."""
    ours = heartbeat.Heartbeat("a", TOKEN, SECONDS, None)
    ours.ranks = [0]
    good = Beat("b", "", False, [1, 2], [2], [1]).packed(TOKEN.encode())
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
            (host.name, host.ranks, host.open, host.gone) for host in ours.hosts.values()
        ] == [("b", [1, 2], [2], {1: 0})]
        for _ in range(heartbeat.AT_ONCE + 20):
            other.sendto(good, ("127.0.0.1", ours.port))
        ours._guarded(ours._receive)
        assert ours.datagrams.recvfrom(len(good))[0] == good, "it must look at the time between them"


def test_a_flood_takes_no_beats_place() -> None:
    """A host whose beats find no place in the queue is taken for lost, and the run ends."""
    ours = heartbeat.Heartbeat("a", TOKEN + "1234567", SECONDS, None)
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
        other.sendto(Beat("b", "", False, [1], [1], []).packed(ours.token), ("127.0.0.1", ours.port))
        ours._receive()
        assert [host.name for host in ours.hosts.values()] == ["b"]


def test_another_users_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody on the machine can find the door; and this user's own programs may fill neither its memory nor its descriptors."""
    ours = heartbeat.Heartbeat("a", TOKEN, SECONDS, None)
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


def beating_rank(rank: int, port: int, folder: str, fault: str) -> None:
    """A rank on a host of its own, which joins as training does, and then does as `fault` says."""
    pulse.machine = lambda: f"host{rank}"  # type: ignore[assignment]
    pulse.LOOK_SECONDS = 0.05
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=60), wait_for_workers=False)
    ours = pulse.HeartbeatClient(store, RankInfo(rank, 2, 0, 1, "127.0.0.1", port), SECONDS, Path(folder))
    while ours.connection is None or not store.check(["doctor/heartbeat/hub"]):
        time.sleep(0.05)
    time.sleep(0.5 * SECONDS)
    if rank == 1 and fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "busy":  # a compiler, or a collection of garbage: nothing else in this process runs
        ctypes.PyDLL(None).sleep(int(2 * SECONDS))
    else:
        time.sleep(LATE)
    ours.close()
    if rank == 0:
        time.sleep(0.5)  # it holds the store
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
        rank.join(3 * LATE)
    assert [rank.exitcode for rank in ranks] == statuses


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([0, 1, 2, 3], "ranks 0-3"), ([0, 2, 3, 9], "ranks 0, 2-3, 9")]
)
def test_ranks_in_words(ranks: list[int], text: str) -> None:
    assert heartbeat.named(ranks) == text
