"""The seams that later work builds on, each proved by something that is no feature: another axis, two
chunks a rank, another optimizer.
"""

import contextlib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megacore.config import Config
from megacore.distributed.axes import AXES, Axis
from megacore.distributed.collectives import leave_tensor_parallel
from megacore.distributed.communicator import SOLO, Group
from megacore.distributed.mesh import Mesh
from megacore.distributed.shard import Shard, TensorSlice, new_parameter, shard_of, split
from megacore.distributed.topology import Topology
from megacore.engine import owners
from megacore.engine.held_tensors import HeldTensors
from megacore.engine.owners import Dealing
from megacore.model import gpt
from megacore.model.block import Block
from megacore.model.context import Context
from megacore.model.initial import initialise
from megacore.pipeline import generators, partition, schedule
from megacore.pipeline.schedule import Action, Op, Placement, Plan, looped
from megacore.tools.launchers import place_from_environment
from megacore.tools.schedules.validate import validate
from tests import training
from tests.build import mesh_of, model_of, run_of
from tests.steps import STEPS, Found, apart, batch_of, put_together, train, train_rank

CPU = torch.device("cpu")
TOLERANCE = 1e-12  # fp64: sums of some thousand terms in another order


# Another axis: ranks along it compute the same, but each holds a part of a bias that every block adds to its
# output.
EXTRA = Axis("xp", "extra")


