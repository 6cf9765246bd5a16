"""What breaks between hosts is named within half a minute, leaves no process behind, and
costs the run nothing but time.

`pytest -s` shows the seconds of each fault, and by how much the weights differ from those of a run that
nothing disturbed.
"""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megacore.checkpoint.folder import locate
from megacore.checkpoint.read import Reader
from megacore.tools.relaunch.hosts import read_hostfile
from megacore.tools.verify.checkpoint_diff import compare
from tests.cluster.hosts import Hosts, hosts, missing
from tests.cluster.test_launchers import TOLERANCE, losses, slow
from tests.commands import run_script
from tests.pool import PATIENCE, ROOT
from tests.training import write_config, write_corpus

WHY_NOT = missing("pdsh")
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"hosts: {WHY_NOT}")
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
STEPS, STRUCK = 150, 20  # steps of a run; the fault strikes once so many are done
NAMED_SECONDS = 30.0
SILENT = 10.0  # seconds after which a host is lost that only watches

# A rank that only watches, for the test that must be quick.
WATCHER = """
import os, sys, time
from datetime import timedelta
import torch.distributed as dist
from megacore.distributed.rank_info import RankInfo
from megacore.tools.diagnosis.heartbeat_client import HeartbeatClient
rank = int(sys.argv[1])
store = dist.TCPStore("node0", 29700, 2, rank == 0, timedelta(seconds=600), wait_for_workers=False)
place = RankInfo(rank, 2, 0, 1, "node0", 29700)
pulse = HeartbeatClient(store, place, float(sys.argv[2]))
while not store.check(["watchdog/heartbeat/hub"]) or pulse.connection is None:
    time.sleep(0.1)
time.sleep(5)
print("beating", flush=True)
time.sleep(3600)
"""


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Four hosts for all tests of this file; the clock of the last is ten minutes
    ahead where that can be had.
    """
    ahead = {"LD_PRELOAD": str(FAKETIME), "FAKETIME": "+600s"} if FAKETIME.exists() else {}
    with hosts(tmp_path_factory.mktemp("hosts"), 4, {3: ahead}) as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shared folder with a config, a corpus, and the run of one process."""
    found = tmp_path_factory.mktemp("shared")
    train = {"steps": STEPS, "precision": "fp64", "global_batch_size": 12}
    write_config(found, write_corpus(found), train=train, checkpoint={"every": 5})
    (found / ".deepspeed_env").write_text("OMP_NUM_THREADS=1\nDS_ACCELERATOR=cpu\n")
    one = run_script("launch/pretrain.py", "--config", f"{found}/config.json", f"log.dir={found}/one")
    assert one.returncode == 0, one.stderr
    return found


