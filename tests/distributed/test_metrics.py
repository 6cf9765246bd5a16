"""What a line of metrics.jsonl says of time and memory, by a clock that only work moves."""

import contextlib
import io
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megacore.checkpoint import Saver
from megacore.data.packing import of_inputs
from megacore.expert_parallel.experts import Experts
from megacore.expert_parallel.router import Router
from megacore.pipeline.runtime import Runtime
from megacore.tools.choices import utilisation
from megacore.tools.choices.flops import flops_per_token
from megacore.tools.diagnosis.flight_recorder import FlightRecorder
from megacore.tools.inputs import Inputs
from megacore.tools.launchers import place_from_environment
from tests import training
from tests.build import run_of

STEP, ASIDE = 1.0, 1000.0  # seconds of a step, and of a validation's batch or a save
WAITED = (0.2, 0.2, 0.2, 0.05)  # of each rank's step


def clocked_rank(config_path: str, overrides: list[str], log_dir: str) -> int:
    """A run in which a step takes as long as `STEP` says, and nothing else any time; rank
    r's memory peaks at r + 1 KiB.
    """
    rank, now = place_from_environment().rank, [0.0]
    run, start = Runtime.run, Saver.start

    def running(self: Runtime, *args: Any) -> Any:
        training_now = self.stages[0].training
        now[0] += STEP if training_now else ASIDE
        assert self.listeners is not None
        (recorder,) = [each for each in self.listeners if isinstance(each, FlightRecorder)]
        recorder.waited += WAITED[rank] if training_now else 0.0
        return run(self, *args)

    def saving(self: Saver, *args: Any) -> None:
        now[0] += ASIDE * (1 + rank)
        start(self, *args)

    patches = (
        mock.patch.object(time, "perf_counter", lambda: now[0]),
        mock.patch.object(Runtime, "run", running),
        mock.patch.object(Saver, "start", saving),
        mock.patch("resource.getrusage", lambda who: SimpleNamespace(ru_maxrss=rank + 1)),
        mock.patch("platform.system", lambda: "Linux"),
    )
    for patch in patches:
        patch.start()
    try:
        return training.run_rank(config_path, overrides, log_dir)
    finally:
        mock.patch.stopall()


def test_speed_is_of_steps_alone_and_figures_are_of_all_ranks(run_ranks: Any, tmp_path: Path) -> None:
    """Validations and saves that count as steps, the mean of several steps taken for one, rank 0's
    memory for the largest, or what a rank has waited in five steps taken from one of them, so that a
    rank is named that holds up nobody.
    """
    prefix = training.write_corpus(tmp_path)
    config = training.write_config(
        tmp_path,
        prefix,
        model={"num_layers": 1},
        train={"steps": 20, "eval_every": 4, "eval_batches": 1},
        data={"train": prefix, "valid": training.write_corpus(tmp_path, "valid", 300)},
        checkpoint={"every": 7},
        log={"every": 5, "tensorboard": False},
    )
    assert run_ranks(4, clocked_rank, config, [], str(tmp_path / "run")) == [0] * 4
    lines = training.metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [5, 10, 15, 20]
    assert [line["step_seconds"] for line in lines] == [STEP] * 4
    assert {line["tokens_per_second"] for line in lines} == {8 * 16 / STEP}
    assert [line["save_seconds"] for line in lines] == [0.0, 4 * ASIDE, 4 * ASIDE, 0.0], (
        "of the rank that waited longest"
    )
    assert {line["memory_bytes"] for line in lines} == {4 * 1024}, "of the fullest rank"
    assert {line["memory_reserved_bytes"] for line in lines} == {4 * 1024}, (
        "a CPU's process reserves what it has"
    )
    assert not any("stragglers" in line for line in lines), "rank 3 works for 0.95 s, the others for 0.8 s"


def test_a_finished_run_that_is_started_again_records_nothing(run_ranks: Any, tmp_path: Path) -> None:
    """It validates once more, to say so; whoever reads the file would find the last
    validation as often as somebody has looked.
    """
    prefix = training.write_corpus(tmp_path)
    data = {"train": prefix, "valid": training.write_corpus(tmp_path, "valid", 300)}
    config = training.write_config(tmp_path, prefix, model={"num_layers": 1}, train={"steps": 3}, data=data)
    metrics = tmp_path / "run/metrics.jsonl"
    assert run_ranks(1, training.run_rank, config, [], str(tmp_path / "run")) == [0]
    first = metrics.read_text()
    assert run_ranks(1, training.run_rank, config, [], str(tmp_path / "run")) == [0]
    assert first.count("valid_loss") == 1 and metrics.read_text() == first


