"""Every launcher on two hosts of two ranks: the run has the losses and the checkpoint of one process."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from megacore.checkpoint.folder import locate
from megacore.checkpoint.read import Reader
from megacore.tools.verify.checkpoint_diff import compare
from tests.cluster.hosts import Hosts, missing
from tests.commands import run_script
from tests.pool import PATIENCE, ROOT
from tests.training import write_config, write_corpus

WHY_NOT = missing("pdsh")
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"hosts: {WHY_NOT}")
slow = pytest.mark.skipif(
    not os.environ.get("MEGACORE_CLUSTER"), reason="minutes long: bash tests/cluster/run.sh"
)
STEPS = 6
TOLERANCE = 1e-9  # fp64: sums in another order, over some steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shared folder with a config of two stages of two tensor ranks, a corpus, and
    the run of one process.
    """
    found = tmp_path_factory.mktemp("shared")
    write_config(
        found,
        write_corpus(found),
        train={"steps": STEPS, "precision": "fp64"},
        parallel={"timeout_seconds": 600},
    )
    one = run_script("launch/pretrain.py", "--config", f"{found}/config.json", f"log.dir={found}/one")
    assert one.returncode == 0, one.stderr
    return found


def arguments(folder: Path, name: str) -> list[str]:
    """The script and its arguments; `name` is the run's."""
    script = [
        str(ROOT / "launch" / "pretrain.py"),
        "--config",
        f"{folder}/config.json",
        f"log.dir={folder}/{name}",
    ]
    return [*script, "parallel.tensor=2", "parallel.pipeline=2"]


def check(folder: Path, name: str, done: "subprocess.CompletedProcess[str]") -> None:
    """The run ended well, with the losses and the weights of one process."""
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    ours, theirs = (losses(folder / run) for run in (name, "one"))
    assert len(ours) == STEPS and ours == pytest.approx(theirs, rel=TOLERANCE)
    before, after = (Reader(locate(folder / run)) for run in ("one", name))
    found = list(compare(before, after))
    assert all(
        part.what.startswith(("values", "only bits")) and part.relative < TOLERANCE for part in found
    ), found


def losses(run: Path) -> list[float]:
    """Of every step."""
    return [
        line["loss"]
        for text in (run / "metrics.jsonl").read_text().splitlines()
        if "loss" in (line := json.loads(text))
    ]


def test_deepspeed_over_pdsh(two: Hosts, folder: Path) -> None:
    """The command of the README, on two machines."""
    (folder / "hostfile").write_text("node0 slots=2\nnode1 slots=2\n")
    (folder / ".deepspeed_env").write_text("OMP_NUM_THREADS=1\nDS_ACCELERATOR=cpu\n")
    done = two.run(0, "deepspeed", "--hostfile", "hostfile", *arguments(folder, "pdsh"), cwd=folder)
    check(folder, "pdsh", done)


@slow
def test_torchrun_c10d(two: Hosts, folder: Path) -> None:
    """torchrun's own rendezvous, whose address is the first host's."""
    meet = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "node0:29400",
        "--rdzv-id",
        "run",
    ]
    check(folder, "c10d", on_both(two, [["torchrun", *meet, *arguments(folder, "c10d")]] * 2, folder))


@slow
def test_torchrun_static(two: Hosts, folder: Path) -> None:
    """torchrun with numbered nodes."""
    meet = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "node0", "--master-port", "29401"]
    commands = [
        ["torchrun", *meet, "--node-rank", str(host), *arguments(folder, "static")] for host in range(2)
    ]
    check(folder, "static", on_both(two, commands, folder))


@slow
@pytest.mark.parametrize(("tensor", "warns"), [(2, False), (4, True)])
def test_tensor_ranks_of_two_hosts_are_reported(two: Hosts, folder: Path, tensor: int, warns: bool) -> None:
    """Two hosts of one boot that differ in their names and networks, as containers do."""
    (folder / "hostfile").write_text("node0 slots=2\nnode1 slots=2\n")
    (folder / ".deepspeed_env").write_text("OMP_NUM_THREADS=1\nDS_ACCELERATOR=cpu\n")
    settings = [f"parallel.tensor={tensor}", "parallel.pipeline=1", "train.steps=1"]
    name = f"tensor{tensor}"
    done = two.run(0, "deepspeed", "--hostfile", "hostfile", *arguments(folder, name), *settings, cwd=folder)
    assert done.returncode == 0, done.stderr
    warning = (
        "WARNING: tensor ranks 0-3 are on 2 hosts (node0, node1): every layer waits for the network "
        "(parallel.tensor=2 fits on a host)"
    )
    assert done.stdout.count(warning) == done.stdout.count("tensor ranks") == int(warns), done.stdout


def on_both(two: Hosts, commands: list[list[str]], folder: Path) -> "subprocess.CompletedProcess[str]":
    """A command on each host, at a time; what the first says, and the worst status."""
    started = [two.popen(host, *command, cwd=folder) for host, command in enumerate(commands)]
    ended = [(process.communicate(timeout=PATIENCE), process.returncode) for process in started]
    return subprocess.CompletedProcess(
        commands[0],
        max(status for _, status in ended),
        *("".join(part) for part in zip(*(said for said, _ in ended), strict=True)),
    )


@slow
@pytest.mark.skipif(bool(missing("mpirun")), reason=f"hosts: {missing('mpirun')}")
@pytest.mark.parametrize(("slots", "options"), [(2, []), (1, ["--map-by", "ppr:1:node"])])
def test_mpirun(two: Hosts, folder: Path, slots: int, options: list[str]) -> None:
    """OpenMPI with a list of hosts: as many ranks as they have slots, and one rank a host."""
    name = f"mpirun{slots}"
    ranks = [
        "--allow-run-as-root",
        "--host",
        f"node0:{slots},node1:{slots}",
        "-n",
        str(2 * slots),
        *options,
        "-x",
        "OMP_NUM_THREADS",
    ]
    layout = [] if slots == 2 else ["parallel.tensor=1"]
    done = two.run(
        0,
        "mpirun",
        *ranks,
        "-x",
        "MASTER_ADDR=node0",
        "-x",
        "PATH",
        "python",
        *arguments(folder, name),
        *layout,
        cwd=folder,
    )
    check(folder, name, done)
