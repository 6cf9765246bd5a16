"""A drill from end to end: real ranks under torchrun and the supervisor, one of them killed."""

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.drill import SHORT, run
from megacore.errors import ConfigError
from tests import training
from tests.build import run_of
from tests.distributed.test_launch import ENVIRONMENT
from tests.drills.drills import EXPECTED, Drill
from tests.drills.faults import KINDS, check, parse
from tests.pool import PATIENCE, ROOT


def test_a_killed_rank_is_named_and_the_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    config = training.write_config(tmp_path, training.write_corpus(tmp_path))
    command = [
        sys.executable,
        "launch/drill.py",
        "--config",
        config,
        "--world",
        "2",
        "--fault",
        "kill:rank=1,step=4",
        "--hang-seconds",
        "30",
    ]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "drill"), "train.steps=5", "checkpoint.every=2"],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    (outcome,) = json.loads((tmp_path / "drill/drill.json").read_text())
    said = (tmp_path / "drill/kill_rank1_step4.txt").read_text()
    assert done.returncode == 0 and outcome["as_expected"], done.stdout + done.stderr + said
    assert "resumed after step 2 of 5" in said
    assert "rank 1 (host " in outcome["cause"] and "is dead" in outcome["cause"]
    assert (outcome["restarts"], outcome["steps_lost"], outcome["final_step"], outcome["same_weights"]) == (
        1,
        1,
        5,
        True,
    )


def test_a_run_that_fails_without_a_fault_is_one_line_with_its_reason(tmp_path: Path) -> None:
    launcher = "sh -c \"echo 'data error: d.bin: missing (make it)' >&2; exit 2\""
    with pytest.raises(
        ConfigError, match=r"ended with status 2, data error: d.bin: missing \(make it\) \(all .*calm.txt\)"
    ):
        Drill("configs/gpt_tiny.json", [], 4, tmp_path, launcher).calm()


def test_every_fault_says_what_must_come_of_it() -> None:
    assert set(EXPECTED) == set(KINDS)
    assert parse("kill:rank=3,step=7").name == "kill:rank=3,step=7"


@pytest.mark.parametrize(
    "spec, overrides, wrong",
    [
        ("kill:rank=4,step=7", [], "there are 4 ranks (rank=0 to rank=3, or more --world)"),
        ("kill:rank=0,step=0", [], "the run has 12 steps (step=1 to step=12)"),
        ("kill:rank=0,step=13", [], "the run has 12 steps (step=1 to step=12)"),
        (
            "corrupt:rank=0,step=7",
            [],
            "the run has 12 steps, its second checkpoint is of step 8 (step=9 to step=12)",
        ),
        (
            "corrupt:rank=0,step=7",
            ["checkpoint.every=6"],
            "the run has 12 steps, its second checkpoint is of step 12 (more train.steps)",
        ),
        (
            "corrupt:rank=0,step=9",
            ["checkpoint.keep=1"],
            "checkpoint.keep=1 keeps none to fall back to (checkpoint.keep=2)",
        ),
        (
            "disk_full:rank=0,step=7",
            ["checkpoint.on_failure=continue"],
            "nothing has to restart with checkpoint.on_failure=continue (checkp",
        ),
        (
            "disk_full:rank=0,step=11",
            ["checkpoint.every=5", "checkpoint.last=false"],
            "nothing is saved from that step on (checkpoint.last=true)",
        ),
        (
            "disk_full:rank=0,step=7",
            ["checkpoint.every=0"],
            "checkpoint.every=0 saves none on the way (checkpoint.every=4)",
        ),
    ],
)
def test_a_fault_that_could_not_strike_is_refused_before_anything_runs(
    spec: str, overrides: list[str], wrong: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--fault: {spec}: {wrong}")):
        run(
            [
                "--config",
                "configs/gpt_tiny.json",
                "--output",
                str(tmp_path / "drill"),
                "--fault",
                spec,
                *overrides,
            ]
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "spec, overrides",
    [
        ("kill:rank=3,step=1", []),
        ("sigterm:rank=0,step=12", []),
        ("corrupt:rank=0,step=9", []),
        ("corrupt:rank=0,step=12", []),
        ("corrupt:rank=0,step=9", ["checkpoint.keep=1", "checkpoint.keep_every=4"]),
    ],
)
def test_a_fault_that_can_strike_is_not(spec: str, overrides: list[str]) -> None:
    check(parse(spec), run_of("configs/gpt_tiny.json", *SHORT, *overrides, world=4), 4)


@pytest.mark.parametrize(
    "spec, wrong",
    [
        ("earthquake:rank=0", "earthquake is no kind of fault"),
        ("kill:rank=inf", "kill:rank=inf is none"),
        ("kill:rank=one", "kill:rank=one is none"),
        ("kill:rnak=0,step=3", "kill:rnak=0,step=3: rnak is unknown"),
    ],
)
def test_what_is_no_fault_is_refused(spec: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"config error: --fault: {wrong}"):
        parse(spec)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop_ends_a_drill_with_the_status_of_the_signal(
    tmp_path: Path, number: signal.Signals
) -> None:
    """The run without a fault would be blamed: a config error, because it has not finished."""
    code = f"import os; os.kill(os.getppid(), {number}); raise SystemExit(75)"
    drill = Drill("none", [], 1, tmp_path, shlex.join([sys.executable, "-c", code]))
    with pytest.raises(SystemExit) as raised:
        drill.calm()
    assert raised.value.code == 128 + number