class ExtraBias(Block):
    """A block with one bias more, cut over the ranks of a group that no other layer knows."""

    def __init__(
        self, index: int, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(index, config, mesh, dtype, device)
        extra = self.extra_group = mesh.group("xp")
        shard = Shard((config.model.hidden_size,), (split(extra, 0),), init_std=0.1)
        self.start, self.extra = shard.offset[0], new_parameter(shard, dtype, device)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """``[tokens, hidden]`` → the same."""
        own = torch.zeros_like(x[0]).index_add(
            0, torch.arange(self.start, self.start + len(self.extra)), self.extra
        )
        return super().forward(x, context) + leave_tensor_parallel(own, self.extra_group, False)


class Incomplete(Mesh):
    """The planted fault: a layer's record is left as the layer states it."""

    def placed(self, shard: Shard, name: str | None = None) -> Shard:
        return shard


def with_another_axis(config_path: str, overrides: list[str], size: int, incomplete: bool = False) -> Found:
    """Training with `size` ranks along the extra axis; `incomplete`: the mesh does not say that
    parameters are copies along it.
    """
    place = place_from_environment()
    config = run_of(config_path, *overrides, world=place.world_size // size)
    axes = (*AXES[:2], EXTRA, *AXES[2:])
    mesh = (Incomplete if incomplete else Mesh)(config, place, CPU, axes, {"xp": size})
    return train(config, mesh, gpt.gpt(config, ExtraBias))


@pytest.fixture
def config_path(tmp_path: Path) -> str:
    return training.write_config(
        tmp_path, "unused", model={"num_layers": 4}, train={"precision": "fp64"}, optim={"weight_decay": 0.3}
    )


LAYOUTS = [(2, []), (4, ["parallel.data=2", "engine.shard_optimizer=true"]), (4, ["parallel.tensor=2"])]


@pytest.mark.parametrize(("ranks", "overrides"), LAYOUTS)
def test_another_axis(pool: Any, config_path: str, ranks: int, overrides: list[str]) -> None:
    """An axis that only one layer knows: gradients, norm, update or what is saved would be
    wrong for it, or for all others.
    """
    (one,) = pool.run(1, with_another_axis, config_path, [], 1)
    found = pool.run(ranks, with_another_axis, config_path, overrides, 2)
    extra = [
        rank.pieces["model/blocks.0.extra"].tensor
        for rank in (one, *found)
        if "model/blocks.0.extra" in rank.pieces
    ]
    assert {len(tensor) for tensor in extra} == {32, 16}, "one process holds all of it, a rank a half"
    assert apart(found, one) < TOLERANCE


def test_an_axis_left_out_of_the_record_is_noticed(pool: Any, config_path: str) -> None:
    """The planted fault: copies along the axis would count twice in the norm, and be saved twice."""
    (one,) = pool.run(1, with_another_axis, config_path, [], 1)
    found = pool.run(2, with_another_axis, config_path, [], 2, True)
    assert training.difference(found[0].figures, one.figures) > 1e-3
    with pytest.raises(AssertionError, match="blocks"):
        put_together(found)


def drawn_into(module: torch.nn.Module) -> None:
    held = {"w": (module.w, shard_of(module.w))}
    initialise(held, {"w": shard_of(module.w)}, 0, torch.float32)


def test_a_tensor_can_be_cut_twice() -> None:
    """Over two axes, along two dims or the same: the pieces must tile the tensor, and
    be drawn as its slices.
    """
    for dims in ((0, 1), (1, 0), (0, 0)):
        cover, drawn = torch.zeros(7, 6), torch.zeros(7, 6)
        whole = torch.nn.Module()
        whole.w = new_parameter(Shard((7, 6), (split(SOLO, dims[0]),), init_std=1.0), torch.float32, CPU)
        drawn_into(whole)
        for a in range(2):
            for b in range(3):
                along = (split(Group("tp", (0, 1), a), dims[0]), split(Group("xp", (0, 1, 2), b), dims[1]))
                module = torch.nn.Module()
                module.w = new_parameter(shard := Shard((7, 6), along, init_std=1.0), torch.float32, CPU)
                drawn_into(module)
                at = tuple(slice(*shard.interval(dim)) for dim in (0, 1))
                cover[at] += 1
                drawn[at] = module.w.detach()
        assert (cover == 1).all(), dims
        assert torch.equal(drawn, whole.w.detach()), dims


# Two chunks a rank, by a plan written by hand: every microbatch a stage further at each tick, forward and
# then backward.


def in_ticks(placement: Placement, microbatches: int) -> Plan:
    last = max(stage for stages in placement for stage in stages)
    ranks = []
    for stages in placement:
        held = [(stage, chunk, m) for chunk, stage in enumerate(stages) for m in range(microbatches)]
        forward = [
            Action(Op.FORWARD, m, chunk)
            for stage, chunk, m in sorted(held, key=lambda at: (at[2] + at[0], -at[0]))
        ]
        backward = [
            Action(Op.BACKWARD, m, chunk)
            for stage, chunk, m in sorted(held, key=lambda at: (at[2] + last - at[0], at[0]))
        ]
        ranks.append((*forward, *backward))
    return Plan(tuple(ranks), placement)


PLACEMENTS: dict[str, Callable[[int], Placement]] = {
    "looped": lambda ranks: looped(ranks, 2),
    # the first rank has both ends
    "V": lambda ranks: tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks)),
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_plans_of_two_chunks_are_valid(name: str, ranks: int) -> None:
    """And so are those that only run forward; a chunk that does not wait for the one
    before it on the same rank is named.
    """
    placement = PLACEMENTS[name](ranks)
    for microbatches in (1, 3, 8):
        validate(schedule.lower(in_ticks(placement, microbatches), [(0, 2 * ranks - 1)]), microbatches)
        validate(schedule.forward_only(placement, microbatches), microbatches, forward_only=True)
    if name == "V":
        plan = schedule.lower(in_ticks(placement, 2))
        turn = ranks - 1  # whose two chunks follow each other
        actions = list(plan.actions[turn])
        at = [i for i, a in enumerate(actions) if a.op is Op.FORWARD and a.microbatch == 0]
        actions[at[0]], actions[at[1]] = actions[at[1]], actions[at[0]]
        spoilt = Plan((*plan.actions[:turn], tuple(actions), *plan.actions[turn + 1 :]), placement)
        with pytest.raises(ValueError, match=f"pp rank {turn}, forward of microbatch 0"):
            validate(spoilt, 2)
    with pytest.raises(ValueError, match="each of 0, 1, 2, … must have one place"):
        validate(Plan(plan.actions if name == "V" else ((),) * ranks, ((0, 0),) * ranks), 1)


def with_two_chunks(config_path: str, overrides: list[str], name: str) -> Found:
    place = place_from_environment()
    config = run_of(config_path, *overrides, world=place.world_size)
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"chunks": 2})})

    def generator(ranks: int, microbatches: int, chunks: int) -> Plan:
        return in_ticks(PLACEMENTS[name](ranks), microbatches)

    placed = mock.patch.object(
        partition, "placement", lambda schedule, ranks, chunks: PLACEMENTS[name](ranks)
    )
    with placed, mock.patch.dict(generators.GENERATORS, {"1f1b": generator}):
        return train(config, mesh_of(config))