class Run:
    """A run under the supervisor, which is on a host of its own or on one that trains."""

    SCRIPT = "launch/pretrain.py"
    OVERRIDES: tuple[str, ...] = ()

    def __init__(
        self, four: Hosts, folder: Path, name: str, names: list[str], *options: str, head: int = 0
    ) -> None:
        self.four, self.folder, self.run, self.names = four, folder, folder / name, names
        self.hostfile = folder / f"hostfile_{name}"
        self.hostfile.write_text("".join(f"{host} slots=1\n" for host in names))
        script = [
            str(ROOT / self.SCRIPT),
            "--config",
            f"{folder}/config.json",
            f"log.dir={self.run}",
            *self.OVERRIDES,
        ]
        hostfile = ["--hostfile", str(self.hostfile)]
        if "--hosts-command" in options:
            options, hostfile = (*options, f"cat {self.hostfile}"), []
        launcher = ["deepspeed", *hostfile, *script]
        supervise = [
            "python",
            str(ROOT / "launch" / "supervise.py"),
            "--backoff",
            "1",
            "--poll",
            "inf",
            "--resize-pause",
            "0",
            *options,
        ]
        self.lines: list[tuple[float, str]] = []
        self.began = time.monotonic()
        self.process = four.popen(head, *supervise, *launcher, cwd=folder)
        self.readers = [
            threading.Thread(target=self._read, args=(pipe,))
            for pipe in (self.process.stdout, self.process.stderr)
        ]
        for reader in self.readers:
            reader.start()

    def _read(self, pipe: Iterator[str]) -> None:
        for line in pipe:
            self.lines.append((time.monotonic(), line.rstrip()))

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        for reader in self.readers:
            reader.join(30)
        said = "\n".join(f"{when - self.began:6.1f} {line}" for when, line in self.lines)
        self.run.with_suffix(".txt").write_text(said + "\n")  # for people

    @property
    def said(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def wait(self, happened: Callable[[], bool], seconds: float = PATIENCE) -> float:
        """When something has happened."""
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline, self.said[-6000:]
            assert self.process.poll() is None, self.said[-6000:]
            time.sleep(0.1)
        return time.monotonic()

    def step(self) -> int:
        """The last that was logged."""
        return len(losses(self.run)) if (self.run / "metrics.jsonl").exists() else 0

    def hosts(self) -> list[str]:
        """Those that the run has been given for its newest start."""
        return list(read_hostfile(self.run / "hostfile"))

    def strike(self, name: str, strike: Callable[[], object], named: str, after: int = STRUCK) -> None:
        """Lets a fault strike once `after` steps are done; all that remain have
        named it in time, and train again.
        """
        self.wait(lambda: self.step() >= after)
        starts = self.said.count("supervise: ") and len(re.findall(r"supervise: \d+ ranks", self.said))
        strike()
        struck, seen = time.monotonic(), len(self.lines)
        self.wait(lambda: any(re.search(named, line) for _, line in list(self.lines[seen:])))
        first = next(when for when, line in self.lines[seen:] if re.search(named, line))
        assert first - struck < NAMED_SECONDS, self.said[-6000:]
        self.wait(lambda: len(re.findall(r"supervise: \d+ ranks", self.said)) > starts)
        begun = self.step()
        again = self.wait(lambda: self.step() != begun or self.step() == STEPS)
        print(
            f"{name}: named after {first - struck:.1f} s, trains again after {again - struck:.1f} s",
            flush=True,
        )

    def finish(self, name: str) -> None:
        """The run ends with the losses and the weights of one process, and leaves
        nobody behind on any host.
        """
        status = self.process.wait(PATIENCE)
        for reader in self.readers:
            reader.join(30)
        assert status == 0, self.said[-6000:]
        ours, theirs = (losses(self.folder / each) for each in (self.run.name, "one"))
        assert ours[-1] == pytest.approx(theirs[-1], rel=TOLERANCE)
        before, after = (Reader(locate(self.folder / each)) for each in ("one", self.run.name))
        found = list(compare(before, after))
        assert all(
            part.what.startswith(("values", "only bits")) and part.relative < TOLERANCE for part in found
        ), found
        print(
            f"{name}: weights and moments differ by "
            f"{max((part.relative for part in found), default=0.0):.1e}",
            flush=True,
        )
        self.alone()

    def alone(self) -> None:
        """No host has a rank left, nor a process that watches."""
        deadline = time.monotonic() + PATIENCE
        while left := [
            line
            for host in self.four.inits
            for word in ("pretrain.py", "heartbeat")
            for line in self.four.processes(host, word)
        ]:
            assert time.monotonic() < deadline, left
            time.sleep(0.5)


def test_a_cut_link_is_named_by_both_sides(four: Hosts) -> None:
    """Neither side's collectives would end, nor would the launcher; and each side must end its own ranks."""
    ranks = [four.popen(host, "python", "-c", WATCHER, str(host), str(SILENT)) for host in range(2)]
    for rank in ranks:
        assert rank.stdout is not None and rank.stdout.readline() == "beating\n"
    four.cut(1)
    try:
        said = [rank.communicate(timeout=PATIENCE)[1] for rank in ranks]
    finally:
        four.mend(1)
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert (
        f"heartbeat: nothing was heard from host node1 (rank 1) for {SILENT:.0f} s" in said[0]
        and "node0 ends its rank 0" in said[0]
    )
    assert (
        "heartbeat: host node1 hears nothing from host node0 (rank 0)" in said[1]
        and "node1 ends its rank 1" in said[1]
    )


@slow
def test_a_name_that_no_host_has_is_said_before_ranks_meet(four: Hosts, folder: Path) -> None:
    """The store's client would try it for minutes, and say nothing of the name."""
    place = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "node9",
        "MASTER_PORT": "29701",
    }
    command = [
        "python",
        str(ROOT / "launch" / "pretrain.py"),
        "--config",
        f"{folder}/config.json",
        f"log.dir={folder}/nowhere",
    ]
    began = time.monotonic()
    variables = [f"{name}={value}" for name, value in place.items()]
    done = four.run(1, "env", *variables, *command, timeout=60)
    assert done.returncode == 1 and time.monotonic() - began < NAMED_SECONDS
    assert (
        "node1 knows no host named node9, where the ranks are to meet (MASTER_ADDR)"
        in done.stderr.splitlines()[-1]
    )


