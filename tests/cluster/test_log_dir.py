"""log.dir on two hosts that do not share it: a run that saves is refused before it
trains, one that saves nothing works.
"""

import json
import os
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts, missing
from tests.commands import run_script
from tests.pool import ROOT
from tests.training import write_config, write_corpus

WHY_NOT = missing("pdsh")
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=f"hosts: {WHY_NOT}"),
    pytest.mark.skipif(
        not os.environ.get("MEGACORE_CLUSTER"), reason="minutes long: bash tests/cluster/run.sh"
    ),
]


@pytest.fixture(scope="module")
def folder(two: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config, a corpus and a hostfile that both hosts see, and a folder of each host's own."""
    found = tmp_path_factory.mktemp("shared")
    write_config(
        found, write_corpus(found), train={"steps": 3, "precision": "fp64"}, parallel={"timeout_seconds": 600}
    )
    (found / "hostfile").write_text("node0 slots=1\nnode1 slots=1\n")
    (found / ".deepspeed_env").write_text("OMP_NUM_THREADS=1\nDS_ACCELERATOR=cpu\n")
    (found / "own").mkdir()
    two.own_folder(found / "own")
    return found


def train(two: Hosts, folder: Path, *overrides: str) -> tuple[int, str]:
    """The status, and all that the run says."""
    script = [
        "deepspeed",
        "--hostfile",
        "hostfile",
        str(ROOT / "launch" / "pretrain.py"),
        "--config",
        "config.json",
    ]
    done = two.run(0, *script, f"log.dir={folder}/own/run", *overrides, cwd=folder)
    return done.returncode, done.stdout + done.stderr


def test_checkpoints_need_a_shared_folder(two: Hosts, folder: Path) -> None:
    """Else the whole run is lost: its save waits for files that nobody will see."""
    status, said = train(two, folder)
    assert status == 2, said[-3000:]
    right = "a folder that all machines share;"
    line = (
        f"config error: log.dir: {folder}/own/run on node1 is not the folder that rank 0's machine has "
        f"({right}"
    )
    assert said.count("config error") == 1 and line in said, said[-3000:]
    assert "step 1/3" not in said


def test_a_run_without_checkpoints_needs_none(two: Hosts, folder: Path) -> None:
    """Its records are rank 0's alone; and it says at the start what it cannot do."""
    status, said = train(two, folder, "checkpoint.last=false", "checkpoint.resume=never")
    assert status == 0, said[-3000:]
    assert "this run can save no checkpoint, not even when it is asked to stop" in said
    one = run_script(
        "launch/pretrain.py",
        "--config",
        f"{folder}/config.json",
        f"log.dir={folder}/one",
        "checkpoint.last=false",
    )
    assert one.returncode == 0, one.stderr
    ours = two.run(0, "cat", f"{folder}/own/run/metrics.jsonl").stdout
    losses = [
        [json.loads(line).get("loss") for line in text.splitlines()]
        for text in (ours, (folder / "one/metrics.jsonl").read_text())
    ]
    assert len(losses[0]) == len(losses[1]) > 0 and losses[0] == pytest.approx(losses[1], rel=1e-9)
