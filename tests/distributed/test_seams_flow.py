"""The seam of layers: a second tensor that flows, losses of their own on any stage, and a batch that
every stage reads. No GPT does so.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from megacore.config import Config
from megacore.config.schema import IGNORED
from megacore.distributed.collectives import own_part
from megacore.distributed.shard import Shard, new_parameter, replicated
from megacore.distributed.topology import Topology
from megacore.model.batch import Samples
from megacore.model.block import Block
from megacore.model.context import Context
from megacore.model.embedding import Embedding
from megacore.model.flow import HIDDEN, Flow, Loss
from megacore.model.gpt import gpt
from megacore.model.head import Head
from megacore.model.layers import Layer, Layers, LayerSpec, check, crossing
from megacore.model.stage import Stage
from megacore.pipeline.partition import layer_ranges, placement_of
from megacore.pipeline.runtime import Runtime
from megacore.tensor_parallel.gradient import WeightGradPart, main_gradient_of
from megacore.tools.launchers import place_from_environment
from megacore.tools.text.decoding import Decoder
from megacore.tools.text.sampling import Sampler
from megacore.train.step import TrainStep
from tests import training
from tests.build import mesh_of, run_of
from tests.steps import Found, apart, train

TOLERANCE = 1e-12  # fp64: sums of some thousand terms in another order


class First(Block):
    """A block that hands a tensor on besides hidden states, which the next layers do not read."""

    writes = {"hidden": HIDDEN, "first": Flow(("tokens", "hidden"))}  # noqa: RUF012

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """``[tokens, hidden]`` → two of them."""
        x = super().forward(x, context)
        return x, x.sin()


class Spread(Block):
    """A block with a loss: the mean square of its output, over all tokens."""

    losses = (Loss("spread", coefficient=0.3),)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """``[tokens, hidden]`` → the same, and the sum of squares."""
        x = super().forward(x, context)
        return x, x.square().mean(1).sum()


class Reader(Block):
    """A block that reads the tensor of the first one, and whether each token is odd."""

    reads = ("hidden", "first")

    def __init__(
        self, index: int, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(index, config, mesh, dtype, device)
        along = (replicated(mesh.tp, partial=config.parallel.sequence),)
        self.odd = new_parameter(Shard((2, config.model.hidden_size), along, init_std=0.5), dtype, device)

    def forward(self, x: Tensor, first: Tensor, context: Context) -> Tensor:  # type: ignore[override]
        """``[tokens, hidden]`` twice → once."""
        odd = context.batch.tokens.flatten() % 2
        return (
            super().forward(x + 0.5 * first, context)
            + self.odd[own_part(odd, context.group) if context.sequence else odd]
        )


def after_next(samples: Samples) -> np.ndarray:
    """The token behind each target, where it is less than 40: more of them in some samples than in others."""
    found = np.concatenate([samples.targets[:, 1:], np.full_like(samples.targets[:, :1], IGNORED)], 1)
    return np.where(found < 40, found, IGNORED)


class AfterNext(Layer):
    """A layer that only gives a loss, over a field of the batch that no other layer reads."""

    reads = ("first", "hidden")
    writes = {}  # noqa: RUF012
    losses = (Loss("after_next", over="after_next", coefficient=0.7),)
    fields = {"after_next": after_next}  # noqa: RUF012

    def __init__(self, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        along = (replicated(mesh.tp, partial=config.parallel.sequence),)
        self.weight = new_parameter(Shard((config.model.hidden_size,), along, init_std=0.5), dtype, device)

    def forward(self, first: Tensor, x: Tensor, context: Context) -> Tensor:
        """Two ``[tokens, hidden]`` → the sum of squared mistakes."""
        wanted = context.batch["after_next"].flatten()
        wanted = own_part(wanted, context.group) if context.sequence else wanted
        mistakes = ((first * x) @ self.weight - wanted / 40).square()
        return mistakes.masked_fill(wanted == IGNORED, 0.0).sum()


def model() -> Layers:
    kinds = [First, Spread, Block, Reader]
    blocks = [LayerSpec(f"blocks.{i}", kind, (i,)) for i, kind in enumerate(kinds)]
    return [
        LayerSpec("embedding", Embedding),
        *blocks,
        LayerSpec("after_next", AfterNext),
        LayerSpec("blocks.4", Block, (4,)),
        LayerSpec("head", Head),
    ]


@pytest.fixture
def config_path(tmp_path: Path) -> str:
    sizes = {"num_layers": len(model()) - 2}
    return training.write_config(
        tmp_path, "unused", model=sizes, train={"precision": "fp64"}, optim={"weight_decay": 0.3}
    )


def trained(config_path: str, overrides: list[str], fault: str = "") -> Found:
    """Some steps of the model. `fault`: a mistake that is planted."""
    place = place_from_environment()
    config = run_of(config_path, *overrides, world=place.world_size)
    with FAULTS[fault]() if fault else mock.MagicMock():
        return train(config, mesh_of(config), model())


ZB = ["parallel.pipeline=2", "parallel.schedule=zb_v"]
LAYOUTS = {
    "pp2": (2, ["parallel.pipeline=2"]),
    "pp4": (4, ["parallel.pipeline=4"]),
    "interleaved": (2, ["parallel.pipeline=2", "parallel.schedule=interleaved"]),
    "zb_h1": (2, ["parallel.pipeline=2", "parallel.schedule=zb_h1", "train.recompute=full"]),
    "zb_v, sequence": (4, [*ZB, "parallel.tensor=2", "parallel.sequence=true"]),
    "cp2": (2, ["parallel.context=2"]),
    "tp2": (2, ["parallel.tensor=2"]),
    "tp2, sequence": (2, ["parallel.tensor=2", "parallel.sequence=true", "train.recompute=full"]),
    "fsdp, pp2": (
        4,
        ["parallel.data=2", "parallel.pipeline=2", "engine.kind=fsdp", "model.tie_embeddings=false"],
    ),
    "dp2": (2, ["parallel.data=2", "engine.shard_optimizer=true"]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_one_process(pool: Any, config_path: str, name: str) -> None:
    """A tensor lost or added twice at a cut, a loss that only the last stage has, a
    batch that only the first one sees.
    """
    ranks, overrides = LAYOUTS[name]
    (one,) = pool.run(1, trained, config_path, [o for o in overrides if o.startswith("model.")])
    assert apart(pool.run(ranks, trained, config_path, overrides), one) < TOLERANCE


def gradient_dropped(lost: str = "first") -> Any:
    """At every cut the gradient of one of the tensors is lost."""
    hand_over = Runtime._hand_over

    def dropped(self: Runtime, here: Any, away: Any, key: Any, step: int, flows: dict[str, Tensor]) -> None:
        flows = {name: torch.zeros_like(x) if step < 0 and name == lost else x for name, x in flows.items()}
        hand_over(self, here, away, key, step, flows)

    return mock.patch.object(Runtime, "_hand_over", dropped)


def weighted_by_local_counts() -> Any:
    """Each rank weighs its sums by what it counts itself, times the ranks."""

    def own(self: TrainStep, batch: Any, field: str) -> Any:
        count = sum((microbatch[field] != IGNORED).sum() for microbatch in batch)
        return 1.0 / (count.double() * self.mesh.gradient_group.size)

    return mock.patch.object(TrainStep, "one_over_count", own)


FAULTS = {"dropped": gradient_dropped, "local": weighted_by_local_counts}


@pytest.mark.parametrize(
    ("fault", "name"), [("dropped", "pp2"), ("dropped", "interleaved"), ("local", "dp2"), ("local", "cp2")]
)
def test_planted_mistakes_are_caught(pool: Any, config_path: str, fault: str, name: str) -> None:
    """What the test above would miss if the second tensor, or the field, did not matter."""
    (one,) = pool.run(1, trained, config_path, [])
    assert apart(pool.run(LAYOUTS[name][0], trained, config_path, LAYOUTS[name][1], fault), one) > 1e-6


def written(config_path: str, overrides: list[str]) -> list[int]:
    """What the drawn model writes after a prompt."""
    place = place_from_environment()
    config = run_of(config_path, *overrides, world=place.world_size)
    mesh = mesh_of(config)
    own = [layer_ranges(config)[stage] for stage in placement_of(config)[mesh.pp.rank]]
    decoder = Decoder([Stage(config, layers, mesh, mesh.device, model()).eval() for layers in own], mesh)
    words = training.VOCAB_SIZE
    tokens = list(decoder.generate([3, 1, 4, 1, 5], 8, Sampler(1.0, words, 1.0, 0, words)))
    mesh.close()
    return tokens


def test_a_text_passes_all_that_flows(pool: Any, config_path: str) -> None:
    """Behind the first stage layers would have no tokens, nor what the first block handed
    on; a loss would ask for targets.
    """
    (one,) = pool.run(1, written, config_path, [])
    assert len(set(one)) > 4
    for overrides in (["parallel.pipeline=4"], [*ZB, "parallel.tensor=2"]):
        assert pool.run(4, written, config_path, overrides) == [one] * 4


class Scale(torch.autograd.Function):
    """``x · gain + shift``, whose backward may leave the gradients of both vectors for later,
    as one function of two tensors.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(x, gain)
        ctx.mains = main_gradient_of(gain), main_gradient_of(shift)
        return x * gain + shift

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        x, gain = ctx.saved_tensors
        of_gain, of_shift = ctx.mains

        def add(x: Tensor, grad: Tensor) -> None:
            of_gain.add((grad * x).sum(0))
            of_shift.add(grad.sum(0))

        if of_gain.waits:
            of_gain.defer(add, x, grad, others=[of_shift])
        else:
            add(x, grad)
        return grad * gain, None, None


