"""Latent attention, in blocks with experts and without: every layout does the steps of one
process, and planted mistakes show.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megacore.model import latent_attention
from tests import training
from tests.distributed.test_experts import MODEL, of
from tests.steps import Found, apart, train_rank

TOLERANCE = 1e-10  # fp64: sums of some thousand terms in another order, in gradients of single numbers
LATENT = {"num_layers": 4, "head_size": 4, "q_rank": 20, "kv_rank": 12, "plain_size": 6, "value_size": 7}
LAYOUTS = {
    "zb_v, sequence": (4, "pp2 tp2 sp etp1 ep2 parallel.schedule=zb_v"),
    "interleaved, tp2": (4, "pp2 tp2 parallel.schedule=interleaved train.recompute=full"),
    "cp2": (2, "cp2 ep2 train.recompute=selective"),
    "fsdp": (2, "dp2 ep2 engine.kind=fsdp"),
    "sharded": (2, "dp2 etp2 engine.shard_optimizer=true"),
    "ring, tp2": (4, "cp2 tp2 ep2 parallel.context_method=ring"),
    "ulysses, sequence": (4, "cp2 tp2 sp ep2 parallel.context_method=ulysses"),
    "muon": (2, "tp2 sp optim.kind=muon"),
}


@pytest.fixture
def config_path(tmp_path: Path) -> str:
    return training.write_config(
        tmp_path, "unused", model=MODEL | LATENT, train={"precision": "fp64"}, optim={"weight_decay": 0.3}
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_one_process(pool: Any, config_path: str, name: str) -> None:
    """A latent or a shared key whose gradient is a part of a sum, or a head that is
    given another's matrix.
    """
    ranks, layout = LAYOUTS[name]
    (one,) = pool.run(
        1, train_rank, config_path, [word for word in layout.split() if word.startswith("optim.")]
    )
    assert apart(pool.run(ranks, train_rank, config_path, of(layout)), one) < TOLERANCE


MISTAKES: dict[str, tuple[str, Any, str]] = {
    "a shared key of which each rank's heads have a gradient": (
        "enter_tensor_parallel",
        lambda x, *_: x,
        "interleaved, tp2",
    ),
    "latents of own tokens as if of all": (
        "replicated",
        lambda group, **_: replicated(group),
        "zb_v, sequence",
    ),
}
replicated = latent_attention.replicated


def mistaken(config_path: str, overrides: list[str], mistake: str) -> Found:
    """Some steps with a mistake."""
    with mock.patch.object(latent_attention, *MISTAKES[mistake][:2]):
        return train_rank(config_path, overrides)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_caught(pool: Any, config_path: str, mistake: str) -> None:
    """One process computes the same with and without them."""
    ranks, layout = LAYOUTS[MISTAKES[mistake][2]]
    (one,), (alone,) = (
        pool.run(1, train_rank, config_path, []),
        pool.run(1, mistaken, config_path, [], mistake),
    )
    assert apart([alone], one) < TOLERANCE
    assert apart(pool.run(ranks, mistaken, config_path, of(layout), mistake), one) > 1e-6
