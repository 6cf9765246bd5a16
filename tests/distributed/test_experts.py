"""MoE models on an expert axis: over a strict process group, moved between layouts, resumed, generating text.

`tests/equal.py` compares what they train with one process.
"""

from pathlib import Path
from typing import Any

import pytest

from megacore.model.stage import Stage
from megacore.pipeline.partition import layer_ranges, placement_of
from megacore.tools.launchers import place_from_environment
from megacore.tools.text.decoding import Decoder
from megacore.tools.text.sampling import Sampler
from megacore.tools.verify.layouts import parse
from tests import training
from tests.build import mesh_of, run_of
from tests.steps import Found, apart, train_rank
from tests.strict import Rules, strict

TOLERANCE = 1e-12  # fp64: sums of some thousand terms in another order
MODEL = {
    "num_layers": 4,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "position": "rope",
    "bias": False,
    "ffn_size": 32,
    "num_experts": 8,
    "experts_per_token": 2,
    "expert_ffn_size": 8,
    "shared_experts": 1,
    "first_dense": 1,
    "router_balance": "sequence",
    "balance_coefficient": 0.3,
    "router_z_loss": 0.1,
    "init_std": 0.1,
}
DEEPSEEK = [
    "model.router_scores=sigmoid",
    "model.router_bias_rate=0.1",
    "model.router_scale=2.5",
    "model.expert_groups=4",
    "model.groups_per_token=2",
    "model.router_balance=global",
]


@pytest.fixture
def config_path(tmp_path: Path) -> str:
    return training.write_config(
        tmp_path, "unused", model=MODEL, train={"precision": "fp64"}, optim={"weight_decay": 0.3}
    )


def strictly(config_path: str, overrides: list[str]) -> Found:
    """The same over a wire that forgives no order but one."""
    with strict(Rules(seed=1)):
        return train_rank(config_path, overrides)


def test_over_a_strict_wire(pool: Any, config_path: str) -> None:
    """Exchanges of unequal parts, beside shared experts' sums over another group."""
    (one,) = pool.run(1, train_rank, config_path, [])
    assert apart(pool.run(4, strictly, config_path, parse("tp2dp2etp1ep2sp").overrides()), one) < TOLERANCE


def test_experts_move_between_layouts(pool: Any, tmp_path: Path) -> None:
    """An expert that comes back as another, or a bias or a count that does not, would
    change every loss from there on.
    """
    config = training.write_config(
        tmp_path, training.write_corpus(tmp_path), model=MODEL, train={"precision": "fp64", "steps": 6}
    )
    common = [*DEEPSEEK, "optim.decay_steps=6", "checkpoint.every=20"]
    pool.run(1, training.run_rank, config, common, str(tmp_path / "whole"))
    moves = [
        (2, "dp4ep2", ["engine.shard_optimizer=true"]),
        (4, "pp2tp2etp1ep2", []),
        (5, "dp2ep2", ["engine.kind=fsdp"]),
        (6, "one", []),
    ]
    for steps, name, engine in moves:
        layout = parse(name)
        overrides = [*common, *layout.overrides(), *engine, f"train.steps={steps}"]
        pool.run(layout.world, training.run_rank, config, overrides, str(tmp_path / "moved"))
    assert (
        training.difference(training.figures(tmp_path / "moved"), training.figures(tmp_path / "whole"))
        < 1e-10
    )


def test_a_run_goes_on_with_the_same_bits(pool: Any, tmp_path: Path) -> None:
    """In its own layout nothing is rounded, so any difference is state that was lost."""
    config = training.write_config(tmp_path, training.write_corpus(tmp_path), model=MODEL, train={"steps": 4})
    common = [*DEEPSEEK, *parse("dp2ep2").overrides(), "optim.decay_steps=6", "checkpoint.every=20"]
    pool.run(2, training.run_rank, config, common, str(tmp_path / "whole"))
    for steps in (2, 4):
        pool.run(2, training.run_rank, config, [*common, f"train.steps={steps}"], str(tmp_path / "resumed"))
    assert training.figures(tmp_path / "resumed") == training.figures(tmp_path / "whole")


def written(config_path: str, overrides: list[str]) -> list[int]:
    """What the drawn model writes after a prompt."""
    place = place_from_environment()
    config = run_of(config_path, *overrides, world=place.world_size)
    mesh = mesh_of(config)
    own = [layer_ranges(config)[stage] for stage in placement_of(config)[mesh.pp.rank]]
    decoder = Decoder([Stage(config, layers, mesh, mesh.device).eval() for layers in own], mesh)
    tokens = list(
        decoder.generate([3, 1, 4, 1, 5], 8, Sampler(1.0, training.VOCAB_SIZE, 1.0, 0, training.VOCAB_SIZE))
    )
    mesh.close()
    return tokens


@pytest.mark.parametrize(
    ("layout", "overrides"), [("tp2", []), ("tp2etp1ep2", ["parallel.expert_halves=true"])]
)
def test_a_text_is_the_same(pool: Any, config_path: str, layout: str, overrides: list[str]) -> None:
    """A single token, which tensor ranks cannot divide, and a rank that has none."""
    (one,) = pool.run(1, written, config_path, [])
    assert len(set(one)) > 4
    assert pool.run(2, written, config_path, [*parse(layout).overrides(), *overrides]) == [one] * 2
