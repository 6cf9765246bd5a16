"""What a list of layers may declare, and what of it is refused in one line before ranks meet."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from megacore.config import Config
from megacore.errors import ConfigError
from megacore.model.flow import Flow, Loss
from megacore.model.gpt import gpt
from megacore.model.layers import Layer, LayerSpec, check
from megacore.model.stage import run
from megacore.tools.choices.check_engine import check_shared
from megacore.tools.choices.settle import settled_alone
from megacore.tools.settings.load import load
from tests import training


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
    config = load(training.write_config(tmp_path, "unused")).config
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
    "another's that nobody has": ({"OTHER": '"blocks.0.owned"'}, [], "model.source: .*a layer shares blocks.0.owned, which no layer has"),
    "a layer that nobody has": ({"OTHER": '"tower.own"', "SHARES": "bare = False"}, [], "a layer shares tower.own, which no layer has"),
    "one's own that it has not": ({"NAME": '"owned"'}, [], "blocks.1 shares its owned, and has no such parameter"),
    "another shape": ({"LONGER": "1"}, [], "blocks.1.own is to be blocks.0.own, and is of another shape"),
    "ends apart": ({"SHARES": NOTHING}, PP2, "model.tie_embeddings: says that layers share embedding.weight, and none does"),
    "one name": ({"SHARES": NOTHING + "; __init__ = tied"}, [*PP2, "model.tie_embeddings=false"], "of one name, embedding.weight"),
    "two stages of a rank, fsdp": ({}, [*FSDP, "parallel.schedule=interleaved"], "gives one rank stages that share blocks.0.own"),
}  # fmt: skip


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
    return settled_alone(
        load(path, overrides, 2 * overrides.count("parallel.data=2") + 2 if overrides else 1).config
    )


@pytest.mark.parametrize("case", REFUSED)
def test_layers_that_do_not_share_what_they_say_are_refused(tmp_path: Path, case: str) -> None:
    """A rank would wait for ever for a sum that others do not have, or copies would part in silence."""
    changes, overrides, wrong = REFUSED[case]
    with pytest.raises(ConfigError, match=wrong):
        check_shared(own_config(tmp_path, changes, overrides))
    for overrides in ([], PP2, FSDP):
        check_shared(own_config(tmp_path, {}, overrides))
