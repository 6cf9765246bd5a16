"""A drill from end to end: real ranks under torchrun and the supervisor, one of them killed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megacore.survive.drills import EXPECTED
from megacore.survive.faults import KINDS, parse
from tests import training
from tests.distributed.test_launch import ENVIRONMENT
from tests.pool import ROOT


def test_a_killed_rank_is_named_and_the_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    config = training.write_config(tmp_path, training.write_corpus(tmp_path))
    command = [sys.executable, "launch/drill.py", "--config", config, "--ranks", "2", "--fault", "kill:rank=1,step=4", "--watch", "30"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "drill"), "train.steps=5", "checkpoint.every=2"],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    (outcome,) = json.loads((tmp_path / "drill/drill.json").read_text())
    said = (tmp_path / "drill/kill_rank1_step4.txt").read_text()
    assert done.returncode == 0 and outcome["as_expected"], done.stdout + done.stderr + said
    assert "resumed after step 2 of 5" in said
    assert "rank 1 (host " in outcome["cause"] and "is dead" in outcome["cause"]
    assert (outcome["restarts"], outcome["steps_lost"], outcome["final_step"], outcome["same_weights"]) == (1, 1, 5, True)


def test_every_fault_says_what_must_come_of_it() -> None:
    assert set(EXPECTED) == set(KINDS)
    assert parse("kill:rank=3,step=7").name == "kill:rank=3,step=7"
    with pytest.raises(Exception, match="--fault: earthquake is no kind of fault"):
        parse("earthquake:rank=0")