class ScaledBlock(Block):
    """A block that scales and shifts its output."""

    def __init__(
        self, index: int, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(index, config, mesh, dtype, device)
        shard = Shard((config.model.hidden_size,), init_std=0.5)
        self.gain, self.shift = (new_parameter(shard, dtype, device) for _ in range(2))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """``[tokens, hidden]`` → the same."""
        return Scale.apply(super().forward(x, context), self.gain, self.shift)  # type: ignore[no-any-return]


def with_a_function_left(config_path: str, overrides: list[str]) -> tuple[Found, int]:
    """Training, and how many functions with several sums the second halves of backwards got."""
    left, finish = 0, WeightGradPart.finish

    def counted(part: WeightGradPart) -> None:
        nonlocal left
        left += len(part.totals) > 1
        finish(part)

    place = place_from_environment()
    config = run_of(config_path, *overrides, world=place.world_size)
    with mock.patch.object(WeightGradPart, "finish", counted):
        return train(config, mesh_of(config), gpt(config, ScaledBlock)), left


def test_a_layer_leaves_a_function_for_later(pool: Any, config_path: str) -> None:
    """To a split backward; what it adds must be there before its sums are reduced, and be
    the same bits as in a whole one.
    """
    pp2 = ["parallel.pipeline=2", "parallel.data=2", "engine.shard_optimizer=true"]
    whole, split = (
        pool.run(4, with_a_function_left, config_path, [*pp2, *more])
        for more in ([], ["parallel.schedule=zb_h1"])
    )
    for (right, none), (found, left) in zip(whole, split, strict=True):
        assert none == 0 < left
        assert found.figures == right.figures and found.pieces.keys() == right.pieces.keys()
        assert all(
            torch.equal(piece.tensor, right.pieces[name].tensor) for name, piece in found.pieces.items()
        )


def test_what_crosses_a_cut_is_what_later_layers_read() -> None:
    """More would be memory and messages for nothing; less, a layer without its input."""
    assert [list(crossing(model(), cut)) for cut in range(len(model()) + 1)] == [
        [],
        ["hidden"],
        *[["hidden", "first"]] * 4,
        ["hidden"],
        ["hidden"],
        [],
    ]


class Late(Block):
    """A block that reads what nobody writes."""

    reads = ("hidden", "late")


class Other(Block):
    """A block that hands on what another declares, with other dims."""

    writes = {"hidden": HIDDEN, "first": Flow(("tokens", 3))}  # noqa: RUF012


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (Late, "layer other reads late, which no layer before it writes"),
        (Other, "two layers declare the tensor first differently"),
    ],
)
def test_declarations_that_do_not_fit_are_refused(kind: type[Layer], wrong: str) -> None:
    """Ranks would wait for a tensor that never comes, or give it memory of another size."""
    layers = model()
    check(layers)
    with pytest.raises(ValueError, match=wrong):
        check([*layers[:2], LayerSpec("other", kind, (9,)), *layers[2:]])
