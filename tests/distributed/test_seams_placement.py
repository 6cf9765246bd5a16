"""What follows from a placement alone, proved by layers that are no feature: weights split over ranks
with other tokens, further views.
"""

import contextlib
import importlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megacore.config import Config
from megacore.distributed import buffers
from megacore.distributed.axes import AXES, Axis
from megacore.distributed.buffers import ShardedBuffer, new_buffer, update_buffers
from megacore.distributed.collectives import (
    all_gather,
    enter_tensor_parallel,
    leave_tensor_parallel,
    own_part,
)
from megacore.distributed.hierarchical_reduce import GradientSum
from megacore.distributed.mesh import Mesh
from megacore.distributed.shard import Shard, new_parameter, replicated, shard_of, split
from megacore.distributed.topology import Topology
from megacore.engine.fsdp import FSDPEngine
from megacore.errors import ConfigError
from megacore.model.block import Block
from megacore.model.choose import layers_of
from megacore.model.context import Context
from megacore.model.gpt import BLOCKS, gpt
from megacore.model.stage import Stage
from megacore.tools.choices.run import trainer_of
from megacore.tools.deepspeed.engine import DeepSpeedEngine
from megacore.tools.inputs import Inputs
from megacore.tools.launchers import place_from_environment
from tests import training
from tests.build import mesh_of, run_of, topology_of
from tests.steps import Found, apart, train

CPU = torch.device("cpu")
TOLERANCE = 1e-12  # fp64: sums of some thousand terms in another order
EXPERTS = 4

# Ranks along it hold other experts, and see other tokens. It is an axis of its own, or of a second view of
# the ranks.
EP = Axis("ep", "expert", tokens=True, splits=True)
OWN = (AXES[0], replace(AXES[1]), replace(EP, samples=True), *AXES[2:])
VIEW = (AXES[0], Axis("edp", "expert_data", tokens=True), EP, Axis("etp", "expert_tensor"))


def moved(value: Tensor, counts: Tensor) -> Tensor:
    """The next value of a buffer."""
    return 0.9 * value + 0.01 * counts


