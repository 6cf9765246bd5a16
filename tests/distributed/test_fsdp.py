"""The fsdp engine resumes runs of the native engine and hands them back, skips bad steps, and offloads.

`tests/equal.py` compares what it trains with one process.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.engine.fsdp import FSDPEngine
from megacore.tools.launchers import place_from_environment
from megacore.tools.machine.device import pick_device
from tests import training
from tests.build import mesh_of, run_of, step_of
from tests.training import difference, figures

# fp32 rounds each sum to 6e-8; a layout only changes the order of sums, and some steps let differences grow
# about tenfold.
TOLERANCE, STEPS = 1e-5, 8

FSDP = "engine.kind=fsdp"
TP2, PP2, DP2 = "parallel.tensor=2", "parallel.pipeline=2", "parallel.data=2"


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    prefix = training.write_corpus(folder)
    data = {"train": prefix, "valid": training.write_corpus(folder, "valid", 500, seed=1)}
    train = {**training.BASE["train"], "steps": STEPS}
    # A run that is cut short keeps the schedule of the whole.
    optim = {**training.BASE["optim"], "warmup_steps": 2, "decay_steps": 20}
    return training.write_config(folder, prefix, data=data, train=train, optim=optim)


# A run's life: steps done, ranks, overrides. Dropout and validations in between: neither may disturb the
# numbers behind.
MOVES = [
    (2, 2, [DP2]),
    (4, 4, [FSDP, TP2, DP2]),
    (6, 4, [FSDP, PP2, DP2, "engine.shard_size=2"]),
    (STEPS, 2, ["parallel.pipeline=2"]),
]
COMMON = ["checkpoint.every=20", "model.dropout=0.1", "train.eval_every=3"]


def test_run_moves_between_engines(pool: Any, config_path: str, tmp_path: Path) -> None:
    """Moments, counters or rows that end up elsewhere would change every loss from there on."""
    pool.run(1, training.run_rank, config_path, COMMON, str(tmp_path / "whole"))
    for steps, ranks, overrides in MOVES:
        pool.run(
            ranks,
            training.run_rank,
            config_path,
            [*COMMON, *overrides, f"train.steps={steps}"],
            str(tmp_path / "moved"),
        )
    assert difference(figures(tmp_path / "moved"), figures(tmp_path / "whole")) < TOLERANCE


def test_goes_on_bitwise(pool: Any, config_path: str, tmp_path: Path) -> None:
    overrides = [*COMMON, FSDP, DP2, "train.precision=bf16"]
    pool.run(2, training.run_rank, config_path, overrides, str(tmp_path / "whole"))
    for steps in (3, STEPS):
        pool.run(
            2, training.run_rank, config_path, [*overrides, f"train.steps={steps}"], str(tmp_path / "stopped")
        )
    assert figures(tmp_path / "stopped") == figures(tmp_path / "whole")


def skipping_rank(config_path: str) -> dict[str, Any]:
    """A step whose gradient is not finite in one element of one rank, and one behind it that is."""
    place = place_from_environment()
    config = run_of(config_path, FSDP, "engine.shard_size=2", world=place.world_size)
    mesh = mesh_of(config, device=pick_device(config, place))
    train_step = step_of(config, mesh)
    (stage,), engine = train_step.stages, train_step.engine
    assert isinstance(engine, FSDPEngine)
    held = {key: tensor.clone() for key, (tensor, _) in engine.tensors().items()}
    tokens = torch.zeros(2, config.train.seq_len, dtype=torch.long)
    seen: dict[str, Any] = {"elements": sum(rows.master.numel() for rows in engine.rows)}
    for bad in (True, False):
        loss = stage.loss(stage.hidden(tokens), tokens)
        engine.backward(0, engine.root([loss]), [engine.loss_gradient(1.0)], last=True)
        engine.reduce_gradients()
        if bad and place.rank == 1:
            engine.rows[5].gradient.view(-1)[0] = math.inf
        seen[f"finite {bad}"] = bool(engine.step(1e-3).grad_norm.isfinite())
        seen[f"moved {bad}"] = any(
            not torch.equal(tensor, held[key]) for key, (tensor, _) in engine.tensors().items()
        )
        seen[f"state {bad}"] = engine.state()
    seen["whole"] = sum(p.numel() for p in stage.parameters())
    mesh.close()
    return seen


def test_a_gradient_that_is_not_finite_changes_nothing_on_any_rank(pool: Any, config_path: str) -> None:
    """A rank that stepped alone would part from the others; and of two copies, each rank holds half."""
    for seen in pool.run(4, skipping_rank, config_path):
        assert (seen["finite True"], seen["moved True"]) == (False, False)
        assert (seen["finite False"], seen["moved False"]) == (True, True)
        assert seen["state False"] == {"updates": 1, "skipped": 1}
        assert abs(seen["elements"] / seen["whole"] - 0.5) < 0.02, (
            "all but the last rows of sizes that do not divide"
        )


def loading_rank(config_path: str, reshard: str) -> float:
    """The loss of weights that are all zero, which are read behind a validation with others."""
    place = place_from_environment()
    config = run_of(config_path, FSDP, f"engine.reshard={reshard}", world=place.world_size)
    mesh = mesh_of(config, device=pick_device(config, place))
    train_step = step_of(config, mesh)
    (stage,), engine = train_step.stages, train_step.engine
    tokens = torch.zeros(2, config.train.seq_len, dtype=torch.long)
    stage.eval()
    with torch.no_grad():
        stage.loss(stage.hidden(tokens), tokens)
        held = engine.tensors()
        for tensor, _ in held.values():
            tensor.zero_()
        engine.load_state(engine.state(), held)
        loss = float(stage.loss(stage.hidden(tokens), tokens)) / tokens.numel()
    mesh.close()
    return loss - math.log(config.model.vocab_size)


@pytest.mark.parametrize("reshard", ["true", "false"])
def test_what_is_read_behind_a_validation_computes(pool: Any, config_path: str, reshard: str) -> None:
    """What a validation has gathered would be used once more: a run that goes back to a checkpoint
    would step from other weights.
    """
    assert pool.run(2, loading_rank, config_path, reshard) == [pytest.approx(0.0, abs=1e-5)] * 2


def offloading_rank(config_path: str) -> tuple[bool, bool, list[float]]:
    """Two steps of two microbatches; whether a gradient was there to be added to before a step, whether
    its own tensors stayed, norms.
    """
    place = place_from_environment()
    config = run_of(
        config_path, FSDP, "engine.cpu_offload=true", "engine.reshard=false", world=place.world_size
    )
    mesh = mesh_of(config, device=pick_device(config, place))
    train_step = step_of(config, mesh)
    (stage,), engine = train_step.stages, train_step.engine
    assert isinstance(engine, FSDPEngine)
    gradients, there, norms = [rows.gradient for rows in engine.rows], False, []
    tokens = torch.zeros(2, config.train.seq_len, dtype=torch.long)
    for _ in range(2):
        there |= any(parameter.grad is not None for parameter in stage.parameters())
        for last in (False, True):
            loss = stage.loss(stage.hidden(tokens), tokens)
            engine.backward(0, engine.root([loss]), [engine.loss_gradient(1.0)], last=last)
        engine.reduce_gradients()
        norm = torch.cat([gradient.flatten() for gradient in gradients]).double().norm()
        norms.append(float(norm))
        engine.step(1e-3)
    stayed = all(mine is rows.gradient for mine, rows in zip(gradients, engine.rows, strict=True))
    mesh.close()
    return there, stayed, norms


def test_offloaded_gradients_are_not_waited_for_one_by_one(pool: Any, config_path: str) -> None:
    """FSDP2 brings a block's gradient to host memory without waiting only where none
    is there already to add it to.
    """
    for there, stayed, norms in pool.run(2, offloading_rank, config_path):
        assert not there
        assert stayed and all(norm > 0 for norm in norms), "the update looks where it always did"
