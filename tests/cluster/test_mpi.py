"""Fine-tuning in bf16 on three CPU hosts, one rank on each: Open MPI, MPICH, and
both through `accelerate launch`.
"""

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megacore.checkpoint.folder import locate
from megacore.checkpoint.read import Reader
from megacore.tools.verify.checkpoint_diff import compare
from megacore.tools.verify.tolerances import BF16_FACTOR, BF16_ULP
from tests.cluster.hosts import Hosts, hosts, missing
from tests.commands import run_script
from tests.pool import ROOT
from tests.training import metrics, write_corpus

ABSENT = missing("mpirun.openmpi", "mpiexec.mpich") or (
    "" if importlib.util.find_spec("transformers") else "transformers is not installed"
)
WHY_NOT = ABSENT or ("" if os.environ.get("MEGACORE_CLUSTER") else "minutes long: bash tests/cluster/run.sh")
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"MPI: {WHY_NOT}")
ACCELERATE = (
    "" if importlib.util.find_spec("accelerate") else "accelerate is not installed (pip install accelerate)"
)
COUNT, STEPS = 3, 20
BOUND = BF16_FACTOR * BF16_ULP  # what `launch/verify.py --precision bf16` always allows
NAMES = [f"node{host}" for host in range(COUNT)]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Three hosts."""
    with hosts(tmp_path_factory.mktemp("hosts"), COUNT) as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shared folder with an imported GPT-2 of random weights, a corpus, and the
    fine-tuning of one process.
    """
    import transformers

    found = tmp_path_factory.mktemp("shared")
    sizes = {
        "n_layer": 2,
        "n_embd": 64,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": 257,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    transformers.set_seed(1)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(found / "gpt2")
    write_corpus(found)
    imported = run_script(
        "launch/checkpoint.py", "import", f"{found}/gpt2", "--format", "hf", "--output", f"{found}/imported"
    )
    assert imported.returncode == 0, imported.stderr
    one = run_script(*arguments(found, "one"))
    assert one.returncode == 0, one.stderr
    return found


def arguments(folder: Path, name: str) -> list[str]:
    """The script and its arguments; `name` is the run's."""
    train = [
        "train.precision=bf16",
        f"train.steps={STEPS}",
        "train.micro_batch_size=2",
        "train.global_batch_size=12",
    ]
    more = [
        "optim.lr=1e-3",
        f"data.train={folder}/corpus",
        "log.every=1",
        "train.device=cpu",
        f"log.dir={folder}/{name}",
    ]
    return [str(ROOT / "launch" / "pretrain.py"), "--config", f"{folder}/imported/config.json", *train, *more]


def check(folder: Path, name: str, done: "subprocess.CompletedProcess[str]") -> None:
    """The run has trained on three ranks, with the losses and weights of one process."""
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "data 3 × tensor 1 = 3 ranks" in done.stdout
    ours, theirs = ([line["loss"] for line in metrics(folder / run)] for run in (name, "one"))
    assert len(ours) == STEPS and ours == pytest.approx(theirs, rel=BOUND)
    assert theirs[-1] < 0.9 * theirs[0]  # there is something to compare
    found = compare(Reader(locate(folder / "one")), Reader(locate(folder / name)))
    assert all(part.relative < BOUND for part in found if part.name.startswith("model/"))


def test_open_mpi(three: Hosts, folder: Path) -> None:
    """One rank on each host, by the mapping; a variable reaches other hosts with -x alone."""
    ranks = [
        "--allow-run-as-root",
        "--host",
        ",".join(NAMES),
        "-n",
        str(COUNT),
        "--map-by",
        "ppr:1:node",
        "--bind-to",
        "none",
    ]
    variables = ["-x", "MASTER_ADDR=node0", "-x", "OMP_NUM_THREADS", "-x", "PATH"]
    check(
        folder,
        "open_mpi",
        three.run(
            0, "mpirun.openmpi", *ranks, *variables, "python", *arguments(folder, "open_mpi"), cwd=folder
        ),
    )


def test_mpich(three: Hosts, folder: Path) -> None:
    """MPICH passes the whole environment on."""
    ranks = ["-hosts", ",".join(NAMES), "-ppn", "1", "-n", str(COUNT), "-genv", "MASTER_ADDR", "node0"]
    check(
        folder,
        "mpich",
        three.run(0, "mpiexec.mpich", *ranks, "python", *arguments(folder, "mpich"), cwd=folder),
    )


@pytest.mark.skipif(bool(ACCELERATE), reason=f"accelerate: {ACCELERATE}")
@pytest.mark.parametrize("program", ["mpirun.openmpi", "mpiexec.mpich"])
def test_accelerate(three: Hosts, folder: Path, program: str) -> None:
    """`accelerate launch` starts mpirun. Open MPI passes on only the variables that its own setting names."""
    (folder / "machines").write_text("".join(f"{name}\n" for name in NAMES))
    programs, found = folder / program, shutil.which(program)
    programs.mkdir()
    assert found is not None
    # Which of two mpirun accelerate finds; by any other name Open MPI's does not say that it is Open MPI's.
    name = "-a mpirun" if "openmpi" in program else ""
    (programs / "mpirun").write_text(f'#!/bin/bash\nexec {name} {found} "$@"\n')
    (programs / "mpirun").chmod(0o755)
    command = ["accelerate", "launch", "--cpu", "--num_machines", str(COUNT), "--num_processes", str(COUNT)]
    command += ["--main_process_ip", "node0", "--main_process_port", "29500", "--mpirun_hostfile", "machines"]
    variables = AS_ROOT | {"OMPI_MCA_mca_base_env_list": "MASTER_ADDR;MASTER_PORT;OMP_NUM_THREADS;PATH"}
    done = three.run(
        0,
        "env",
        f"PATH={programs}:{os.environ['PATH']}",
        *command,
        *arguments(folder, program),
        cwd=folder,
        **variables,
    )
    check(folder, program, done)
