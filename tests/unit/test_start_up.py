"""What it takes to start: what a process loads, and what each of many ranks does.

The benchmark of many simulated ranks runs the code of a real one.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.start_up import fake_rank, run
from megacore.pipeline.partition import placement_of
from tests.build import run_of
from tests.pool import PATIENCE

LAYOUT = ["parallel.tensor=2", "parallel.pipeline=2", "train.global_batch_size=64", "engine.bucket_mib=0.05"]
CONFIG = str(Path(__file__).parents[2] / "configs" / "gpt_tiny.json")


def test_a_run_does_not_load_the_compiler() -> None:
    """Every command would start 1.5 s later, and every rank of a thousand: a decorator of
    `torch.compiler` is enough for that.
    """
    loaded = (
        "import sys, megacore.train.trainer, megacore.tools.verify.record; print({*sys.modules} & "
        "{'torch._dynamo', 'sympy'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", loaded],
        cwd=Path(CONFIG).parents[1],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.stdout == "set()\n", done.stdout + done.stderr


def test_fake_ranks_have_the_groups_of_real_ones() -> None:
    """Their coordinates, and one communicator for each group of more than one rank."""
    config = run_of(CONFIG, *LAYOUT, world=8)
    assert len(placement_of(config)) == 2
    for rank in range(8):
        with fake_rank(config, rank, 8) as mesh:
            assert mesh.coordinates == {"pp": rank // 4, "dp": rank // 2 % 2, "cp": 0, "tp": rank % 2}
            assert (
                mesh.tp.ranks == (rank - rank % 2, rank - rank % 2 + 1) and mesh.tp.process_group is not None
            )


def test_other_ranks_look_at_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["--config", CONFIG, "--world", "8", "--folder", str(tmp_path), *LAYOUT, "model.hidden_size=64"])
    found = json.loads(capsys.readouterr().out)["ranks"]["8"]
    assert found["resume, rank 0"]["looked_at"] == 8 + 1 and found["resume, other ranks"]["looked_at"] == 0
    assert found["communicators_a_rank"] <= 5 and found["slices"] > 200
    assert found["manifest_bytes"] < 60 * found["slices"] + 20_000
    assert not list(tmp_path.iterdir())
