"""The seam of parameters that layers share, by a model whose layers do so on any
stages (`tests.value_embeddings`).
"""

import contextlib
import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.checkpoint import Reader, locate
from megacore.config import Config, source
from megacore.distributed.mesh import Mesh
from megacore.model.choose import layers_of
from megacore.model.layers import sharing
from megacore.pipeline.partition import layer_ranges, placement_of, plan_of, shared_parameters, stages_of
from megacore.pipeline.schedule import Op
from megacore.tools.launchers import place_from_environment
from tests import parameter_owners, training, value_embeddings
from tests.build import run_of
from tests.steps import Found, apart, train
from tests.strict import Rules, strict

TOLERANCE = 1e-12  # fp64: sums of some thousand terms in another order
MODEL = {"num_layers": 4, "source": value_embeddings.__file__}
OWN = ("blocks.0.values.weight", "blocks.0.gain", "blocks.0.shift")


@pytest.fixture
def config_path(tmp_path: Path) -> str:
    return training.write_config(
        tmp_path, "unused", model=MODEL, train={"precision": "fp64"}, optim={"weight_decay": 0.3}
    )


class LeftOut(Mesh):
    """The planted fault: of three ranks that hold a parameter, one is left out of its sum."""

    def _holders(self, config: Config) -> dict[str, tuple[int, ...]]:
        return {name: (ranks[0], ranks[-1]) for name, ranks in super()._holders(config).items()}


def trained(
    config_path: str, overrides: list[str], mesh: type[Mesh] = Mesh, hosts: str = "", seed: int | None = None
) -> Found:
    """Some steps. `hosts`: of every rank, a letter for the one where it is. `seed`: of a strict wire."""
    place = place_from_environment()
    if hosts:
        os.environ["MEGACORE_HOST"] = hosts[place.rank]
    with contextlib.nullcontext() if seed is None else strict(Rules(seed=seed)):
        config = run_of(config_path, *overrides, world=place.world_size)
        return train(config, mesh(config, place, torch.device("cpu")))


