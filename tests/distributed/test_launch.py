"""The commands that users type: every launcher starts the same training, mistakes end in one
line, failures name their cause.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megacore.tools.local_ranks import free_port
from megacore.tools.prepare.indexed_writer import IndexedWriter
from tests import training
from tests.commands import run_script
from tests.pool import PATIENCE, ROOT

PRETRAIN = str(ROOT / "launch/pretrain.py")
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
} | {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}

LAUNCHERS: dict[str, Callable[[int], list[str]]] = {
    "python": lambda ranks: [sys.executable],
    "torchrun": lambda ranks: ["torchrun", "--nproc-per-node", str(ranks), "--master-port", str(free_port())],
    # --hostfile="": not the one that this machine may have by default
    "deepspeed": lambda ranks: [
        "deepspeed",
        "--hostfile=",
        "--num_gpus",
        str(ranks),
        "--master_port",
        str(free_port()),
    ],
    "mpirun": lambda ranks: [
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "-x",
        "MASTER_PORT",
        "-n",
        str(ranks),
        sys.executable,
    ],
}

# a run of many steps on a busy machine would measure compiled blocks first
NOT_MEASURED = "train.compile=false"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("launch")
    return training.write_config(
        folder, training.write_corpus(folder), train=training.BASE["train"] | {"steps": 4}
    )


def start(command: list[str], *, anew: bool = False, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, in a session of its own so that nothing outlives it.

    A launcher that is a script in Python runs in a process that has imported torch already, but for `anew`.
    """
    script = shutil.which(command[0], path=ENVIRONMENT["PATH"])
    assert script is not None
    if not anew and command[0] in ("torchrun", "deepspeed"):
        return run_script(
            script,
            *command[1:],
            **{name: ENVIRONMENT[name] for name in ("DS_ACCELERATOR", "PATH")},
            **variables,
        )
    with subprocess.Popen(
        command,
        env=ENVIRONMENT | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=ROOT,
    ) as process:
        try:
            out, err = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.fixture(scope="module")
