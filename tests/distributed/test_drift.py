"""Parameters that tensor ranks hold alike and that drift apart end a run, with
parameter, rank and step; others do not.
"""

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megacore.distributed.mesh import Mesh
from megacore.engine.native import NativeEngine
from megacore.tools import drift
from tests import training


def compared_rank(
    config_path: str, overrides: list[str], log_dir: str, spoilt: bool, over_nccl: bool = False
) -> int:
    """A run that compares in every second step.

    With `spoilt` one bit of one number is another on tensor rank 1, from step 3 on. `over_nccl`: the
    comparison takes the backend for that one.
    """
    step, done = NativeEngine.step, []

    def then_spoilt(self: Any, *rest: Any) -> Any:
        statistics = step(self, *rest)
        done.append(True)
        if len(done) == 3 and self.mesh.tp.rank == 1 and "0" in self.modules[0].blocks:
            self.settle()
            weight = self.modules[0].blocks["0"].norm2.weight.detach()
            weight[5] = torch.nextafter(weight[5], weight.new_tensor(9.0))
        return statistics

    plant = mock.patch.object(NativeEngine, "step", then_spoilt) if spoilt else contextlib.nullcontext()
    elsewhere = mock.patch.object(drift.Drift, "is_fault", False) if over_nccl else contextlib.nullcontext()
    said: list[str] = []
    with (
        mock.patch.object(drift, "EVERY", 2),
        plant,
        elsewhere,
        mock.patch.object(Mesh, "print", lambda self, text: said.append(text)),
    ):
        status = training.run_rank(config_path, overrides, log_dir)
    return (
        status
        if not over_nccl
        else sum("WARNING: parameters that tensor ranks hold alike" in text for text in said)
    )


@pytest.fixture
def config_path(tmp_path: Path) -> str:
    return training.write_config(
        tmp_path, training.write_corpus(tmp_path), train=training.BASE["train"] | {"steps": 4}
    )


LAYOUTS: dict[int, list[str]] = {
    2: ["parallel.tensor=2"],
    # The uneven vocabulary lays out each tensor rank's buffers differently, and stages hold different
    # parameters.
    8: [
        "parallel.tensor=2",
        "parallel.pipeline=2",
        "parallel.data=2",
        "engine.shard_optimizer=true",
        "model.tie_embeddings=false",
    ],
    4: [
        "parallel.tensor=2",
        "parallel.sequence=true",
        "parallel.data=2",
        "engine.kind=fsdp",
        "train.precision=bf16",
    ],
}


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_equal_parameters_are_not_called_different(
    pool: Any, config_path: str, tmp_path: Path, ranks: int
) -> None:
    assert (
        pool.run(ranks, compared_rank, config_path, LAYOUTS[ranks], str(tmp_path / "run"), False)
        == [0] * ranks
    )


@pytest.mark.parametrize("ranks", [2, 8])
def test_one_bit_ends_the_run(pool: Any, config_path: str, tmp_path: Path, ranks: int) -> None:
    """No loss shows it for thousands of steps, and a checkpoint keeps one of the copies."""
    found = r"Drifted: .* seen in step 4: blocks.0.norm2.weight on rank \d is not that of rank \d"
    with pytest.raises(Exception, match=found):
        pool.run(ranks, compared_rank, config_path, LAYOUTS[ranks], str(tmp_path / "run"), True)


def test_what_may_be_another_order_of_sums_is_said_once(pool: Any, config_path: str, tmp_path: Path) -> None:
    """Over NCCL each tensor rank's data ranks may add up in an order of their own: a healthy
    run would end at its 50th step.
    """
    overrides = [*LAYOUTS[2], "train.steps=6"]
    assert pool.run(2, compared_rank, config_path, overrides, str(tmp_path / "run"), True, True) == [1, 1]