@pytest.mark.parametrize(
    ("name", "ranks", "overrides"),
    [
        ("looped", 2, ["parallel.pipeline=2"]),
        ("V", 2, ["parallel.pipeline=2"]),
        ("V", 1, []),
        (
            "looped",
            4,
            [
                "parallel.pipeline=2",
                "parallel.data=2",
                "engine.shard_optimizer=true",
                "model.tie_embeddings=false",
            ],
        ),
        ("V", 4, ["parallel.pipeline=2", "parallel.data=2", "engine.shard_optimizer=true"]),
        ("V", 4, ["parallel.pipeline=2", "parallel.tensor=2", "parallel.sequence=true"]),
        (
            "V",
            4,
            ["parallel.pipeline=2", "parallel.data=2", "engine.kind=fsdp", "model.tie_embeddings=false"],
        ),
    ],
)
def test_two_chunks_a_rank(pool: Any, config_path: str, name: str, ranks: int, overrides: list[str]) -> None:
    """Activations, gradients or buckets that go by the microbatch alone would mix up a rank's chunks."""
    (one,) = pool.run(1, train_rank, config_path, [o for o in overrides if o.startswith("model.")])
    assert apart(pool.run(ranks, with_two_chunks, config_path, overrides, name), one) < TOLERANCE


# Another optimizer.
SGD = ["optim.kind=sgd", "optim.momentum=0.8", "optim.lr=0.05", "optim.weight_decay=0.1"]


def test_momentum_sgd_is_what_it_says(tmp_path: Path) -> None:
    """Momentum, decoupled decay on matrices only, clipping: against the formula, written out."""
    path = training.write_config(tmp_path, "unused", train={"precision": "fp64"})
    config = run_of(path, *SGD)
    model = model_of(config)
    buffers = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for step in range(1, STEPS + 1):
        total = sum(model.loss(model.hidden(b.tokens), b.targets) for b in batch_of(config, step, SOLO))
        (total / (config.train.global_batch_size * config.train.seq_len)).backward()  # type: ignore[union-attr]
        norm = float(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm())
        clip = min(1.0, config.optim.grad_clip / (norm + 1e-6))
        rate = config.optim.lr * step / config.optim.warmup_steps
        with torch.no_grad():
            for name, p in model.named_parameters():
                assert p.grad is not None
                buffers[name].mul_(0.8).add_(p.grad * clip)
                decay = 0.1 if p.dim() > 1 and "norm" not in name and not name.endswith("bias") else 0.0
                p.mul_(1 - rate * decay).sub_(rate * buffers[name])
                p.grad = None
    found = put_together([train(config, mesh_of(config))])
    assert found.keys() == {f"{kind}/{name}" for kind in ("model", "momentum") for name in buffers}
    for name, p in model.named_parameters():
        assert float((found[f"model/{name}"] - p.detach()).norm()) < TOLERANCE * float(
            p.detach().norm() + 1
        ), name
        assert float((found[f"momentum/{name}"] - buffers[name]).norm()) < TOLERANCE * float(
            buffers[name].norm() + 1
        ), name


def test_momentum_sgd_moves_between_engines_and_layouts(pool: Any, tmp_path: Path) -> None:
    """A buffer that is not saved, or comes back as another rank's, would change every loss from there on."""
    config = training.write_config(
        tmp_path, training.write_corpus(tmp_path), train={"precision": "fp64", "steps": 8}
    )
    common = [*SGD, "optim.decay_steps=8", "checkpoint.every=20"]
    pool.run(1, training.run_rank, config, common, str(tmp_path / "whole"))
    moves = [
        (2, 2, ["parallel.data=2"]),
        (4, 2, ["parallel.data=2", "engine.shard_optimizer=true"]),
        (6, 4, ["parallel.data=2", "parallel.tensor=2", "engine.kind=fsdp"]),
        (8, 2, ["parallel.pipeline=2"]),
    ]
    for steps, ranks, overrides in moves:
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


# An optimizer that needs whole matrices, with state of another shape, for some parameters; others have other
# settings or AdamW.
WHOLE = [
    'optim.groups=[{"match": ["*norm*", "blocks.2.*.bias"], "lr": 0.01, "beta2": 0.8}, '
    '{"match": ["blocks.*.weight", "embedding.weight"], "kind": "orthogonal", "lr": 0.02}, '
    '{"match": ["position"], "kind": "sgd", "momentum": 0.5}]'
]


def with_whole_matrices(config_path: str, overrides: list[str], planted: bool = False) -> Found:
    """Training with `tests.whole_rule`; `planted`: what a rank holds is taken for whole."""
    importlib.import_module("tests.whole_rule")  # registers the rule, in this process alone
    place = place_from_environment()
    config = run_of(config_path, *WHOLE, *overrides, world=place.world_size)
    fault = (
        mock.patch.object(Dealing, "sends", lambda self, task, at: at == task.owner)
        if planted
        else contextlib.nullcontext()
    )
    with fault, mock.patch.object(owners, "TOGETHER", 1):  # several rounds
        return train(config, mesh_of(config))


