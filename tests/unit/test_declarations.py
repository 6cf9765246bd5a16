"""What a list of layers may declare, and what of it is refused in one line before ranks meet."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from megacore.config import Config
from megacore.errors import ConfigError
from megacore.model.block import Block
from megacore.model.flow import HIDDEN, Flow, Loss
from megacore.model.gpt import gpt
from megacore.model.layers import Layer, LayerSpec, check
from megacore.model.stage import Stage, run
from megacore.tools.choices.check_engine import check_shared
from tests import parameter_owners, training
from tests.build import model_of, run_of


class NoLoss(Layer):
    writes: ClassVar[dict[str, Flow]] = {}


class OverNothing(NoLoss):
    losses = (Loss("own", over="ahead"),)


class Rate(NoLoss):
    losses = (Loss("lr"),)


@pytest.mark.parametrize(
    ("kind", "wrong"), [(NoLoss, "no layer gives a loss"), (OverNothing, "over ahead"), (Rate, "called lr")]
)
def test_losses_that_cannot_be_logged_or_weighed_are_refused(
    tmp_path: Path, kind: type[Layer], wrong: str
) -> None:
    """A traceback in the first step; or a figure of every record that is another's."""
    config = run_of(training.write_config(tmp_path, "unused"))
    with pytest.raises(ValueError, match=wrong):
        check([*gpt(config)[:-1], LayerSpec("head", kind)])


class Apart(Layer):
    """Gives a tensor that no gradient goes through."""

    writes: ClassVar[dict[str, Flow]] = {"seen": Flow(gradient=False)}

    def forward(self, hidden: torch.Tensor, context: Any) -> torch.Tensor:
        return 2 * hidden


def test_a_flow_without_gradient_has_none_within_a_stage_either() -> None:
    """Else a model trains otherwise where a pipeline is cut."""
    flow = {"hidden": torch.ones(2, requires_grad=True)}
    run(Apart(), flow, {}, torch.nn.Module())  # type: ignore[arg-type]
    assert torch.equal(flow["seen"], torch.full((2,), 2.0)) and not flow["seen"].requires_grad


OWN = """
from megacore.distributed.shard import Shard, new_parameter
from megacore.model.block import Block
from megacore.model.gpt import gpt
from megacore.model.head import Head
from megacore.model.layers import LayerSpec


class Own(Block):
    def __init__(self, index, config, mesh, dtype, device):
        super().__init__(index, config, mesh, dtype, device)
        self.own = new_parameter(Shard((4 + LONGER * index,)), dtype, device)

    @classmethod
    def shares(cls, index, config):
        return {NAME: OTHER} if index else {}


class OwnHead(Head):
    SHARES


def layers(config):
    usual = gpt(config, Own)
    return [*usual[:-1], LayerSpec("head", OwnHead)]
"""
RIGHT = {"LONGER": "0", "NAME": '"own"', "OTHER": '"blocks.0.own"', "SHARES": "pass"}
NOTHING = "shares = classmethod(lambda cls, config: {})"
PP2, FSDP = ["parallel.pipeline=2"], ["parallel.pipeline=2", "parallel.data=2", "engine.kind=fsdp"]
REFUSED: dict[str, tuple[dict[str, str], list[str], str]] = {
    "another's that nobody has": (
        {"OTHER": '"blocks.0.owned"'},
        [],
        "model.source: .*blocks.1 shares blocks.0.owned, which no layer makes for itself",
    ),
    "a layer that nobody has": (
        {"OTHER": '"tower.own"', "SHARES": "bare = False"},
        [],
        "blocks.1 shares tower.own, which no layer makes for itself",
    ),
    "what its owner says it shares": (
        {"OTHER": 'f"blocks.{index}.own"'},
        [],
        "blocks.1 shares blocks.1.own, which no layer makes for itself",
    ),
    "what another layer shares itself": (
        {"OTHER": 'f"blocks.{index - 1}.own"'},
        PP2,
        "blocks.2 shares blocks.1.own, which no layer makes for itself",
    ),
    "one's own that it has not": (
        {"NAME": '"owned"'},
        [],
        "blocks.1 shares its owned, and has no such parameter",
    ),
    "another shape": ({"LONGER": "1"}, [], "blocks.1.own is to be blocks.0.own, and is of another shape"),
    "ends apart": (
        {"SHARES": NOTHING},
        PP2,
        "model.tie_embeddings: says that layers share embedding.weight, and none does",
    ),
    "one name": (
        {"SHARES": NOTHING + "; __init__ = tied"},
        [*PP2, "model.tie_embeddings=false"],
        "of one name, embedding.weight, and do not share it: embedding.embedding.weight and head.embedding",
    ),
    "one name on one stage": (
        {"SHARES": NOTHING + "; __init__ = tied"},
        ["model.tie_embeddings=false"],
        "of one name, embedding.weight",
    ),
    "two stages of a rank, fsdp": (
        {},
        [*FSDP, "parallel.schedule=interleaved"],
        "gives one rank stages that share blocks.0.own",
    ),
}


def own_config(folder: Path, changes: dict[str, str], overrides: list[str]) -> Config:
    text = OWN.replace(
        "class OwnHead",
        """
def tied(self, config, mesh, dtype, device):
    Head.__init__(self, config, mesh, dtype, device)
    self.embedding = self.head
    del self.head


class OwnHead""",
    )
    for word, value in (RIGHT | changes).items():
        text = text.replace(word, value)
    (folder / "own.py").write_text(text)
    path = training.write_config(folder, "unused", model={"num_layers": 4, "source": "own.py"})
    return run_of(path, *overrides, world=2 * overrides.count("parallel.data=2") + 2 if overrides else 1)


