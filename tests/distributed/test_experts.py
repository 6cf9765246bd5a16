"""Mixtures of experts on an expert axis: every layout does the steps of one process, and planted faults are caught."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.distributed.mesh import Mesh
from megacore.tools.choices.settle import settled_alone
from megacore.tools.launchers import place_from_environment
from megacore.tools.settings.load import load
from tests import training
from tests.steps import Found, apart, train

TOLERANCE = 1e-12  # fp64: sums of some thousand terms in another order
MODEL = {
    "num_layers": 4, "norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "ffn_size": 32, "num_experts": 8,
    "experts_per_token": 2, "expert_ffn_size": 8, "shared_experts": 1, "first_dense": 1, "router_balance": "sequence",
    "balance_coefficient": 0.3, "router_z_loss": 0.1, "init_std": 0.1,
}  # fmt: skip
DEEPSEEK = ["model.router_scores=sigmoid", "model.router_bias_rate=0.1", "model.router_scale=2.5", "model.expert_groups=4",
            "model.groups_per_token=2", "model.router_balance=global"]  # fmt: skip


@pytest.fixture
def config_path(tmp_path: Path) -> str:
    return training.write_config(tmp_path, "unused", model=MODEL, train={"precision": "fp64"}, optim={"weight_decay": 0.3})


def trained(config_path: str, overrides: list[str]) -> Found:
    """Some steps."""
    place = place_from_environment()
    config = settled_alone(load(config_path, overrides, place.world_size).config)
    return train(config, Mesh(config, place, torch.device("cpu")))


def of(layout: str) -> list[str]:
    """Overrides from words such as `ep2` or `sp`."""
    names = {"tp": "tensor", "pp": "pipeline", "dp": "data", "cp": "context", "ep": "expert", "etp": "expert_tensor"}
    found = []
    for word in layout.split():
        name = word.rstrip("0123456789")
        size = word.removeprefix(name)
        found.append("parallel.sequence=true" if word == "sp" else f"parallel.{names[name]}={size}" if name in names else word)
    return found


ZB = "parallel.schedule=zb_v"
LAYOUTS = {
    "dp2": (2, "dp2"),
    "dp2 ep2": (2, "dp2 ep2"),
    "dp4 ep2 sharded": (4, "dp4 ep2 engine.shard_optimizer=true"),
    "dp4 ep4": (4, "dp4 ep4 train.recompute=full"),
    "cp2 ep2": (2, "cp2 ep2 train.recompute=selective"),
    "tp2": (2, "tp2"),
    "tp2 sp dp2 ep2": (4, "tp2 sp dp2 ep2"),
    "tp2 dp2 ep2": (4, "tp2 dp2 ep2"),
    "tp2 etp1 ep2": (2, "tp2 etp1 ep2"),
    "tp2 sp dp2 etp1 ep4": (4, "tp2 sp dp2 etp1 ep4"),
    "dp2 etp2": (2, "dp2 etp2"),
    "pp2 dp2 ep2": (4, "pp2 dp2 ep2"),
    "pp2 dp2 ep2 zb_v": (4, f"pp2 dp2 ep2 {ZB}"),
    "pp2 tp2 etp1 ep2 interleaved": (4, "pp2 tp2 sp etp1 ep2 parallel.schedule=interleaved train.recompute=full"),
    "fsdp ep2": (4, "dp4 ep2 engine.kind=fsdp"),
    "fsdp ep4": (4, "dp4 ep4 engine.kind=fsdp"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_one_process(pool: Any, config_path: str, name: str) -> None:
    """Experts' gradients summed over ranks with other experts, tokens lost or counted twice, a loss that depends on the layout."""
    ranks, layout = LAYOUTS[name]
    (one,) = pool.run(1, trained, config_path, [])
    assert apart(pool.run(ranks, trained, config_path, of(layout)), one) < TOLERANCE