PP4 = ["parallel.pipeline=4"]
PP2, LOOPED = ["parallel.pipeline=2"], ["parallel.pipeline=2", "parallel.schedule=interleaved"]
WHOLE = [
    'optim.groups=[{"match": ["*values.weight"], "kind": "orthogonal"}, {"match": ["*gain"], "lr": 0.01}]'
]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one stage": (2, ["parallel.data=2", "engine.kind=fsdp"]),
    "a stage has two, another one": (
        4,
        [*PP2, "parallel.tensor=2", "parallel.sequence=true", "train.recompute=full"],
    ),
    "interleaved": (2, LOOPED),
    "interleaved, sharded": (4, [*LOOPED, "parallel.data=2", "engine.shard_optimizer=true"]),
    "V": (2, [*PP2, "parallel.schedule=zb_v"]),
    "fsdp": (4, [*PP2, "parallel.data=2", "engine.kind=fsdp"]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_one_process(pool: Any, config_path: str, name: str) -> None:
    """A copy with a gradient of its own, counted twice in the norm, saved twice, or
    summed with another parameter's.
    """
    (one,) = pool.run(1, trained, config_path, [])
    assert apart(pool.run(LAYOUTS[name][0], trained, config_path, LAYOUTS[name][1]), one) < TOLERANCE


SHARING = ("head", "untied head", "layer called norm", "first", "middle")
OWNED: dict[str, tuple[int, list[str]]] = {
    "pipeline, sharded": (4, [*PP2, "parallel.data=2", "engine.shard_optimizer=true"]),
    "tensor, V": (4, [*PP2, "parallel.schedule=zb_v", "parallel.tensor=2", "parallel.sequence=true"]),
}


@pytest.mark.parametrize("sharing", SHARING)
def test_gradients_are_summed_with_the_layer_that_makes_the_parameter(
    pool: Any, tmp_path: Path, sharing: str
) -> None:
    """A parameter of a bare layer does not say by its name which layer makes it. Taken for another layer's,
    its copies part without a word, and both are saved.
    """
    model = {"num_layers": 4, "source": parameter_owners.__file__, "head_bias": True, "sharing": sharing}
    path = training.write_config(
        tmp_path,
        "unused",
        model=model | {"tie_embeddings": sharing != "untied head"},
        train={"precision": "fp64"},
        optim={"weight_decay": 0.3},
    )
    (one,) = pool.run(1, trained, path, [])
    for ranks, overrides in OWNED.values():
        assert apart(pool.run(ranks, trained, path, overrides), one) < TOLERANCE


def test_three_of_four_stages(pool: Any, config_path: str) -> None:
    """Two groups of ranks that overlap, over a wire that forgives no order but one; and by the planted
    fault a rank keeps its own sum.
    """
    (one,) = pool.run(1, trained, config_path, [])
    assert apart(pool.run(4, trained, config_path, PP4, Mesh, "", 1), one) < TOLERANCE
    found = pool.run(4, trained, config_path, PP4, LeftOut)
    assert training.difference(found[0].figures, one.figures) > 1e-6


def test_whole_matrices_and_two_levels(pool: Any, config_path: str) -> None:
    """Copies stay equal where each rank updates all of a matrix, and where hosts divide
    the sums of a stage.
    """
    (one,) = pool.run(1, with_rule, config_path, WHOLE)
    levels = [*LOOPED, "parallel.data=4", "engine.reduce_levels=2", "engine.shard_optimizer=true"]
    assert apart(pool.run(8, with_rule, config_path, [*levels, *WHOLE], "aabbccdd"), one) < 1e-10


def with_rule(config_path: str, overrides: list[str], hosts: str = "") -> Found:
    """Some steps with an optimizer that needs whole matrices."""
    importlib.import_module("tests.whole_rule")  # registers the rule, in this process alone
    source._EXECUTED.clear()  # whose settings were made without it
    return trained(config_path, overrides, hosts=hosts)


def test_who_sums_follows_from_layers_and_stages(config_path: str) -> None:
    """On every holder once, behind its last backward; and what is known of the GPT
    without torch is what its layers say.
    """
    config = run_of(config_path, *PP4, world=4)
    assert shared_parameters(config) == {**dict.fromkeys(OWN, (0, 1, 3)), "embedding.weight": (0, 3)}
    assert [[a.op for a in actions[-2:]].count(Op.REDUCE_TIED) for actions in plan_of(config).actions] == [
        1,
        1,
        0,
        1,
    ]
    looped = run_of(config_path, *LOOPED, world=2)
    assert placement_of(looped) == ((0, 2), (1, 3)) and shared_parameters(looped) == shared_parameters(config)
    for tie in ("true", "false"):
        plain = run_of(config_path, *PP4, "model.source=null", f"model.tie_embeddings={tie}", world=4)
        users, ranges = sharing(layers_of(plain), plain), layer_ranges(plain)
        assert {name: stages_of(layers, ranges) for name, layers in users.items()} == shared_parameters(plain)


def test_it_is_saved_once_and_moves_between_layouts(pool: Any, tmp_path: Path) -> None:
    """A copy under a second name, or one that does not come back on every holder."""
    config = training.write_config(
        tmp_path, training.write_corpus(tmp_path), model=MODEL, train={"precision": "fp64", "steps": 6}
    )
    common = ["optim.decay_steps=6", "checkpoint.every=20"]
    pool.run(1, training.run_rank, config, common, str(tmp_path / "whole"))
    for steps, ranks, overrides in ((2, 2, LOOPED), (4, 4, PP4), (6, 1, [])):
        pool.run(
            ranks,
            training.run_rank,
            config,
            [*common, *overrides, f"train.steps={steps}"],
            str(tmp_path / "moved"),
        )
    assert (
        training.difference(training.figures(tmp_path / "moved"), training.figures(tmp_path / "whole"))
        < 1e-10
    )
    saved = Reader(locate(tmp_path / "moved")).manifest.tensors
    assert {
        name
        for name in saved
        if name.startswith("model/") and name.endswith(("values.weight", "gain", "shift"))
    } == {f"model/{name}" for name in OWN}
