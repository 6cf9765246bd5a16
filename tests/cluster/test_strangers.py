"""A run of two hosts goes on for a minute beside strangers, and a host that is frozen
meanwhile is named within its limit.

The strangers know every port and door of heartbeats and of figures, flood them, and hold idle, slow and
garbled connections: from a third host, and on both hosts as another user and as the run's own. Somebody also
writes into the run's records. `pytest -s` shows the figures.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from megacore.tools.relaunch.supervisor import Supervisor
from tests.cluster.hosts import Hosts, hosts, missing
from tests.cluster.test_faults import Run
from tests.cluster.test_launchers import slow
from tests.training import write_config, write_corpus
from tests.unit.test_guardians import DAMAGED

WHY_NOT = missing("pdsh", "ss", "prlimit")
pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=f"hosts: {WHY_NOT}"), slow]
STRANGE_SECONDS = 60.0
SILENT_SECONDS = 5.0  # of a host, after which it is lost
PORT = 9400
DESCRIPTORS = 128  # of each rank


class Watched(Run):
    """A run in whose records others write."""

    def step(self) -> int:
        return Supervisor([], self.run).progress()[1]


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Hosts]:
    with hosts(tmp_path, 3) as found:
        yield found


def listening(three: Hosts, host: int) -> list[str]:
    """What a host's heartbeat listens on, as `tests.strangers` takes it, but for the host's name."""

    def ask(kind: str) -> list[str]:
        said = subprocess.run(
            three.inside(host, "ss", f"-Hln{kind}p"), capture_output=True, text=True, check=True
        ).stdout
        return [line for line in said.splitlines() if '"python' in line]

    ports = [f"udp:{port}" for line in ask("u") for port in re.findall(r"[*\]0]:(\d+)", line)]
    return [*ports, *(f"unix:{name}" for line in ask("x") for name in re.findall(r"@([0-9a-f]{5})\s", line))]


def ranks_on(three: Hosts, host: int) -> list[str]:
    """The processes of a host that train, by their numbers there."""
    said = subprocess.run(
        three.inside(host, "ps", "-ww", "-eo", "pid,args", "--no-headers"), capture_output=True, text=True
    ).stdout
    return [
        line.split()[0]
        for line in said.splitlines()
        if re.search(r"-u \S*launch/pretrain\.py --local_rank", line)
    ]


def scraped(three: Hosts, host: int) -> float:
    """Seconds that a scrape from the third host takes."""
    began = time.monotonic()
    code = (
        f"import urllib.request as u; print(u.urlopen('http://node{host}:{PORT}/metrics', "
        "timeout=10).read().decode())"
    )
    said = subprocess.run(three.inside(2, "python3", "-c", code), capture_output=True, text=True, timeout=20)
    assert "megacore_loss" in said.stdout, said.stderr[-500:]
    return time.monotonic() - began


def test_a_run_goes_on_beside_strangers(three: Hosts, tmp_path: Path) -> None:
    train = {"steps": 10**6, "precision": "fp64", "global_batch_size": 12}
    more = {"parallel": {"heartbeat_seconds": SILENT_SECONDS}, "log": {"prometheus_port": PORT}}
    write_config(tmp_path, write_corpus(tmp_path), train=train, checkpoint={"every": 20, "keep": 2}, **more)
    (tmp_path / ".deepspeed_env").write_text("OMP_NUM_THREADS=1\nDS_ACCELERATOR=cpu\n")
    with Watched(three, tmp_path, "run", ["node0", "node1"]) as run, ExitStack() as ended:
        run.wait(lambda: run.step() >= 20)
        found = {host: listening(three, host) for host in (0, 1)}
        assert all(
            sorted(each.split(":")[0] for each in those) == ["udp", "unix"] for those in found.values()
        ), found
        for host in found:
            for rank in ranks_on(three, host):
                subprocess.run(
                    three.inside(host, "prlimit", "--pid", rank, f"--nofile={DESCRIPTORS}"), check=True
                )
        quiet = run.step()
        time.sleep(10)
        pace = (run.step() - quiet) / 10
        ports = [
            each.replace("udp:", f"udp:node{host}:")
            for host, those in found.items()
            for each in those
            if each.startswith("udp")
        ]
        far = [*ports, *(f"tcp:node{host}:{PORT}" for host in found)]
        works = [
            (2, far),
            *((host, [door]) for host, those in found.items() for door in those if door.startswith("unix")),
        ]
        for host, targets in works:
            for who in ([], ["--nobody"]):
                command = ["python", "-m", "tests.strangers", str(10 * STRANGE_SECONDS), *targets, *who]
                stranger = three.popen(host, *command)
                ended.callback(stranger.wait)
                ended.callback(stranger.kill)
        began, first, seconds = time.monotonic(), run.step(), []
        while time.monotonic() < began + STRANGE_SECONDS:
            with (run.run / "metrics.jsonl").open("ab") as out:
                out.write(b"\n".join(DAMAGED) + b"\n")
            seconds += [scraped(three, host) for host in found]
            before = run.step()
            run.wait(lambda before=before: run.step() > before, 20)
        steps = run.step() - first
        lasted = time.monotonic() - began
        said = run.said
        assert (
            said.count(" ranks on ") == 1
            and "supervise: the run ended" not in said
            and "Too many open files" not in said
        ), said[-6000:]
        assert "watches on" not in said and "could not look" not in said, said[-6000:]
        struck = time.monotonic()
        # all of the host but its first process, its sshd
        subprocess.run(three.inside(1, "sh", "-c", "kill -STOP -1"), check=False)
        os.kill(three.pids[1], signal.SIGSTOP)
        run.wait(lambda: "nothing was heard from host node1 (rank 1)" in run.said, 60)
        named = (
            next(when for when, line in run.lines if "nothing was heard from host node1 (rank 1)" in line)
            - struck
        )
        assert named < 1.5 * SILENT_SECONDS, run.said[-6000:]
        run.wait(lambda: "1 ranks on 1 of 2 hosts" in run.said)
        last = run.step()
        again = run.wait(lambda: run.step() > last) - struck
    print(
        f"beside strangers for {lasted:.0f} s: {steps} steps, {steps / lasted:.2f} a second, and "
        f"{pace:.2f} before; {len(seconds)} scrapes,"
        f" the slowest in {max(seconds):.2f} s; a host frozen meanwhile was named after {named:.1f} s, "
        "and the other trains again after"
        f" {again:.1f} s"
    )