@slow
def test_a_spare_takes_the_place_of_a_host_that_is_cut_off(four: Hosts, folder: Path) -> None:
    """The lost host is up and could train: only the others cannot hear it."""
    with Run(four, folder, "cut", ["node0", "node1", "node2", "node3"], "--spares", "1") as run:
        try:
            run.strike("link cut", lambda: four.cut(1), r"nothing was heard from host node1 \(rank 1\)")
            assert run.hosts() == ["node0", "node2", "node3"]
            assert "no answer from node1 (" in run.said
            for host in ("node0", "node2"):
                assert re.search(
                    rf"{host}: heartbeat: nothing was heard from host node1 .*; {host} ends its rank",
                    run.said,
                )
        finally:
            four.mend(1)
        run.finish("link cut")


@slow
def test_the_first_host_may_be_lost(four: Hosts, folder: Path) -> None:
    """With it go the store, the answers to heartbeats, and whoever would judge."""
    with Run(four, folder, "first", ["node1", "node2", "node3"]) as run:
        try:
            run.strike(
                "link of rank 0's host cut",
                lambda: four.cut(1),
                r"host node2 hears nothing from host node1 \(rank 0\)",
            )
            assert (
                run.hosts() == ["node2", "node3"]
                and "host node3 hears nothing from host node1 (rank 0)" in run.said
            )
        finally:
            four.mend(1)
        run.finish("link of rank 0's host cut")


@slow
def test_a_host_that_is_gone_comes_back(four: Hosts, folder: Path) -> None:
    """Power is cut, the others go on, and from the next start on it trains again; a killed
    rank is the cause of that start.
    """
    with Run(four, folder, "gone", ["node0", "node1", "node2"]) as run:
        # The kernel of the dying host may still close its connections. Then its peers notice, and the
        # watchdog judges.
        named = (
            r"nothing was heard from host node1 \(rank 1\)|rank 1 \(host node1.* nor does any rank of "
            r"host node1"
        )
        run.strike("host gone", lambda: four.end(1), named)
        assert run.hosts() == ["node0", "node2"]
        four.boot(1)
        run.strike(
            "rank killed",
            lambda: kill_rank(four, 2),
            r"rank 1 .*host node2.* (is dead|has ended)",
            after=run.step() + 10,
        )
        assert run.hosts() == ["node0", "node1", "node2"]
        run.finish("host gone, back, and a rank killed")


class Stalling(Run):
    """A run whose watchdog does not wait for minutes."""

    OVERRIDES = ("parallel.hang_seconds=8",)


def kill_rank(four: Hosts, host: int, script: str = "launch/pretrain", signal_name: str = "KILL") -> None:
    """Sends a signal to the rank on a host; SIGKILL is what the kernel sends when memory runs out."""
    found = subprocess.run(
        four.inside(host, "ps", "-ww", "-eo", "pid,args", "--no-headers"), capture_output=True, text=True
    ).stdout
    pids = [
        line.split()[0]
        for line in found.splitlines()
        if re.search(rf"-u \S*{script}\.py --local_rank", line) and "launcher" not in line
    ]
    assert len(pids) == 1, found
    subprocess.run(four.inside(host, "kill", f"-{signal_name}", pids[0]), check=True)


# The lines that name a fault. `{rank}` and `{host}` are those that it strikes.
DEAD = r"{rank} \(host {host}, .* is dead: no such process any more|{rank} on host {host} has ended"
STOPPED = r"{rank} (\(host {host}, .*\)|on host {host}) is stopped \(by SIGSTOP or a debugger\)"
DOWN = r"{rank} \(host {host}, .* does not answer, nor does any rank of host {host}"
LOST = rf"nothing was heard from host {{host}} \({{rank}}\)|{DOWN}"
FIRST_LOST = rf"hears nothing from host {{host}} \({{rank}}\)|{DOWN}"
CUT_OFF = rf"the network of host {{host}} is cut|{FIRST_LOST}"
# Each fault with the lines for a host without rank 0, and for rank 0's host.
VERDICTS = {
    "kill -9": (DEAD, DEAD),
    "SIGSTOP": (STOPPED, STOPPED),
    "host down": (LOST, FIRST_LOST),
    "link cut": (LOST, CUT_OFF),
}


