"""A run with Muon goes on in another layout: with the same bits wherever AdamW's does, and
elsewhere within the sums' rounding.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from megacore.checkpoint.read import Reader
from megacore.distributed.shard import TensorSlice
from tests import training

TWO, FOUR = "train.steps=2", "train.steps=4"
# Two ranks add the same two gradients in each of these, and a sum of two has one order. fsdp adds over
# microbatches otherwise.
SAME_SUMS = [["parallel.data=2"], ["parallel.data=2", "engine.shard_optimizer=true"]]
OTHERS = [(2, ["parallel.tensor=2"]), (2, ["parallel.data=2", "engine.kind=fsdp"]), (1, [])]


def run(config: str, overrides: list[str], log_dir: str, planted: bool = False) -> int:
    """A whole run; `planted`: a rank's momentum is what lies first in the file, whatever part
    of the matrix the rank has now.
    """
    read = Reader.read_into

    def first_rows(self: Reader, name: str, shard: TensorSlice, out: Tensor) -> None:
        if name.startswith("muon_m/") and shard.local_shape != shard.global_shape:
            shard = TensorSlice(shard.global_shape, (0,) * len(shard.global_shape), shard.local_shape)
        read(self, name, shard, out)

    with mock.patch.object(Reader, "read_into", first_rows) if planted else nullcontext():
        return training.run_rank(config, overrides, log_dir)


@pytest.fixture
def config(tmp_path: Path) -> str:
    return training.write_config(
        tmp_path,
        training.write_corpus(tmp_path),
        train={"precision": "fp64", "steps": 4},
        checkpoint={"every": 2},
    )


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_the_same_sums_have_the_same_bits(pool: Any, config: str, tmp_path: Path, kind: str) -> None:
    """From either way to keep the optimizer's state to the other: AdamW is the measure."""
    given = [f"optim.kind={kind}", "optim.decay_steps=12", "optim.grad_clip=0"]  # the norm has another order
    runs = {}
    for first, second in ((0, 0), (0, 1), (1, 0)):
        log = str(tmp_path / f"{first}{second}")
        pool.run(2, run, config, [*given, *SAME_SUMS[first], TWO], log)
        pool.run(2, run, config, [*given, *SAME_SUMS[second], FOUR], log)
        runs[first, second] = [loss for loss, _ in training.figures(log)]
    assert len(runs[0, 0]) == 4 and runs[0, 1] == runs[0, 0] == runs[1, 0]


def test_any_layout_goes_on_and_a_momentum_of_other_rows_is_noticed(
    pool: Any, config: str, tmp_path: Path
) -> None:
    """The planted fault: the momentum is not divided anew for the ranks that go on with it."""
    given = ["optim.kind=muon", "optim.decay_steps=12"]
    pool.run(1, run, config, [*given, FOUR], str(tmp_path / "whole"))
    right = training.figures(tmp_path / "whole")
    pool.run(4, run, config, [*given, "parallel.data=2", "parallel.tensor=2", TWO], str(tmp_path / "first"))
    saved = next((tmp_path / "first/checkpoints").glob("step_*2"))
    for i, (ranks, layout) in enumerate(OTHERS):
        log = str(tmp_path / str(i))
        pool.run(ranks, run, config, [*given, *layout, f"checkpoint.resume={saved}"], log)
        assert training.difference(training.figures(log), right[2:]) < 1e-10
    pool.run(
        2, run, config, [*given, *OTHERS[0][1], f"checkpoint.resume={saved}"], str(tmp_path / "lost"), True
    )
    assert training.difference(training.figures(tmp_path / "lost"), right[2:]) > 1e-6
