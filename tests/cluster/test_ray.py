"""launch/ray_train.py on a Ray cluster of two nodes on this machine: calm, a worker is
killed, a node joins, a node is lost.
"""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megacore.checkpoint.folder import locate
from megacore.checkpoint.read import Reader
from megacore.tools.processes import descendants
from megacore.tools.verify.checkpoint_diff import compare
from tests.commands import run_script
from tests.pool import ROOT
from tests.training import metrics, write_config, write_corpus

ABSENT = "" if importlib.util.find_spec("ray") else "Ray is not installed (pip install -e '.[ray]')"
WHY_NOT = ABSENT or ("" if os.environ.get("MEGACORE_CLUSTER") else "minutes long: bash tests/cluster/run.sh")
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"Ray: {WHY_NOT}")
STEPS = 20
WORKERS = 4
CPUS = 2  # of a node
PATIENCE = 480.0  # seconds, on a busy machine
GROWING = 40  # steps of a run whose nodes join and leave
RANKS_OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in RANKS_OWN} | {
    "OMP_NUM_THREADS": "1"
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes that can be lost, and of a head without room for workers."""
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(WORKERS // CPUS):
            found.add_node(num_cpus=CPUS)
        yield found
    finally:
        found.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config of slow steps, so that there is time to disturb them, and its corpus."""
    found = tmp_path_factory.mktemp("ray")
    train = {"steps": STEPS, "seq_len": 128, "global_batch_size": 16}
    sections = {"model": {"hidden_size": 128, "max_positions": 128}, "checkpoint": {"every": 5}}
    write_config(found, write_corpus(found, tokens=GROWING * 16 * 128), train=train, **sections)
    return found


def calm(folder: Path, name: str, *overrides: str, ranks: int = 1) -> Path:
    """A run without Ray that nobody disturbs."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    script = [str(ROOT / "launch" / "pretrain.py"), "--config", "config.json", f"log.dir={name}", *overrides]
    command = [sys.executable, *launcher, *script]
    done = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return folder / name


@contextmanager
def started(cluster: Any, folder: Path, name: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A run on the cluster, in `folder`/`name`, which ends with the block."""
    command = [
        sys.executable,
        ROOT / "launch" / "ray_train.py",
        "--config",
        "config.json",
        f"log.dir={name}",
        *arguments,
    ]
    with (folder / f"{name}.txt").open("w") as said:
        variables = ENVIRONMENT | {"RAY_ADDRESS": cluster.address}
        process = subprocess.Popen(command, cwd=folder, env=variables, text=True, stdout=said, stderr=said)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def finish(process: "subprocess.Popen[str]", folder: Path, name: str, status: int = 0) -> str:
    """What a run has said by its end."""
    process.wait(PATIENCE)
    said = (folder / f"{name}.txt").read_text()
    assert process.returncode == status, said[-3000:]
    return said


def await_step(folder: Path, name: str, step: int) -> None:
    """Waits until a run has done some steps."""
    deadline, records = time.monotonic() + PATIENCE, folder / name / "metrics.jsonl"
    while not records.exists() or not (done := metrics(folder / name)) or done[-1]["step"] < step:
        assert time.monotonic() < deadline, (
            f"step {step} was not reached\n{(folder / f'{name}.txt').read_text()[-3000:]}"
        )
        time.sleep(0.1)


def sizes(folder: Path, name: str) -> list[int]:
    """The numbers of data ranks with which a run has begun, start after start."""
    said = (folder / f"{name}.txt").read_text()
    return [int(line.partition(" × data ")[2].split()[0]) for line in said.splitlines() if "mesh: " in line]


def await_said(folder: Path, name: str, words: str) -> None:
    """Waits until a run has said something."""
    deadline = time.monotonic() + PATIENCE
    while words not in (said := (folder / f"{name}.txt").read_text()):
        assert time.monotonic() < deadline, said[-3000:]
        time.sleep(0.1)


def await_size(folder: Path, name: str, wanted: list[int]) -> None:
    """Waits until a run has begun with these sizes."""
    deadline = time.monotonic() + PATIENCE
    while sizes(folder, name) != wanted:
        assert time.monotonic() < deadline, (folder / f"{name}.txt").read_text()[-3000:]
        time.sleep(0.1)


def workers(cluster: Any) -> list[int]:
    """The processes of Ray's workers that train."""
    raylets = [node.all_processes["raylet"][0].process.pid for node in cluster.worker_nodes]
    below = [pid for raylet in raylets for pid in descendants(raylet)]
    return [pid for pid in below if b"RayTrainWorker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def losses(run: Path) -> list[tuple[int, float]]:
    """Steps and losses."""
    return [(line["step"], line["loss"]) for line in metrics(run)]


def differences(ours: Path, theirs: Path) -> list[float]:
    """Relative differences of tensors between the last checkpoints of two runs;
    empty if they are bitwise equal.
    """
    return [part.relative for part in compare(Reader(locate(theirs)), Reader(locate(ours)))]


def test_a_killed_worker_goes_on(cluster: Any, folder: Path) -> None:
    """A rank that dies would end the run, or change it.

    The calm runs, in the same layout and of one process, are without Ray.
    """
    layout = ["parallel.tensor=2", "parallel.pipeline=2"]
    with started(cluster, folder, "killed", "--world", str(WORKERS), *layout) as run:
        await_step(folder, "killed", 8)
        os.kill(workers(cluster)[-1], signal.SIGKILL)
        said = finish(run, folder, "killed")
    assert "resumed after step" in said
    same, one = calm(folder, "same", *layout, ranks=WORKERS), calm(folder, "one_fp32")
    assert losses(folder / "killed") == losses(same) and len(losses(same)) == STEPS
    assert not differences(folder / "killed", same)
    assert [loss for _, loss in losses(same)] == pytest.approx([loss for _, loss in losses(one)], rel=1e-5)
    state = json.loads((folder / "killed" / "checkpoint_manager_snapshot.json").read_text())
    assert f"step_{STEPS:08d}" in json.dumps(state)  # Ray knows our last checkpoint


def starts(folder: Path, name: str) -> list[tuple[int, int]]:
    """The number of data ranks of each start, and the step after which it began."""
    said = (folder / f"{name}.txt").read_text()
    after = [int(step) for step in re.findall(r"resumed after step (\d+)", said)]
    return list(zip(sizes(folder, name), [0, *after], strict=False))


def test_a_node_joins_a_run_in_good_health_and_one_is_lost(cluster: Any, folder: Path) -> None:
    """Nobody kills anything for the first to be used; and the run would wait for the second for ever."""
    cluster.remove_node(next(iter(cluster.worker_nodes)))
    fp64 = ["train.precision=fp64", f"train.steps={GROWING}"]
    rules = ["--poll", "2", "--resize-pause", "5"]
    with started(cluster, folder, "elastic", "--world", "1:2", "--cpus", str(CPUS), *rules, *fp64) as run:
        await_step(folder, "elastic", 6)
        began, node = time.monotonic(), cluster.add_node(num_cpus=CPUS)
        await_said(folder, "elastic", "the Ray cluster has 2 slots: 1 ranks become 2")
        asked = time.monotonic() - began
        await_size(folder, "elastic", [1, 2])
        # a checkpoint of two workers is there
        await_step(folder, "elastic", starts(folder, "elastic")[1][1] + 7)
        print(
            f"a node joins: asked to stop after {asked:.1f} s, trains again within "
            f"{time.monotonic() - began:.1f} s",
            flush=True,
        )
        began = time.monotonic()
        cluster.remove_node(node, allow_graceful=False)
        await_size(folder, "elastic", [1, 2, 1])
        print(f"a node is lost: begins again after {time.monotonic() - began:.1f} s", flush=True)
        said = finish(run, folder, "elastic")
    cluster.add_node(num_cpus=CPUS)  # for the tests that follow
    assert said.count("ended with status") == 1, "the lost node alone makes a start fail"
    one = calm(folder, "one_fp64", *fp64)
    ours, theirs = losses(folder / "elastic"), dict(losses(one))
    assert [loss for _, loss in ours] == pytest.approx([theirs[step] for step, _ in ours], rel=1e-9), (
        "those of steps done twice too"
    )
    assert {step for step, _ in ours} == set(range(1, GROWING + 1))
    assert max(differences(folder / "elastic", one), default=0.0) < 1e-9
    (_, _), (_, grown), (_, shrunk) = starts(folder, "elastic")
    legs = f"dp1:{grown},dp2:{shrunk},dp1"
    words = ["--config", str(folder / "config.json"), "--prove", "--layouts", legs, *fp64]
    proof = run_script("launch/samples.py", *words)
    print(f"--layouts {legs}\n{proof.stdout}", flush=True)
    assert proof.returncode == 0 and "0 missing, 0 repeated" in proof.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--world", "2", "data.train=nowhere"], "data error: nowhere.bin: missing"),
        (
            ["--world", "8"],
            "config error: --world: 8 workers of 1 CPU do not fit on the cluster, which has 4 CPUs",
        ),
    ],
)
def test_mistakes_are_one_line(cluster: Any, folder: Path, arguments: list[str], said: str) -> None:
    """Ray would start a run again and again whose data are missing, or wait for machines
    that the cluster does not have.
    """
    with started(cluster, folder, "mistaken", *arguments) as run:
        heard = finish(run, folder, "mistaken", status=2)
    assert heard.splitlines()[-1].startswith(said), heard
    assert "[FailurePolicy] RETRY" not in heard