@pytest.mark.parametrize("case", REFUSED)
def test_layers_that_do_not_share_what_they_say_are_refused(tmp_path: Path, case: str) -> None:
    """A rank would wait for ever for a sum that others do not have, or copies would part in silence."""
    changes, overrides, wrong = REFUSED[case]
    with pytest.raises(ConfigError, match=wrong):
        check_shared(own_config(tmp_path, changes, overrides))
    for overrides in ([], PP2, FSDP):
        check_shared(own_config(tmp_path, {}, overrides))


@pytest.mark.parametrize("overrides", [[], PP2])
def test_a_name_that_two_layers_make_is_refused(tmp_path: Path, overrides: list[str]) -> None:
    """Whichever was taken for the owner, the gradient of the other would be left out."""
    model = {"num_layers": 4, "source": parameter_owners.__file__, "sharing": "two make it"}
    config = run_of(
        training.write_config(tmp_path, "unused", model=model), *overrides, world=2 if overrides else 1
    )
    with pytest.raises(ConfigError, match="blocks.0 shares norm.weight, which embedding and head make: "):
        check_shared(config)


def test_a_layer_within_another_is_refused(tmp_path: Path) -> None:
    """As a module it would take the place of the other's attention, whose parameters would be gone."""
    config = run_of(training.write_config(tmp_path, "unused"))
    first, block, *rest = gpt(config)
    with pytest.raises(ValueError, match="blocks.0.attention has a name within that of the layer blocks.0"):
        check([first, block, LayerSpec("blocks.0.attention", block.kind, block.arguments), *rest])


class Extra(torch.nn.Module):
    """Has state that only torch would save."""

    def get_extra_state(self) -> int:
        return 0


UNSAVED: dict[str, Callable[[torch.nn.Module], object]] = {
    "the torch buffer seen": lambda block: block.register_buffer("seen", torch.zeros(())),
    "the torch buffer attention.flag": lambda block: block.get_submodule("attention").register_buffer(
        "flag", torch.tensor(False)
    ),
    "the torch buffer norm1.count": lambda block: block.get_submodule("norm1").register_buffer(
        "count", torch.zeros(3, dtype=torch.int64)
    ),
    "the state of extra": lambda block: block.add_module("extra", Extra()),
}


def with_state(add: Callable[[torch.nn.Module], object]) -> type[Block]:
    """A block with more state."""

    class Stateful(Block):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            add(self)

    return Stateful


@pytest.mark.parametrize("state", UNSAVED)
def test_state_that_no_checkpoint_saves_is_refused(tmp_path: Path, state: str) -> None:
    """It would train, and a run that goes on would begin with other numbers."""
    config = run_of(training.write_config(tmp_path, "unused"))
    with pytest.raises(ValueError, match=rf"blocks.0 has {state}.* which no checkpoint saves: make it by "):
        model_of(config, layers=gpt(config, with_state(UNSAVED[state])))


def test_a_constant_is_where_the_model_computes(tmp_path: Path) -> None:
    """Stages are built on `meta`: what is made there has no numbers, and what is not must follow them."""
    config = run_of(training.write_config(tmp_path, "unused"))

    def build(device: str | None) -> Stage:
        def add(block: torch.nn.Module) -> None:
            block.register_buffer("ramp", torch.full((2,), 3.0, device=device), persistent=False)

        stage = model_of(config, "meta", gpt(config, with_state(add)))
        stage.compute_on(torch.device("cpu"))
        return stage

    assert build(None).get_buffer("blocks.1.ramp").tolist() == [3.0, 3.0]
    with pytest.raises(
        ConfigError, match="blocks.0.ramp is made on the device that the constructor is given"
    ):
        build("meta")
    planned = build(None)
    planned.compute_on(torch.device("meta"))
    assert planned.get_buffer("blocks.0.ramp").is_meta, "or a plan would compute on two devices"


RETURNS: dict[str, Callable[[torch.Tensor], object]] = {
    "Tensor": lambda x: x,
    "Tensor, Tensor": lambda x: (x, x),
    "Tensor, Tensor, Tensor, Tensor": lambda x: (x, x, x, x),
    "NoneType": lambda x: None,
    "list": lambda x: [x, x, x],
    "Tensor, Tensor, NoneType": lambda x: (x, x, None),
    "Tensor, Tensor, float": lambda x: (x, x, 0.0),
    "nothing": lambda x: (),
}


@pytest.mark.parametrize("returned", RETURNS)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_layer_that_returns_other_than_it_declares_is_refused(returned: str, recompute: bool) -> None:
    """Without an output the tensor of an earlier layer would go on, in silence."""

    class Loose(Layer):
        writes: ClassVar[dict[str, Flow]] = {"hidden": HIDDEN, "memo": Flow()}
        losses = (Loss("own"),)

        def forward(self, hidden: torch.Tensor, context: Any) -> object:
            return RETURNS[returned](hidden)

    layer = Loose()
    layer.layer_name = "blocks.7"
    wrong = rf"model.source: blocks.7 returns {returned}, and declares hidden, memo, own \(a tensor for each"
    with pytest.raises(ConfigError, match=wrong):
        run(layer, {"hidden": torch.ones(2)}, {}, torch.nn.Module(), recompute=recompute)  # type: ignore[arg-type]


def test_a_plain_module_may_tie_its_head_over_stages() -> None:
    """A tied model of transformers, whose embedding has another name, would start on one stage alone."""
    two_stages = ["parallel.pipeline=2", "train.device=cpu"]
    check_shared(run_of("configs/forks/plain_gpt.json", *two_stages, world=2))
