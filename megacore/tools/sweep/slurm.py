"""A sweep as an array of jobs under Slurm: task N trains trial N, by launch/slurm/pretrain.sbatch."""

import re
import shlex
import subprocess
from pathlib import Path

from megacore.errors import ConfigError
from megacore.files import LAUNCH, write_whole
from megacore.tools.sweep.folder import SweepFolder
from megacore.tools.sweep.results import Row

CORES = 8  # of a rank with a GPU, as in pretrain.sbatch
JOB = """#!/usr/bin/env bash
# Trials {numbers} of the sweep in {folder}: task N trains the config in line N of runs.txt.
#SBATCH --job-name={name}
#SBATCH --array={numbers}{limit}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={tasks}
{gpus}#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@180
#SBATCH --output={folder}/slurm-%A_%a.out
set -euo pipefail
cd "${{SLURM_SUBMIT_DIR:-.}}"
exec bash {script} --runs {folder}/runs.txt
"""


def check_job(folder: SweepFolder, rows: list[Row], host_size: int) -> int:
    """The ranks of each trial. Raises `ConfigError` if one array cannot run them."""
    if re.search(r"[^\w./+=@-]", str(folder.path)):  # Slurm puts a job's number for %j
        raise ConfigError(
            "folder",
            f"{folder.path} holds what a job script would have to quote",
            "letters, digits and . _ - / alone",
        )
    ranks = {row.trial.ranks for row in rows}
    if len(ranks) > 1:
        sizes = " and ".join(map(str, sorted(ranks)))
        raise ConfigError("--slurm", f"trials have {sizes} ranks, and an array one size", "ranks in the file")
    (count,) = ranks
    if count > host_size and count % host_size:
        raise ConfigError(
            "--host-size", f"{count} ranks do not fill hosts of {host_size}", "a divisor of the ranks"
        )
    return count


def write_job(folder: SweepFolder, rows: list[Row], host_size: int, at_once: int | None) -> Path:
    """Writes runs.txt and sweep.sbatch; returns the latter's path. Raises `ConfigError` if it cannot."""
    count = check_job(folder, rows, host_size)
    tasks = min(count, host_size)
    on_cpu = all(row.trial.config.train.device == "cpu" for row in rows)
    content = JOB.format(
        numbers=ranges([number for number, row in enumerate(rows, 1) if not row.finished]),
        limit=f"%{at_once}" if at_once else "",
        folder=folder.path,
        name=folder.path.name,
        nodes=count // tasks,
        tasks=tasks,
        gpus="" if on_cpu else f"#SBATCH --gpus-per-node={tasks}\n#SBATCH --cpus-per-task={CORES}\n",
        script=shlex.quote(str(LAUNCH / "slurm" / "pretrain.sbatch")),
    )
    job = folder.path / "sweep.sbatch"
    try:
        write_whole(
            folder.path / "runs.txt", "".join(f"--config {folder.config_of(row.trial)}\n" for row in rows)
        )
        write_whole(job, content)
    except OSError as error:
        raise ConfigError("folder", f"cannot write {job}: {error.strerror}", "a folder with room") from None
    return job


def ranges(numbers: list[int]) -> str:
    """1-3,5 of 1, 2, 3 and 5."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def submit(job: Path) -> None:
    """Hands the job to Slurm. Raises `ConfigError` with what it says."""
    done = subprocess.run(["sbatch", str(job)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(
            "--submit", f"sbatch: {done.stderr.strip()}", f"what the cluster takes; the job is {job}"
        )
    print(done.stdout.strip())