@slow
@pytest.mark.parametrize("host", [2, 1])
@pytest.mark.parametrize("fault", VERDICTS)
def test_the_first_failure_is_the_one_that_is_reported(
    four: Hosts, folder: Path, fault: str, host: int
) -> None:
    """A wrong name sends a user to a healthy machine. The first line and the supervisor's must be right."""
    is_first = host == 1  # rank 0 is on node1
    verdict = VERDICTS[fault][is_first].format(rank=f"rank {host - 1}", host=f"node{host}")
    strikes: dict[str, Callable[[], object]] = {
        "kill -9": lambda: kill_rank(four, host),
        "SIGSTOP": lambda: kill_rank(four, host, signal_name="STOP"),
        "host down": lambda: four.end(host),
        "link cut": lambda: four.cut(host),
    }

    name = f"{fault.replace(' ', '_')}_{host}"
    run_class = Stalling if fault == "SIGSTOP" else Run
    with run_class(four, folder, name, ["node1", "node2", "node0"], "--backoff", "60") as run:
        run.wait(lambda: run.step() >= STRUCK)
        strikes[fault]()
        struck, seen = time.monotonic(), len(run.lines)

        def lines(word: str) -> list[tuple[float, str]]:
            return [(when, line) for when, line in run.lines[seen:] if word in line]

        try:
            run.wait(lambda: bool(lines("supervise: the run ended")))
        finally:
            os.killpg(run.process.pid, signal.SIGTERM)
            run.process.wait(PATIENCE)
            if fault == "link cut":
                four.mend(host)
            if fault == "host down":
                four.boot(host)
        verdicts = [each for each in lines("") if re.search("(hang watchdog|heartbeat): ", each[1])]
        named, line = verdicts[0]
        ended, last = lines("supervise: the run ended")[0]
        times = f"named after {named - struck:.1f} s, ended after {ended - struck:.1f} s"
        print(f"\n{fault}, node{host}: {times}\n  {line}\n  {last}", flush=True)
        assert re.search(verdict, line) and named - struck < 20.0, run.said[-6000:]
        assert re.search(verdict, last), run.said[-6000:]
        run.alone()


@slow
def test_hosts_that_cannot_be_reached_are_left_out(four: Hosts, folder: Path) -> None:
    """One does not let anybody in, and one does not exist: each is named with what ssh says."""
    subprocess.run(
        four.inside(1, "mount", "--bind", "/dev/null", str(four.folder / "authorized")), check=True
    )
    try:
        with Run(four, folder, "refused", ["node0", "node1", "node9", "node2"]) as run:
            named = run.wait(lambda: "no answer from" in run.said)
            assert named - run.began < NAMED_SECONDS
            assert re.search(
                r"no answer from node1 \(.*Permission denied.*\), node9 \(.*Could not resolve hostname "
                r"node9.*\)",
                run.said,
            )
            print(f"sshd refuses, wrong name: named after {named - run.began:.1f} s", flush=True)
            run.finish("sshd refuses, wrong name")
            assert run.hosts() == ["node0", "node2"]
    finally:
        subprocess.run(four.inside(1, "umount", str(four.folder / "authorized")), check=True)


@slow
@pytest.mark.skipif(not FAKETIME.exists(), reason="faketime is not installed (apt-get install faketime)")
def test_clocks_may_be_apart(four: Hosts, folder: Path) -> None:
    """A host ten minutes ahead is no fault; and when one is lost, its clock does not delay the news."""
    with Run(four, folder, "clocks", ["node3", "node0", "node1"]) as run:
        there = subprocess.run(
            four.inside(0, "ssh", "node3", "date +%s"), capture_output=True, text=True
        ).stdout
        assert int(there) - time.time() > 590
        try:
            run.strike(
                "link cut, clocks apart", lambda: four.cut(1), r"nothing was heard from host node1 \(rank 2\)"
            )
            assert run.hosts() == ["node3", "node0"]
        finally:
            four.mend(1)
        run.finish("link cut, clocks apart")