def rank_with_a_peak(config_path: str, overrides: list[str], log_dir: str) -> int:
    """A run on devices of 1 TFLOP/s."""
    with mock.patch.object(utilisation, "peak_flops", lambda name, precision: 1e12):
        return training.run_rank(config_path, overrides, log_dir)


def test_utilisation_counts_pairs_of_documents(pool: Any, tmp_path: Path) -> None:
    """By the samples of all data ranks, in the steps since the last line: those of rank 0, or of
    one step, have other documents.
    """
    prefix = training.write_corpus(tmp_path, tokens=203)  # documents of 25 and 26 tokens, in samples of 16
    path = training.write_config(tmp_path, prefix, train={"steps": 4}, log={"every": 2, "tensorboard": False})
    overrides, folder = ["data.document_mask=true", "parallel.data=2"], tmp_path / "run"
    assert pool.run(2, rank_with_a_peak, path, overrides, str(folder)) == [0, 0]
    config = run_of(path, *overrides, f"log.dir={folder}", world=2)
    stream, size = Inputs(config, 0).stream, config.train.global_batch_size
    parts = []
    for line in training.metrics(folder):
        samples = stream.documents(np.arange((line["step"] - 2) * size, line["step"] * size))
        parts.append(
            sum(int(np.square(np.diff(of_inputs(bounds))).sum()) for bounds in samples)
            / (len(samples) * 16**2)
        )
        speed = line["tokens_per_second"] / 2e12
        assert line["mfu"] == pytest.approx(speed * flops_per_token(config, False, parts[-1]), rel=1e-12)
        assert line["mfu_causal"] == pytest.approx(
            speed * flops_per_token(config, True, parts[-1]), rel=1e-12
        )
    assert len(set(parts)) == 2 and max(parts) < 1.0


ROW = 0.01  # seconds of a row of an expert, by the clock below
SLOW = 2  # a rank


def rank_with_a_slow_one(config_path: str, log_dir: str, routed: bool) -> str:
    """A run by a clock that steps and rows of experts move; what its rank 0 prints.

    Experts take rank `SLOW` four times as long as even rows do, because the router sends all rows there
    (`routed`), or because it takes four times as long for each.
    """
    rank, now, forward, run = place_from_environment().rank, [0.0], Experts.forward, Runtime.run

    def stepping(self: Runtime, *args: Any) -> Any:
        now[0] += STEP
        return run(self, *args)

    def computing(self: Experts, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        now[0] += ROW * len(rows) * (4 if rank == SLOW and not routed else 1)
        return forward(self, rows, ends)

    def choosing(self: Router, ranked: torch.Tensor) -> torch.Tensor:
        tokens = torch.arange(len(ranked))[:, None]
        return torch.full_like(tokens, 2 * SLOW) if routed else tokens % self.experts

    printed = io.StringIO()
    with (
        mock.patch.object(time, "perf_counter", lambda: now[0]),
        mock.patch.object(Runtime, "run", stepping),
        mock.patch.object(Experts, "forward", computing),
        mock.patch.object(Router, "choose", choosing),
        mock.patch.dict("os.environ", MEGACORE_HOST=f"node{rank // 2}"),
        contextlib.redirect_stdout(printed),
    ):
        assert training.run_rank(config_path, [], log_dir) == 0
    return printed.getvalue()


def test_a_slow_rank_is_slow_by_routing_or_by_itself(pool: Any, tmp_path: Path) -> None:
    """It takes as many seconds in both runs.

    Somebody would replace a device to which the router sends all tokens, or tune the router while a device
    fails; or would go to another host.
    """
    experts = {
        "num_experts": 8,
        "experts_per_token": 1,
        "router_normalised": False,
        "expert_ffn_size": 8,
        "activation": "swiglu",
    }
    config = training.write_config(
        tmp_path,
        training.write_corpus(tmp_path),
        model={"num_layers": 3, "first_dense": 1, "bias": False} | experts,
        parallel={"data": 4, "expert": 4},
        train={"steps": 4},
        checkpoint={"last": False},
    )
    for routed, said in (
        (
            True,
            "slow by routing: host node1 rank 2 got 4.00 times the mean of rows in blocks 1, 2 and holds "
            "up the others",
        ),
        (False, "slow host: host node1 rank 2 holds up the others with 1.00 times the mean of rows"),
    ):
        folder = tmp_path / str(routed)
        printed, *others = pool.run(4, rank_with_a_slow_one, config, str(folder), routed)
        lines = [line for line in printed.splitlines() if ": slow " in line]
        assert lines == [f"step 3: {said}, busy for 3.56 s of 3.56 s"] and not any(others)
        assert [line.get("stragglers") for line in training.metrics(folder)] == [None, None, [SLOW], [SLOW]]
