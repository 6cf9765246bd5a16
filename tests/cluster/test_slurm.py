"""launch/slurm under a real Slurm: a run on two nodes, preemption, the signal before
the time limit, arrays.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import Slurm, missing, slurm
from tests.commands import run_script
from tests.pool import ROOT
from tests.training import write_config, write_corpus

WHY_NOT = missing() or (
    "" if os.environ.get("MEGACORE_CLUSTER") else "minutes long: bash tests/cluster/run.sh"
)
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"Slurm: {WHY_NOT}")
# the nodes have two cores
OPTIONS = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1")
SCRIPT = str(ROOT / "launch" / "slurm" / "pretrain.sbatch")
STEPS = 40


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm for all tests of this file."""
    with slurm(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where jobs are submitted: the checkout's scripts, a corpus and a config of slow steps, so that
    there is time to disturb them.
    """
    found = tmp_path_factory.mktemp("submitted")
    (found / "launch").symlink_to(ROOT / "launch")
    train = {"steps": STEPS, "seq_len": 128, "global_batch_size": 16, "precision": "fp64"}
    write_config(
        found,
        write_corpus(found, tokens=20_000),
        train=train,
        model={"hidden_size": 128, "max_positions": 128},
    )
    return found


@pytest.fixture(scope="module")
def calm(folder: Path, cluster: Slurm) -> Path:
    """The run that nobody disturbs."""
    job = cluster.submit(
        folder, *OPTIONS, "--no-requeue", SCRIPT, "--config", "config.json", f"log.dir={folder}/calm"
    )
    cluster.wait(job, "COMPLETED", seconds=180)
    return folder / "calm"


def losses(run: Path) -> list[tuple[int, float]]:
    """Steps and losses that a run has on record."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def await_step(run: Path, step: int) -> None:
    """Waits until a run has done some steps."""
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or not losses(run) or losses(run)[-1][0] < step:
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.2)


def assert_equal_bitwise(ours: Path, theirs: Path) -> None:
    """Losses and the last checkpoints' tensors of two runs."""
    assert losses(ours) == losses(theirs) and len(losses(ours)) == STEPS
    done = run_script("launch/checkpoint.py", "diff", str(ours), str(theirs))
    assert done.returncode == 0, done.stdout


