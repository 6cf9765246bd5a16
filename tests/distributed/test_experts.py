"""Mixtures of experts on an expert axis: every layout does the steps of one process,
and planted faults are caught.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megacore.expert_parallel.router import Router
from megacore.model.stage import Stage
from megacore.pipeline.partition import layer_ranges, placement_of
from megacore.tools.launchers import place_from_environment
from megacore.tools.text.decoding import Decoder
from megacore.tools.text.sampling import Sampler
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


def of(layout: str) -> list[str]:
    """Overrides from words such as `ep2` or `sp`."""
    names = {
        "tp": "tensor",
        "pp": "pipeline",
        "dp": "data",
        "cp": "context",
        "ep": "expert",
        "etp": "expert_tensor",
    }
    found = []
    for word in layout.split():
        name = word.rstrip("0123456789")
        size = word.removeprefix(name)
        found.append(
            "parallel.sequence=true"
            if word == "sp"
            else f"parallel.{names[name]}={size}"
            if name in names
            else word
        )
    return found


ZB, HALVES = "parallel.schedule=zb_v", "parallel.expert_halves=true"
LAYOUTS = {
    "dp4 ep2 sharded": (4, "dp4 ep2 engine.shard_optimizer=true train.recompute=full"),
    "cp2 ep2": (2, "cp2 ep2 train.recompute=selective"),
    "tp2 dp2 ep2": (4, "tp2 dp2 ep2"),
    "tp2 sp dp2 etp1 ep4": (4, "tp2 sp dp2 etp1 ep4"),
    "dp2 etp2": (2, f"dp2 etp2 {HALVES}"),
    "pp2 dp2 ep2 zb_v": (4, f"pp2 dp2 ep2 {ZB} {HALVES}"),
    "pp2 tp2 etp1 ep2 interleaved": (
        4,
        "pp2 tp2 sp etp1 ep2 parallel.schedule=interleaved train.recompute=full",
    ),
    "fsdp ep2": (4, f"dp4 ep2 engine.kind=fsdp {HALVES}"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_one_process(pool: Any, config_path: str, name: str) -> None:
    """Experts' gradients summed over ranks with other experts, tokens lost or counted twice, a
    loss that depends on the layout.
    """
    ranks, layout = LAYOUTS[name]
    (one,) = pool.run(1, train_rank, config_path, [])
    assert apart(pool.run(ranks, train_rank, config_path, of(layout)), one) < TOLERANCE


@pytest.mark.parametrize(
    "layout", ["dp2", f"tp2 dp2 etp1 ep4 sp train.recompute=full {HALVES}", "cp2 tp2 ep2", "pp2 cp2 etp1 ep2"]
)
def test_the_same_rows_are_dropped_in_every_layout(pool: Any, config_path: str, layout: str) -> None:
    """Of a microbatch whose tokens several ranks have: each of them alone would keep other rows."""
    few = ["model.capacity_factor=0.6"]
    (one,), (all_rows,) = (pool.run(1, train_rank, config_path, own) for own in (few, []))
    assert apart([one], all_rows) > 1e-6, "some are dropped"
    ranks = 2 if layout == "dp2" else 4
    assert apart(pool.run(ranks, train_rank, config_path, [*few, *of(layout)]), one) < TOLERANCE


BIASED = ["model.bias=true", "model.activation=swiglu_clamped"]
OF_BIASES = [
    "dp2 etp2 train.recompute=selective",
    "tp2 dp2 engine.kind=fsdp",
    "tp2 sp dp2 etp1 ep4",
    f"pp2 tp2 ep1 {ZB}",
]


@pytest.mark.parametrize("layout", OF_BIASES)
def test_biases_are_added_once(pool: Any, config_path: str, layout: str) -> None:
    """Of ranks that have parts of an expert each would add the last bias, or none; its
    gradient would be a part, or several.
    """
    (one,) = pool.run(1, train_rank, config_path, BIASED)
    assert (
        apart(
            pool.run(2 if layout == OF_BIASES[0] else 4, train_rank, config_path, [*BIASED, *of(layout)]), one
        )
        < TOLERANCE
    )


def strictly(config_path: str, overrides: list[str]) -> Found:
    """The same over a wire that forgives no order but one."""
    with strict(Rules(seed=1)):
        return train_rank(config_path, overrides)


def test_over_a_strict_wire(pool: Any, config_path: str) -> None:
    """Exchanges of unequal parts, beside shared experts' sums over another group."""
    (one,) = pool.run(1, train_rank, config_path, [])
    assert apart(pool.run(4, strictly, config_path, of("tp2 dp2 etp1 ep2 sp")), one) < TOLERANCE