def alone(config: str, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process, started by no launcher."""
    folder = tmp_path_factory.mktemp("alone")
    done = run_script(PRETRAIN, "--config", config, f"log.dir={folder}")
    assert done.returncode == 0, done.stderr
    return [m["loss"] for m in training.metrics(folder)]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_agree(config: str, alone: list[float], tmp_path: Path, launcher: str) -> None:
    command = LAUNCHERS[launcher](2)
    if shutil.which(command[0], path=ENVIRONMENT["PATH"]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = start(
        [*command, PRETRAIN, "--config", config, f"log.dir={tmp_path}/run"], MASTER_PORT=str(free_port())
    )
    assert done.returncode == 0, done.stderr
    assert len(ours := training.metrics(tmp_path / "run")) == 4
    assert [m["loss"] for m in ours] == pytest.approx(alone, rel=1e-5)


ONE_MACHINE = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def test_the_documents_launch_commands_work_as_printed() -> None:
    """All commands that start a run on this machine; `srun` needs Slurm."""
    page = (ROOT / "docs/training.md").read_text(encoding="utf-8").partition("## Start a run")[2]
    block = re.search(r"```bash[^\n]*\n(.*?)```", page, re.DOTALL)
    assert block is not None
    commands = [shlex.split(line, comments=True) for line in block[1].splitlines()]
    local_commands = [command for command in commands if command[0] != "srun"]
    assert {command[0] for command in local_commands} == {"python", *LAUNCHERS}
    for command in local_commands:
        if shutil.which(command[0], path=ENVIRONMENT["PATH"]) is not None:
            done = start([*command, "--print-config"], **ONE_MACHINE)
            assert done.returncode == 0 and done.stdout.count("train.steps ") == 1, (
                f"{command}: {done.stderr}"
            )


def test_print_config_tells_origins(config: str) -> None:
    done = run_script(PRETRAIN, "--config", config, "--print-config", "train.steps=7")
    lines = [line for line in done.stdout.splitlines() if line and not line.startswith("#")]
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert rows["train.steps"] == ["7", "override"]
    assert rows["model.num_layers"] == ["5", "file"]
    assert rows["optim.beta1"] == ["0.9", "default"]
    assert rows["model.ffn_size"] == ["128", "derived"]


def corpus_with(tmp_path: Path, damage: Callable[[Path], None]) -> str:
    """An override that names a corpus to which something happened."""
    prefix = training.write_corpus(tmp_path)
    damage(Path(prefix))
    return f"data.train={prefix}"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def foreign_token(prefix: Path) -> None:
    with IndexedWriter(str(prefix), np.uint16) as writer:
        writer.write(np.array([1, 2, training.VOCAB_SIZE] * 50, dtype=np.uint16))


MISTAKES: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "unknown key": (
        lambda _: ["train.stpes=3"],
        "config error: train.stpes: unknown key (did you mean train.steps?)",
    ),
    "wrong type": (lambda _: ['train.steps="3"'], "config error: train.steps: "),
    "no override": (lambda _: ["train.steps"], "config error: train.steps: "),
    "heads": (lambda _: ["model.num_heads=5"], "config error: model.hidden_size: "),
    "world size": (lambda _: ["parallel.tensor=2"], "config error: parallel: "),
    "batch equation": (lambda _: ["train.micro_batch_size=3"], "config error: train.global_batch_size: "),
    "missing .bin": (
        lambda p: [corpus_with(p, lambda prefix: Path(f"{prefix}.bin").unlink())],
        "data error: ",
    ),
    "missing .idx": (
        lambda p: [corpus_with(p, lambda prefix: Path(f"{prefix}.idx").unlink())],
        "data error: ",
    ),
    "truncated .bin": (
        lambda p: [corpus_with(p, lambda prefix: truncate(Path(f"{prefix}.bin")))],
        "data error: ",
    ),
    "truncated .idx": (
        lambda p: [corpus_with(p, lambda prefix: truncate(Path(f"{prefix}.idx")))],
        "data error: ",
    ),
    "foreign token": (lambda p: [corpus_with(p, foreign_token)], "data error: "),
    "sequence longer than corpus": (lambda _: ["train.seq_len=5000"], "data error: "),
    "no checkpoint": (lambda p: [f"checkpoint.resume={p}/nothing"], "checkpoint error: "),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_status_2(config: str, tmp_path: Path, mistake: str) -> None:
    make, expected = MISTAKES[mistake]
    log_dir = tmp_path / "run"
    done = run_script(PRETRAIN, "--config", config, *make(tmp_path), f"log.dir={log_dir}")
    assert done.returncode == 2
    assert done.stderr.startswith(expected) and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.rstrip().endswith(")"), "it must also say what would be right"
    assert not log_dir.exists(), "a refused run must leave nothing behind"


SLOW_RANK_0 = """
import os, runpy, time
rank = os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
if rank == "0":
    time.sleep(3600)
runpy.run_path({pretrain!r}, run_name="__main__")
"""


@pytest.mark.parametrize("launcher", [name for name in LAUNCHERS if name != "python"])
def test_a_mistake_is_said_once_though_rank_0_is_late(config: str, tmp_path: Path, launcher: str) -> None:
    """The launcher ends the others when one rank ends: on a busy machine that may be before
    rank 0 could have said a word.
    """
    command = LAUNCHERS[launcher](3)
    if shutil.which(command[0], path=ENVIRONMENT["PATH"]) is None:
        pytest.skip(f"{command[0]} is not installed")
    script = tmp_path / "slow.py"
    script.write_text(SLOW_RANK_0.format(pretrain=PRETRAIN))
    done = start(
        [*command, str(script), "--config", config, "parallel.tensor=2"],
        PYTHONPATH=str(ROOT),
        MASTER_PORT=str(free_port()),
    )
    mistake = "config error: parallel: "
    assert done.returncode == (1 if launcher == "torchrun" else 2), done.stderr
    assert sum(line.startswith(mistake) for line in done.stderr.splitlines()) == 1, done.stderr
    if launcher == "torchrun":
        assert f"traceback : {mistake}" in root_cause(done.stderr)


def root_cause(stderr: str) -> str:
    """What torchrun's summary says of the failure that it saw first."""
    return stderr.partition("Root Cause (first observed failure):")[2]


def test_unusable_log_dir_is_refused(config: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run_script(PRETRAIN, "--config", config, f"log.dir={tmp_path}/file")
    assert (
        done.returncode == 2
        and done.stderr.startswith("config error: log.dir: ")
        and done.stderr.count("\n") == 1
    )


def test_missing_hostfile_is_refused(config: str, tmp_path: Path) -> None:
    """The launcher itself would only warn, and train on this machine alone."""
    command = ["deepspeed", "--hostfile", str(tmp_path / "hostfile"), "--master_port", str(free_port())]
    # ranks look at its command line
    done = start([*command, PRETRAIN, "--config", config, f"log.dir={tmp_path}/run"], anew=True)
    assert done.returncode == 2
    assert f"config error: --hostfile: {tmp_path / 'hostfile'} does not exist" in done.stderr


FAILING = """
import runpy
from megacore.train.trainer import Trainer
log = Trainer.log
def fail_on_rank_1(self, result):
    if self.step == 2 and self.mesh.place.rank == 1:
        raise ValueError("the disk of this rank is on fire")
    log(self, result)
Trainer.log = fail_on_rank_1
runpy.run_path({pretrain!r}, run_name="__main__")
"""


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_crash_ends_the_job_and_names_its_cause(config: str, tmp_path: Path, launcher: str) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(pretrain=PRETRAIN))
    done = start(
        [*LAUNCHERS[launcher](2), str(script), "--config", config, f"log.dir={tmp_path}/run"],
        PYTHONPATH=str(ROOT),
    )
    assert done.returncode not in (0, 2, 75)
    reasons = [line for line in done.stderr.splitlines() if line.startswith("rank ")]
    assert len(reasons) == 1, "one rank failed; the other only lost its peer"
    assert reasons[0].startswith("rank 1 ") and reasons[0].endswith(
        "failed: ValueError: the disk of this rank is on fire"
    )
    if launcher == "torchrun":
        assert f"traceback : {reasons[0]}" in root_cause(done.stderr)
    else:
        assert done.stderr.rstrip().splitlines()[-1] == reasons[0], "deepspeed itself writes to stdout"


def test_ctrl_c_saves_and_the_same_command_goes_on(config: str, tmp_path: Path) -> None:
    """Ctrl-C reaches every process of a terminal's group: the launcher and all ranks."""
    log_dir = tmp_path / "run"
    command = [
        *LAUNCHERS["deepspeed"](2),
        PRETRAIN,
        "--config",
        config,
        f"log.dir={log_dir}",
        "checkpoint.every=1000000",
    ]
    process = subprocess.Popen(
        [*command, "train.steps=100000", NOT_MEASURED],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=ROOT,
    )
    try:
        deadline = time.monotonic() + PATIENCE
        while not (log_dir / "metrics.jsonl").exists() or not training.metrics(log_dir):
            assert process.poll() is None and time.monotonic() < deadline, "the run did not start"
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=PATIENCE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0
    assert "stopped on request after step" in output
    (saved,) = (log_dir / "checkpoints").iterdir()
    step = json.loads((saved / "manifest.json").read_text())["step"]
    again = start(
        [
            *LAUNCHERS["deepspeed"](2),
            PRETRAIN,
            "--config",
            config,
            f"log.dir={log_dir}",
            f"train.steps={step + 2}",
        ]
    )
    assert again.returncode == 0, again.stderr
    assert [m["step"] for m in training.metrics(log_dir)] == list(range(1, step + 3))
