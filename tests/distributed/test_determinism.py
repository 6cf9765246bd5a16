"""`train.deterministic`: two runs of the same command leave the same bits, in metrics and
checkpoints; chance and time do not.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.model.norm import Norm
from megacore.tools.machine.determinism import compute_deterministically
from tests import training
from tests.commands import run_script
from tests.distributed.test_launch import PRETRAIN

# by ranks
LAYOUTS: dict[int, list[str]] = {
    1: [],
    8: ["parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence=true"],
}
COMMON = ["train.deterministic=true", "train.steps=6", "checkpoint.every=6", "model.dropout=0.1"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    return training.write_config(folder, training.write_corpus(folder))


def deterministic_rank(config: str, overrides: list[str], log_dir: str, noise: float = 0.0) -> int:
    """A rank's run; with `noise`, every norm adds some to its input, from PyTorch's global generator."""
    forward = Norm.forward

    def noisy(self: Norm, x: Tensor) -> Tensor:
        return forward(self, x + noise * torch.rand(x.shape))

    compute_deterministically()
    if noise:
        Norm.forward = noisy  # type: ignore[method-assign]
    try:
        return training.run_rank(config, overrides, log_dir)
    finally:
        Norm.forward = forward  # type: ignore[method-assign]
        torch.use_deterministic_algorithms(False)


def remains(log_dir: Path) -> tuple[list[tuple[float, float]], dict[str, bytes]]:
    """What a run leaves that another may be compared with: (loss, norm) of each step, and
    its checkpoint's tensor files.
    """
    tensors = {
        file.name: file.read_bytes() for file in (log_dir / "checkpoints/step_00000006").glob("*.safetensors")
    }
    return [(m["loss"], m["grad_norm"]) for m in training.metrics(log_dir)], tensors


@pytest.mark.parametrize("world", LAYOUTS)
def test_reruns_are_bitwise_equal(pool: Any, config: str, tmp_path: Path, world: int) -> None:
    overrides = [*COMMON, *LAYOUTS[world]]
    for name in ("once", "again"):
        assert pool.run(world, deterministic_rank, config, overrides, str(tmp_path / name)) == [0] * world
    once, again = (remains(tmp_path / name) for name in ("once", "again"))
    assert len(once[0]) == 6 and once[1]
    assert once == again


def test_random_numbers_without_a_name_are_noticed(pool: Any, config: str, tmp_path: Path) -> None:
    """The planted fault: noise of 1e-6 from a generator whose state goes on from whatever ran before."""
    for name in ("once", "again"):
        assert pool.run(1, deterministic_rank, config, COMMON, str(tmp_path / name), 1e-6) == [0]
    (figures, tensors), (other_figures, other_tensors) = (
        remains(tmp_path / name) for name in ("once", "again")
    )
    assert figures != other_figures and tensors != other_tensors
    # what no loss curve would show
    assert [f[0] for f in figures] == pytest.approx([f[0] for f in other_figures], rel=1e-3)


def test_pretrain_heeds_the_setting(config: str, tmp_path: Path) -> None:
    """Seen from outside by its refusal of an environment that contradicts it, before training starts."""
    command = [PRETRAIN, "--config", config, f"log.dir={tmp_path}/run", "train.steps=1"]
    for setting, status in (("true", 2), ("false", 0)):
        done = run_script(*command, f"train.deterministic={setting}", CUBLAS_WORKSPACE_CONFIG=":0:0")
        assert done.returncode == status, done.stderr
        if status:
            assert (
                done.stderr.startswith("config error: CUBLAS_WORKSPACE_CONFIG: :0:0 lets")
                and done.stderr.count("\n") == 1
            )
    assert json.loads((tmp_path / "run/config.json").read_text())["train"]["deterministic"] is False