@pytest.mark.parametrize(
    "layout", ["dp4 ep2 engine.shard_optimizer=true", "tp2 dp2 etp1 ep2 engine.kind=fsdp"]
)
def test_muon_takes_every_expert_by_itself(pool: Any, config_path: str, layout: str) -> None:
    """A matrix of two experts, or of what a rank holds of one, would have another update."""
    (one,) = pool.run(1, train_rank, config_path, ["optim.kind=muon"])
    assert apart(pool.run(4, train_rank, config_path, ["optim.kind=muon", *of(layout)]), one) < 1e-9


@pytest.mark.parametrize(
    "layout", ["dp4 ep2 train.recompute=full", "pp2 tp2 etp1 ep2 sp", "dp2 cp2 ep4 engine.kind=fsdp"]
)
def test_balance_without_a_loss_and_by_the_batch_before(pool: Any, config_path: str, layout: str) -> None:
    """Counts of one rank alone, or of a recomputed pass, would move the bias otherwise, and
    choose other experts from then on.
    """
    steps = 3  # behind two the bias may be where it was
    (one,) = pool.run(1, train_rank, config_path, DEEPSEEK, steps)
    bias = one.pieces["buffer/blocks.1.feed_forward.router.bias"].tensor
    assert {0.1, 0.3} & {round(float(x), 9) for x in bias.abs()}, "it has moved"
    assert apart(pool.run(4, train_rank, config_path, [*DEEPSEEK, *of(layout)], steps), one) < TOLERANCE


def tied(config_path: str, overrides: list[str]) -> Found:
    """Some steps in which all experts are as good as another for every token."""
    with mock.patch.object(Router, "ranked", lambda self, scores: torch.zeros_like(scores)):
        return train_rank(config_path, overrides)


@pytest.mark.parametrize(
    "layout", ["dp4 ep4", "tp2 dp2 etp1 ep4 model.capacity_factor=1e-6", "dp4 ep4 engine.kind=fsdp"]
)
def test_all_tokens_go_to_the_first_experts(pool: Any, config_path: str, layout: str) -> None:
    """Of equal experts the first are chosen: a rank has all tokens, and others none.

    Experts that nobody chose decay nevertheless. With the least capacity each takes one row.
    """
    own = [word for word in of(layout) if word.startswith("model.")]
    (one,), (without,) = (
        pool.run(1, tied, config_path, [*own, *more]) for more in ([], ["optim.weight_decay=0.0"])
    )
    found = pool.run(4, tied, config_path, of(layout))
    assert apart(found, one) < TOLERANCE
    load = one.pieces["buffer/blocks.1.feed_forward.router.load"].tensor
    assert load.tolist() == [4, 4, 0, 0, 0, 0, 0, 0]
    decayed, drawn = (
        run.pieces["model/blocks.1.feed_forward.experts.up"].tensor[7] for run in (one, without)
    )
    shrunk = decayed / drawn
    assert shrunk.max() < 1 and shrunk.max() - shrunk.min() < 1e-12


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
        (2, 4, "dp4 ep2 engine.shard_optimizer=true"),
        (4, 4, "pp2 tp2 etp1 ep2"),
        (5, 2, "dp2 ep2 engine.kind=fsdp"),
        (6, 1, ""),
    ]
    for steps, ranks, layout in moves:
        pool.run(
            ranks,
            training.run_rank,
            config,
            [*common, *of(layout), f"train.steps={steps}"],
            str(tmp_path / "moved"),
        )
    assert (
        training.difference(training.figures(tmp_path / "moved"), training.figures(tmp_path / "whole"))
        < 1e-10
    )


def test_a_run_goes_on_with_the_same_bits(pool: Any, tmp_path: Path) -> None:
    """In its own layout nothing is rounded, so any difference is state that was lost."""
    config = training.write_config(tmp_path, training.write_corpus(tmp_path), model=MODEL, train={"steps": 4})
    common = [*DEEPSEEK, *of("dp2 ep2"), "optim.decay_steps=6", "checkpoint.every=20"]
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


@pytest.mark.parametrize("layout", ["tp2", f"tp2 etp1 ep2 {HALVES}"])
def test_a_text_is_the_same(pool: Any, config_path: str, layout: str) -> None:
    """A single token, which tensor ranks cannot divide, and a rank that has none."""
    (one,) = pool.run(1, written, config_path, [])
    assert len(set(one)) > 4
    assert pool.run(2, written, config_path, of(layout)) == [one] * 2