WHOLE_LAYOUTS = {
    "dp2": (2, []),
    "sharded": (2, ["engine.shard_optimizer=true"]),
    "tp2": (2, ["parallel.tensor=2", "parallel.sequence=true"]),
    "pp2": (2, ["parallel.pipeline=2"]),
    "fsdp": (2, ["engine.kind=fsdp"]),
    "tp2 fsdp": (4, ["parallel.tensor=2", "engine.kind=fsdp", "engine.cpu_offload=true"]),
    "tp2 sharded": (4, ["parallel.tensor=2", "engine.shard_optimizer=true"]),
    "tp2dp2": (4, ["parallel.tensor=2", "parallel.sequence=true"]),
    "copies of shards": (4, ["engine.kind=fsdp", "engine.shard_size=2"]),
    "tp2 copies of shards": (8, ["parallel.tensor=2", "engine.kind=fsdp", "engine.shard_size=2"]),
    "V": (4, ["parallel.pipeline=2", "parallel.schedule=zb_v"]),
}


@pytest.mark.parametrize("layout", WHOLE_LAYOUTS)
def test_a_rule_gets_whole_matrices_in_every_layout(pool: Any, config_path: str, layout: str) -> None:
    """Cut anywhere, or put together in another order, a matrix would have another update, and a state
    of its own shape another value.
    """
    ranks, overrides = WHOLE_LAYOUTS[layout]
    (one,) = pool.run(1, with_whole_matrices, config_path, [])
    found = pool.run(ranks, with_whole_matrices, config_path, overrides)
    key = "orthogonal_rows/blocks.0.attention.output.weight"
    rows = [rank.pieces[key] for rank in found if key in rank.pieces]
    assert {piece.shape for piece in rows} == {(1, 32)} and sum(piece.saved for piece in rows) == 1
    assert {key.partition("/")[0] for key in one.pieces} == {
        "model",
        "adam_m",
        "adam_v",
        "momentum",
        "orthogonal_m",
        "orthogonal_rows",
    }
    assert apart(found, one) < TOLERANCE


@pytest.mark.parametrize("layout", ["tp2", "fsdp"])
def test_a_rule_that_is_given_a_piece_is_noticed(pool: Any, config_path: str, layout: str) -> None:
    """The planted fault: what a rank holds of a matrix is taken for all of it."""
    ranks, overrides = WHOLE_LAYOUTS[layout]
    with pytest.raises(Exception, match="a piece of"):
        pool.run(ranks, with_whole_matrices, config_path, overrides, True)


def run_with_whole_matrices(
    config_path: str, overrides: list[str], log_dir: str, planted: bool = False
) -> int:
    """A whole run; `planted`: state of other shapes is saved, and not restored."""
    importlib.import_module("tests.whole_rule")
    held, own = HeldTensors.tensors, ("orthogonal_rows/",)

    def copied(self: HeldTensors) -> dict[str, tuple[Tensor, TensorSlice]]:
        return {
            key: (tensor.clone() if key.startswith(own) else tensor, box)
            for key, (tensor, box) in held(self).items()
        }

    with mock.patch.object(HeldTensors, "tensors", copied) if planted else contextlib.nullcontext():
        return training.run_rank(config_path, [*WHOLE, *overrides], log_dir)


def test_whole_matrices_move_between_engines_and_layouts(pool: Any, tmp_path: Path) -> None:
    """State that is not saved, or comes back as another parameter's, would change every
    loss from there on.
    """
    config = training.write_config(
        tmp_path, training.write_corpus(tmp_path), train={"precision": "fp64", "steps": 6}
    )
    common = ["optim.decay_steps=8", "checkpoint.every=20"]
    pool.run(1, run_with_whole_matrices, config, common, str(tmp_path / "whole"))
    right = training.figures(tmp_path / "whole")
    moves = [
        (2, 2, ["engine.shard_optimizer=true"]),
        (4, 2, ["parallel.tensor=2"]),
        (6, 2, ["engine.kind=fsdp"]),
    ]
    for steps, ranks, overrides in moves:
        options = [*common, *overrides, f"train.steps={steps}"]
        pool.run(ranks, run_with_whole_matrices, config, options, str(tmp_path / "moved"))
    assert training.difference(training.figures(tmp_path / "moved"), right) < 1e-10
    for steps in (3, 6):
        pool.run(
            1,
            run_with_whole_matrices,
            config,
            [*common, f"train.steps={steps}"],
            str(tmp_path / "lost"),
            True,
        )
    assert training.difference(training.figures(tmp_path / "lost"), right) > 1e-6, (
        "the planted fault: state of its own shape is lost"
    )
