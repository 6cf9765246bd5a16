"""Defaults, metrics and Slurm settings in docs/operations.md are those of the program."""

import re

from launch import supervise
from launch.kubernetes import render
from megacore.config import Config
from megacore.files import ROOT
from megacore.tools.monitoring import prometheus

PAGE = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
BATCH_SCRIPT = (ROOT / "launch/slurm/pretrain.sbatch").read_text(encoding="utf-8")


def test_default_settings() -> None:
    parallel = Config().parallel
    for key in ("hang_seconds", "timeout_seconds", "heartbeat_seconds"):
        assert f"`parallel.{key}` (default: {getattr(parallel, key):g})" in PAGE
    assert f"which the run fails ({Config().optim.max_skips})" in PAGE
    assert f"newest checkpoints to keep ({Config().checkpoint.keep})" in PAGE


def test_default_options() -> None:
    parser = supervise.parser()
    assert f"`--stall` seconds (default: {parser.get_default('stall'):g})" in PAGE
    assert f"without progress (default: {parser.get_default('restarts')})" in PAGE
    assert f"the supervisor stops it to add ranks (default: {parser.get_default('resize_pause'):g})" in PAGE

    assert f"`--restarts` times at most ({render.parser().get_default('restarts')})" in PAGE
    assert f"the run has {render.GRACE_SECONDS} s to save" in PAGE


def test_settings_of_the_batch_script() -> None:
    for option, sentence in (
        (r"signal=USR1@(\d+)", "signals the run {} seconds before"),
        (r"cpus-per-task=(\d+)", "default of {} fits nodes"),
    ):
        match = re.search(f"#SBATCH --{option}", BATCH_SCRIPT)
        assert match and sentence.format(match[1]) in PAGE


def test_metrics_exist() -> None:
    known = prometheus.RANKS | prometheus.PARTS | prometheus.DEVICES
    listed = re.findall(r"`megacore_(rank_\w+)`", PAGE)
    assert listed and set(listed) <= set(known)