class Experts(nn.Module):
    """Each token is multiplied by the weights of one expert, which its position chooses.

    Tokens go to the ranks with their experts.
    """

    def __init__(self, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.group, self.tp, self.sequence = (
            mesh.group("ep"),
            mesh.tp,
            config.parallel.sequence and mesh.tp.size > 1,
        )
        shard = Shard((EXPERTS, config.model.hidden_size), (split(self.group, 0),), decay=True, init_std=0.1)
        self.first, self.weight = shard.offset[0], new_parameter(shard, dtype, device)
        # Of each expert: how many tokens each rank has sent there, on which all agree; and what it has seen
        # itself.
        self.sent = new_buffer(
            Shard((EXPERTS,), (replicated(self.group, partial=True),), fill=1.0), moved, torch.float64, device
        )
        self.seen = new_buffer(Shard((EXPERTS,), (split(self.group, 0),)), moved, torch.float64, device)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """``[tokens, hidden]`` → the same."""
        positions = context.positions
        here = (
            torch.arange(context.seq_len).repeat(context.batch_size)
            if positions is None
            else positions.flatten()
        )
        own = (own_part(here, self.tp) if self.sequence else here) % EXPERTS
        chosen, mean = all_gather(own, self.group), x.detach().mean(1)
        self.sent.note(context.key, mean.new_zeros(EXPERTS).index_add(0, own, mean))
        x, out = enter_tensor_parallel(x, self.group, True), 0
        bias = self.sent.value / self.sent.value.sum()
        for number, weight in enumerate(self.weight, self.first):
            out = out + x * weight * bias[number] * (chosen == number)[:, None]
        counts = mean.new_zeros(EXPERTS).index_add(0, chosen, x.detach().mean(1))
        self.seen.note(context.key, counts[self.first : self.first + len(self.weight)])
        return leave_tensor_parallel(out, self.group, True)


class ExpertBlock(Block):
    """A block whose output goes through experts too."""

    def __init__(
        self, index: int, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(index, config, mesh, dtype, device)
        self.experts = Experts(config, mesh, dtype, device)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """``[tokens, hidden]`` → the same."""
        x = super().forward(x, context)
        return x + self.experts(x, context)


BLOCKS["experts"] = ExpertBlock


class TooWide(Mesh):
    """The planted fault: experts are summed as if all ranks had the same."""

    def gradient_sum(self, shard: Shard) -> GradientSum:
        return super().gradient_sum(replace(shard, along=tuple(a for a in shard.along if a.axis != "ep")))


class TooNarrow(Mesh):
    """The planted fault: what all ranks hold is summed as if they held experts."""

    def gradient_sum(self, shard: Shard) -> GradientSum:
        return super().gradient_sum(
            replace(shard, along=(*(a for a in shard.along if a.axis != "ep"), split(self.group("ep"), 0)))
        )


def config_of(path: str, overrides: Sequence[str], world: int) -> Config:
    config = run_of(path, *overrides, world=world)
    return config.model_copy(update={"model": config.model.model_copy(update={"block": "experts"})})


def joined(config: Config, sizes: Mapping[str, int], mesh: type[Mesh] = Mesh) -> Mesh:
    """A mesh with experts over an axis of the one view if `sizes` has no `edp`,
    else over one of a second view.
    """
    if "edp" in sizes:
        return mesh(config, place_from_environment(), CPU, sizes=sizes, views=[VIEW])
    return mesh(config, place_from_environment(), CPU, OWN, sizes)


def with_experts(
    path: str, overrides: list[str], sizes: Mapping[str, int], mesh: type[Mesh] = Mesh, hosts: str = ""
) -> Found:
    """Training with experts. `hosts`: of every rank, a letter for the one where it is."""
    importlib.import_module("tests.whole_rule")  # registers the rule, in this process alone
    if hosts:
        os.environ["MEGACORE_HOST"] = hosts[place_from_environment().rank]
    config = config_of(path, overrides, place_from_environment().world_size)
    return train(config, joined(config, sizes, mesh))


@pytest.fixture
def config_path(tmp_path: Path) -> str:
    changes: dict[str, Any] = {
        "model": {"num_layers": 2},
        "train": {"precision": "fp64"},
        "optim": {"weight_decay": 0.3},
    }
    return training.write_config(tmp_path, "unused", **changes)


ONE = {"dp": 1, "ep": 1}
DATA, SHARDED = ["parallel.data=4"], ["parallel.data=4", "engine.shard_optimizer=true"]
CASES: dict[str, tuple[list[str], dict[str, int]]] = {
    "an axis": (DATA, {"dp": 2, "ep": 2}),
    "an axis, every expert on one rank": (DATA, {"dp": 1, "ep": 4}),
    "an axis, sharded": (SHARDED, {"dp": 2, "ep": 2}),
    "an axis, sharded, every expert on one rank": (SHARDED, {"dp": 1, "ep": 4}),
    "an axis, fsdp": ([*DATA, "engine.kind=fsdp"], {"dp": 2, "ep": 2}),
    "an axis, fsdp, every expert on one rank": (
        [*DATA, "engine.kind=fsdp", "engine.shard_size=2"],
        {"dp": 1, "ep": 4},
    ),
    "a view, out of data and context": (
        ["parallel.data=2", "parallel.context=2"],
        {"edp": 1, "ep": 4, "etp": 1},
    ),
    "a view, sharded": (["parallel.context=4", "engine.shard_optimizer=true"], {"edp": 2, "ep": 2, "etp": 1}),
    "a view, out of tensor": (
        ["parallel.data=2", "parallel.tensor=2", "parallel.sequence=true"],
        {"edp": 2, "ep": 2, "etp": 1},
    ),
    "a view, copies": (
        ["parallel.data=2", "parallel.tensor=2", "engine.shard_optimizer=true"],
        {"edp": 1, "ep": 2, "etp": 2},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_split_over_ranks_with_other_tokens(pool: Any, config_path: str, case: str) -> None:
    """Gradients of different experts would be added up, or those of copies not; a norm, an
    update, or what is saved would follow.
    """
    overrides, sizes = CASES[case]
    (one,) = pool.run(1, with_experts, config_path, [], ONE)
    assert apart(pool.run(4, with_experts, config_path, overrides, sizes), one) < TOLERANCE


WHOLE = [
    'optim.groups=[{"match": ["*norm*"], "lr": 0.01}, {"match": ["blocks.*.weight"], "kind": '
    '"orthogonal", "lr": 0.02}]'
]


@pytest.mark.parametrize("case", ["an axis, sharded", "a view, copies"])
def test_a_rule_over_whole_matrices(pool: Any, config_path: str, case: str) -> None:
    """A weight is put together from the ranks of its own sum and split, and from no others."""
    overrides, sizes = CASES[case]
    (one,) = pool.run(1, with_experts, config_path, WHOLE, ONE)
    assert apart(pool.run(4, with_experts, config_path, [*overrides, *WHOLE], sizes), one) < 1e-10


TWO_LEVELS = ["parallel.data=4", "engine.reduce_levels=2"]


@pytest.mark.parametrize("overrides", [TWO_LEVELS, [*TWO_LEVELS, "engine.shard_optimizer=true"]])
def test_sums_in_two_levels(pool: Any, config_path: str, overrides: list[str]) -> None:
    """What all ranks hold is summed within two hosts and between them, and experts within a host alone."""
    (one,) = pool.run(1, with_experts, config_path, [], ONE)
    found = pool.run(4, with_experts, config_path, overrides, {"dp": 2, "ep": 2}, Mesh, "aabb")
    assert apart(found, one) < TOLERANCE


@pytest.mark.parametrize("overrides", [DATA, SHARDED])
def test_sums_in_16_bits(pool: Any, config_path: str, overrides: list[str]) -> None:
    """Experts of one rank are not sent, others with the rounding of the wire; all ranks agree."""
    overrides = [*overrides, "train.precision=fp32"]
    (one,) = pool.run(1, with_experts, config_path, ["train.precision=fp32"], ONE)
    for sizes in ({"dp": 2, "ep": 2}, {"dp": 1, "ep": 4}):
        found = pool.run(4, with_experts, config_path, [*overrides, "engine.reduce_dtype=bf16"], sizes)
        assert len({tuple(rank.figures) for rank in found}) == 1
        assert 0 < training.difference(found[0].figures, one.figures) < 5e-3


def on_meta(path: str, kind: str) -> tuple[Config, Topology, list[Stage]]:
    settings = (
        ["engine.config=" + json.dumps({"zero_optimization": {"stage": 1}})] if kind == "deepspeed" else []
    )
    config = config_of(path, ["parallel.data=4", "train.precision=bf16", f"engine.kind={kind}", *settings], 4)
    topology = Topology(config, 0, OWN, {"dp": 2, "ep": 2})
    stage = Stage(config, range(len(layers_of(config))), topology, "meta")
    for parameter in stage.parameters():
        parameter.shard = topology.placed(shard_of(parameter))  # type: ignore[attr-defined]
    return config, topology, [stage]


def test_an_engine_refuses_sums_that_it_cannot_do(config_path: str) -> None:
    """FSDP2 sums a module's gradients as one, and DeepSpeed all; it has no buffers."""
    config, topology, stages = on_meta(config_path, "fsdp")
    found = FSDPEngine._units(SimpleNamespace(mesh=topology), stages[0], sums_in(stages[0], topology))  # type: ignore[arg-type]
    own = {
        name: over.tokens
        for name, module in stages[0].named_modules()
        if (over := found.get(module)) is not None
    }
    assert {name: tokens for name, tokens in own.items() if name.endswith("experts")} == {
        f"blocks.{i}.experts": ("dp", "cp") for i in range(config.model.num_layers)
    }
    stages[0].blocks["0"].experts.bias = stages[0].blocks["0"].norm1.weight
    with pytest.raises(
        ConfigError,
        match=r"engine.kind: fsdp sums the gradients of a module as one, and those of blocks.0.experts "
        r"differ",
    ):
        FSDPEngine._units(SimpleNamespace(mesh=topology), stages[0], sums_in(stages[0], topology))  # type: ignore[arg-type]
    config, topology, stages = on_meta(config_path, "deepspeed")
    with pytest.raises(
        ConfigError,
        match=r"engine.kind: DeepSpeed updates no buffers, and the model has blocks.0.experts.sent",
    ):
        DeepSpeedEngine(config, stages, topology)  # type: ignore[arg-type]
    for block in stages[0].blocks.values():
        del block.experts.sent, block.experts.seen
    with pytest.raises(
        ConfigError,
        match=r"engine.kind: DeepSpeed sums all gradients over dp×ep×cp, and this model has some that are "
        r"not",
    ):
        DeepSpeedEngine(config, stages, topology)  # type: ignore[arg-type]


def sums_in(stage: Stage, topology: Topology) -> dict[str, GradientSum]:
    return {
        name: topology.gradient_sum(shard_of(p)) for name, p in stage.named_parameters(remove_duplicate=False)
    }


@pytest.mark.parametrize("fault", [TooWide, TooNarrow])
@pytest.mark.parametrize("overrides", [DATA, SHARDED])
def test_a_sum_over_other_ranks_is_noticed(
    pool: Any, config_path: str, fault: type[Mesh], overrides: list[str]
) -> None:
    """The planted faults."""
    (one,) = pool.run(1, with_experts, config_path, [], ONE)
    found = pool.run(4, with_experts, config_path, overrides, {"dp": 2, "ep": 2}, fault)
    assert training.difference(found[0].figures, one.figures) > 1e-6


def run_with_experts(
    path: str, overrides: list[str], sizes: Mapping[str, int], forgets: bool = False
) -> None:
    """A run with a trainer, which goes on from its last checkpoint; `forgets`:
    buffers are read into copies of them.
    """
    place = place_from_environment()
    config = config_of(path, overrides, place.world_size)
    mesh, piece = joined(config, sizes), ShardedBuffer.piece.fget  # type: ignore[attr-defined]
    copied = mock.patch.object(
        ShardedBuffer, "piece", property(lambda self: (self.value.clone(), piece(self)[1]))
    )
    with copied if forgets else contextlib.nullcontext():
        trainer_of(config, mesh, Inputs(config, place.rank)).run()
    mesh.close()


def test_buffers_move_between_layouts(pool: Any, tmp_path: Path) -> None:
    """A buffer that is not saved whole, or comes back as another rank's or not at all, would change every
    loss from there on. A recomputed pass, or one in validation, must not count: a run that validates on other
    tokens has the losses of one that never does.
    """
    prefix = training.write_corpus(tmp_path)
    path = training.write_config(
        tmp_path, prefix, model={"num_layers": 2}, train={"precision": "fp64", "steps": 6}
    )
    common = [
        "optim.decay_steps=6",
        "train.eval_every=2",
        f"data.valid={json.dumps(training.write_corpus(tmp_path, 'valid', tokens=500, seed=1))}",
        "checkpoint.every=100",
    ]
    pool.run(1, run_with_experts, path, [*common, f"log.dir={tmp_path}/whole"], ONE)
    never = [*common, "train.eval_every=0", f"log.dir={tmp_path}/never"]
    pool.run(1, run_with_experts, path, never, ONE)
    assert training.figures(tmp_path / "never") == training.figures(tmp_path / "whole")
    moves: list[tuple[int, int, list[str], dict[str, int]]] = [
        (
            2,
            4,
            ["parallel.data=2", "parallel.context=2", "engine.shard_optimizer=true"],
            {"edp": 2, "ep": 2, "etp": 1},
        ),
        (4, 2, ["parallel.data=2", "engine.kind=fsdp", "train.recompute=full"], {"dp": 1, "ep": 2}),
        (6, 1, [], ONE),
    ]
    for name in ("moved", "forgotten"):
        for steps, ranks, overrides, sizes in moves:
            given = [*common, *overrides, f"train.steps={steps}", f"log.dir={tmp_path}/{name}"]
            pool.run(ranks, run_with_experts, path, given, sizes, name == "forgotten" and steps == 6)
    whole, moved, forgotten = (training.figures(tmp_path / name) for name in ("whole", "moved", "forgotten"))
    assert training.difference(moved, whole) < 1e-10
    assert training.difference(forgotten, whole) > 1e-6


class Scaled(Block):
    """A block whose output is divided by the largest number that a step before has
    seen, as that of 8-bit numbers is.
    """

    def __init__(
        self, index: int, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(index, config, mesh, dtype, device)
        shard = Shard((1,), (replicated(mesh.tp, partial=config.parallel.sequence),), fill=1.0)
        self.largest = new_buffer(shard, lambda value, largest: largest, torch.float64, device, "max")

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """``[tokens, hidden]`` → the same."""
        x = super().forward(x, context)
        self.largest.note(context.key, x.detach().abs().amax().view(1))
        return x / self.largest.value


def scaled(path: str, overrides: list[str], local: bool = False) -> Found:
    """Training with such blocks; `local`: the planted fault, the largest number that a
    rank has seen itself.
    """
    place = place_from_environment()
    config = run_of(path, *overrides, world=place.world_size)
    fault = (
        mock.patch.object(buffers, "all_reduce", lambda x, group, op: x)
        if local
        else contextlib.nullcontext()
    )
    with fault:
        return train(config, mesh_of(config), gpt(config, Scaled))


@pytest.mark.parametrize("overrides", [["parallel.tensor=2", "parallel.sequence=true"], ["parallel.data=2"]])
def test_the_largest_of_all_ranks(pool: Any, config_path: str, overrides: list[str]) -> None:
    """A sum of maxima, or of one rank's tokens alone."""
    (one,) = pool.run(1, scaled, config_path, [])
    assert len({float(one.pieces[f"buffer/blocks.{i}.largest"].tensor) for i in range(2)} | {1.0}) == 3
    assert apart(pool.run(2, scaled, config_path, overrides), one) < TOLERANCE
    found = pool.run(2, scaled, config_path, overrides, True)
    assert max(training.difference(rank.figures, one.figures) for rank in found) > 1e-6


def test_a_skipped_step_leaves_buffers(tmp_path: Path) -> None:
    """Counts of a step whose gradients are not finite are of no step."""
    buffer = new_buffer(Shard((2,)), moved, torch.float64, CPU)
    path = training.write_config(tmp_path, "unused")
    topology = topology_of(run_of(path))
    for skip, right in ((torch.ones(()), 0.0), (torch.zeros(()), 0.03)):
        for key in (0, 0, 1):  # the second is a recomputed pass
            buffer.note(key, torch.full((2,), 1.0 + key, dtype=torch.float64))
        update_buffers({"own": buffer}, topology, skip)
        assert torch.allclose(buffer.value, torch.full((2,), right, dtype=torch.float64))
    buffer.eval().note(0, torch.ones(2))
    assert not buffer.noted