def test_two_nodes_train_as_one_process_does(folder: Path, calm: Path) -> None:
    """Ranks of two nodes would not find each other, or train apart."""
    own = [f"log.dir={folder}/one", "checkpoint.last=false"]
    one = run_script("launch/pretrain.py", "--config", f"{folder}/config.json", *own)
    assert one.returncode == 0, one.stderr
    for (_, ours), (_, theirs) in zip(losses(calm), losses(folder / "one"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)


def test_a_preempted_job_goes_on(cluster: Slurm, folder: Path, calm: Path) -> None:
    """Preemption would lose the steps since the last checkpoint, or end the run."""
    job = cluster.submit(
        folder, *OPTIONS, "--partition=low", SCRIPT, "--config", "config.json", f"log.dir={folder}/preempted"
    )
    await_step(folder / "preempted", 5)
    other = cluster.submit(folder, "--nodes=2", "--exclusive", "--partition=high", "--wrap=sleep 2")
    cluster.wait(other, "COMPLETED", seconds=90)
    assert int(cluster.fields(job)["Restarts"]) == 1
    cluster.wait(job, "COMPLETED", seconds=240)
    assert "resumed after step" in (folder / f"slurm-megacore-{job}.out").read_text()
    assert_equal_bitwise(folder / "preempted", calm)


def test_status_75_is_requeued(cluster: Slurm, folder: Path, calm: Path) -> None:
    """A run that saved because its time was nearly over would not go on.

    Slurm sends the signal of `--signal` as `scancel` does here: to the tasks alone.
    """
    job = cluster.submit(folder, *OPTIONS, SCRIPT, "--config", "config.json", f"log.dir={folder}/signalled")
    await_step(folder / "signalled", 5)
    cluster.run("scancel", "--signal=USR1", job)
    deadline = time.monotonic() + 60
    while int(cluster.fields(job)["Restarts"]) == 0:
        assert time.monotonic() < deadline, (folder / f"slurm-megacore-{job}.out").read_text()
        time.sleep(0.5)
    cluster.wait(job, "COMPLETED", seconds=240)
    assert_equal_bitwise(folder / "signalled", calm)


def test_a_time_limit_is_no_end(cluster: Slurm, folder: Path, calm: Path) -> None:
    """The signal that Slurm itself sends before the time limit would end the run, or
    the requeued job would not go on.
    """
    options = [*OPTIONS, "--time=2", "--signal=USR1@40"]
    job = cluster.submit(folder, *options, SCRIPT, "--config", "config.json", f"log.dir={folder}/limited")
    await_step(folder / "limited", 5)
    # The ranks must not finish before their time. Slurm lets stopped ones go on when it sends its signal.
    for pid in ranks_of(folder / "limited"):
        os.kill(pid, signal.SIGSTOP)
    cluster.wait(job, "COMPLETED", seconds=360)
    # on a slow machine its second start comes near the limit too
    assert int(cluster.fields(job)["Restarts"]) >= 1
    assert "stopped on request" in (folder / f"slurm-megacore-{job}.out").read_text()
    assert_equal_bitwise(folder / "limited", calm)


def ranks_of(run: Path) -> list[int]:
    """The processes of this machine that train a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words = path.read_bytes().decode(errors="replace").split("\0")
            if Path(words[0]).name == "python" and f"log.dir={run}" in words:
                found.append(int(path.parent.name))
    return found


def test_srun_alone(cluster: Slurm, folder: Path, calm: Path) -> None:
    """The command of the README, without a batch script."""
    script = [
        "python",
        str(ROOT / "launch" / "pretrain.py"),
        "--config",
        "config.json",
        f"log.dir={folder}/srun",
    ]
    cluster.run("srun", "--ntasks=4", "--ntasks-per-node=2", *script, cwd=folder, timeout=120)
    assert_equal_bitwise(folder / "srun", calm)


def submit_instead(cluster: Slurm, folder: Path, script: str, *options: str) -> str:
    """The number of a job whose ranks run another script than the training script, in a new folder."""
    (folder / "launch").mkdir(parents=True)
    (folder / "launch" / "pretrain.py").write_text(script)
    return cluster.submit(folder, "--nodes=2", "--ntasks-per-node=2", *options, SCRIPT)


def test_ranks_need_not_end_at_once(cluster: Slurm, folder: Path) -> None:
    """The first rank to end with 75 would have srun kill the others, whose status is another:
    the job would not be requeued.
    """
    script = (
        "import os, sys, time\ntime.sleep(int(os.environ['SLURM_PROCID']))\nsys.exit(0 if "
        "'SLURM_RESTART_COUNT' in os.environ else 75)\n"
    )
    job = submit_instead(cluster, folder / "apart", script, "--gpus-per-node=0")
    found = cluster.wait(job, "COMPLETED", "FAILED", seconds=240)
    assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "1")


def test_one_visible_gpu_a_task(cluster: Slurm, folder: Path) -> None:
    """Slurm would refuse the options together, or show every task all GPUs of its node."""
    script = (
        "import os\nprint('rank', os.environ['SLURM_PROCID'], 'sees', "
        "os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\n"
    )
    job = submit_instead(cluster, folder / "seen", script, "--gpus-per-node=2", "--gpus-per-task=1")
    cluster.wait(job, "COMPLETED", seconds=60)
    said = (folder / "seen" / f"slurm-megacore-{job}.out").read_text()
    assert sorted(line for line in said.splitlines() if line.startswith("rank")) == [
        f"rank {rank} sees {rank % 2}" for rank in range(4)
    ]


def test_an_array_trains_each_line(cluster: Slurm, folder: Path) -> None:
    """All tasks would train the same, or write into one folder."""
    rows = ["optim.lr=1e-3 train.steps=3", "optim.lr=2e-3 train.steps=4"]
    (folder / "runs.txt").write_text(
        "".join(f"{row} log.dir={folder}/array_{i}\n" for i, row in enumerate(rows, 1))
    )
    options = ("--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1", "--array=1-3")
    job = cluster.submit(folder, *options, SCRIPT, "--runs", "runs.txt", "--config", "config.json")
    for task in (1, 2):
        cluster.wait(f"{job}_{task}", "COMPLETED", seconds=120)
        assert losses(folder / f"array_{task}")[-1][0] == task + 2
    failed = cluster.wait(f"{job}_3", "FAILED", seconds=60)
    assert failed["ExitCode"] == "2:0"
    said = "".join(path.read_text() for path in folder.glob("slurm-megacore-*.out"))
    assert "config error: --runs: runs.txt has no line 3" in said
