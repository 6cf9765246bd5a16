"""Hosts join and leave a run in good health: it saves, is laid out anew and goes
on, and nobody kills anything.

`pytest -s` shows the seconds from a change until the run is asked to stop, has stopped, and trains again.
"""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts, missing
from tests.cluster.test_faults import Run, kill_rank
from tests.cluster.test_launchers import TOLERANCE, losses, slow
from tests.commands import run_script
from tests.training import metrics, write_config, write_corpus

WHY_NOT = missing("pdsh")
pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=f"hosts: {WHY_NOT}"), slow]
STEPS = 150
LOOK, PAUSE = 2.0, 5.0
RULES = ("--poll", str(LOOK), "--resize-pause", str(PAUSE))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shared folder with a config, a corpus, and the run of one process."""
    found = tmp_path_factory.mktemp("shared")
    train = {"steps": STEPS, "precision": "fp64", "global_batch_size": 12}
    write_config(found, write_corpus(found, tokens=STEPS * 12 * 16), train=train, checkpoint={"every": 50})
    (found / ".deepspeed_env").write_text("OMP_NUM_THREADS=1\nDS_ACCELERATOR=cpu\n")
    one = run_script("launch/pretrain.py", "--config", f"{found}/config.json", f"log.dir={found}/one")
    assert one.returncode == 0, one.stderr
    return found


class Growing(Run):
    """A run whose hosts change while it goes on."""

    def layouts(self) -> list[tuple[int, int]]:
        """The number of data ranks of each start, and the step after which it began."""
        found = []
        for _, line in list(self.lines):
            if size := re.search(r"mesh: .* × data (\d+)", line):
                found.append((int(size[1]), 0))
            if after := re.search(r"resumed after step (\d+)", line):
                found[-1] = (found[-1][0], int(after[1]))
        return found

    def change(self, name: str, names: list[str], size: int) -> None:
        """Names other hosts, and waits until the run trains on them: as many data ranks."""
        self.wait(lambda: self.step() > (self.layouts() or [(0, 0)])[-1][1] + 10)
        starts, seen, struck = len(self.layouts()), len(self.lines), time.monotonic()
        self.name(names)
        heard = [
            self.wait(
                lambda pattern=pattern: any(re.search(pattern, line) for _, line in list(self.lines[seen:]))
            )
            - struck  # type: ignore[misc]
            for pattern in ("is asked to save and stop", r"supervise: \d+ ranks")
        ]
        self.wait(lambda: len(self.layouts()) > starts and self.step() > self.layouts()[-1][1])
        assert self.layouts()[-1][0] == size, self.said[-6000:]
        print(
            f"{name}: asked to stop after {heard[0]:.1f} s, saved and stopped after {heard[1]:.1f} s, "
            f"trains again after {time.monotonic() - struck:.1f} s",
            flush=True,
        )

    def name(self, names: list[str]) -> None:
        """Writes the hostfile anew, in one go."""
        file = self.hostfile.with_suffix(".new")
        file.write_text("".join(f"{host} slots=1\n" for host in names))
        file.replace(self.hostfile)

    def undisturbed(self) -> None:
        """No step was done twice, and no start failed."""
        assert losses(self.run) == pytest.approx(losses(self.folder / "one"), rel=TOLERANCE)
        assert "ended with status" not in self.said

    def proved(self, sizes: list[int]) -> None:
        """The run ends with the losses of one process, and no sample was lost or read twice,
        through these numbers of data ranks.
        """
        self.finish("a run of " + ", ".join(map(str, sizes)))
        assert [size for size, _ in self.layouts()] == sizes
        ours, theirs = (
            {line["step"]: line["loss"] for line in metrics(self.folder / each)}
            for each in (self.run.name, "one")
        )
        assert len(ours) == STEPS and ours == pytest.approx(theirs, rel=TOLERANCE)
        ends = [after for _, after in self.layouts()[1:]] + [STEPS]
        legs = [
            f"dp{size}:{end}" for (size, after), end in zip(self.layouts(), ends, strict=True) if end > after
        ]
        legs[-1] = legs[-1].partition(":")[0]
        proof = run_script(
            "launch/samples.py",
            "--config",
            f"{self.folder}/config.json",
            "--prove",
            "--layouts",
            ",".join(legs),
        )
        print(f"--layouts {','.join(legs)}\n{proof.stdout}", flush=True)
        assert proof.returncode == 0 and "0 missing, 0 repeated" in proof.stdout, proof.stdout


def test_hosts_of_a_hostfile_join_and_leave(two: Hosts, folder: Path) -> None:
    """A run in good health would never use them, or lose steps when they leave."""
    with Growing(two, folder, "hostfile", ["node0"], *RULES) as run:
        run.change("a host joins", ["node0", "node1"], 2)
        run.change("a host leaves", ["node0"], 1)
        run.proved([1, 2, 1])
        run.undisturbed()


def test_hosts_that_a_command_prints(two: Hosts, folder: Path) -> None:
    """The same, and a host that comes and goes all the time makes no more starts than the rules allow."""
    with Growing(
        two, folder, "command", ["node0"], "--poll", "1", "--resize-pause", "30", "--hosts-command"
    ) as run:
        run.wait(lambda: run.step() > 5)
        began = time.monotonic()
        while time.monotonic() - began < 90.0 and run.process.poll() is None:
            for names in (["node0", "node1"], ["node0"]):
                run.name(names)
                time.sleep(3.0)
        joined = run.said.count("node1 joins")
        print(f"a host that comes and goes for 90 s: joined {joined} times", flush=True)
        assert 1 <= joined <= 90 / 30
        run.proved([1] + [2, 1] * (len(run.layouts()) // 2))
        run.undisturbed()


def test_a_host_that_joins_and_cannot_train(two: Hosts, folder: Path) -> None:
    """It answers, and its ranks die at once.

    The run would fail with it again and again, until it is given up.
    """
    python = str(Path(sys.executable).resolve())
    subprocess.run(two.inside(1, "mount", "--bind", "/bin/false", python), check=True)
    try:
        with Growing(two, folder, "broken", ["node0"], "--poll", "2", "--resize-pause", "20") as run:
            run.wait(lambda: run.step() > 5)
            run.name(["node0", "node1"])
            run.wait(lambda: "left out for a while: node1" in run.said)
            left_out, step = time.monotonic(), run.step()
            run.wait(lambda: run.step() > step)
            assert run.hosts() == ["node0"] and run.said.count("node1 joins") == 1
            subprocess.run(two.inside(1, "umount", python), check=True)
            run.wait(lambda: run.said.count("node1 joins") == 2)
            assert time.monotonic() - left_out > 15.0, "not at the next look"
            run.proved([1, 1, 2])
    finally:
        subprocess.run(two.inside(1, "umount", "-q", python))  # where the test has failed


class SlowSave(Growing):
    """A run whose saves take three seconds."""

    SCRIPT = "tests/cluster/slow_save.py"
    OVERRIDES = ("checkpoint.every=10",)

    def change_while_saving(self, names: list[str], strike: Callable[[], object] = lambda: None) -> None:
        """Names other hosts as soon as a save has begun, strikes before it has
        ended, and waits for the next start.
        """
        folder = self.run / "checkpoints"
        self.wait(lambda: any(folder.glob("*.partial")))
        starts, asked = len(self.layouts()), self.said.count("asked to save and stop")
        self.name(names)
        self.wait(lambda: self.said.count("asked to save and stop") > asked)
        assert any(folder.glob("*.partial")), "the save ended too soon for this test"
        strike()
        self.wait(lambda: len(self.layouts()) > starts and self.step() > self.layouts()[-1][1])


def test_growing_while_a_save_is_unfinished(two: Hosts, folder: Path) -> None:
    """The save is waited for; and where its rank is killed then, the run goes on from
    the one before, on more hosts.
    """
    with SlowSave(two, folder, "saving", ["node0"], "--poll", "0.2", "--resize-pause", "0") as run:
        run.change_while_saving(["node0", "node1"])
        run.change_while_saving(["node0"], lambda: kill_rank(two, 0, "tests/cluster/slow_save"))
        run.proved([1, 2, 1])
