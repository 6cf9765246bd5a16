"""What a list of layers may declare, and what of it is refused in one line before ranks meet."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from megacore.config import load
from megacore.engine.choose import check_shared
from megacore.errors import ConfigError
from megacore.model import choose
from megacore.model.flow import Flow, Loss
from megacore.model.gpt import gpt
from megacore.model.layers import Layer, LayerSpec, check
from megacore.model.stage import run
from tests import training


class NoLoss(Layer):
    writes: ClassVar[dict[str, Flow]] = {}


class OverNothing(NoLoss):
    losses = (Loss("own", over="ahead"),)


class Rate(NoLoss):
    losses = (Loss("lr"),)


@pytest.mark.parametrize(("kind", "wrong"), [(NoLoss, "no layer gives a loss"), (OverNothing, "over ahead"), (Rate, "called lr")])
def test_losses_that_cannot_be_logged_or_weighed_are_refused(tmp_path: Path, kind: type[Layer], wrong: str) -> None:
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


class OwnHead(torch.nn.Module):
    losses = (Loss("cross_entropy", over="targets"),)
    writes: ClassVar[dict[str, Flow]] = {}

    def __init__(self, *_: Any) -> None:
        super().__init__()


def test_ends_that_do_not_share_what_the_config_says_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage would wait for ever for a sum that the last one does not have."""
    path = training.write_config(tmp_path, "unused")
    monkeypatch.setattr(choose, "gpt", lambda config, block=None: [*gpt(config)[:-1], LayerSpec("head", OwnHead)])
    with pytest.raises(ConfigError, match="model.tie_embeddings: says that the first and the last layer share embedding.weight"):
        check_shared(load(path, ["parallel.pipeline=2", "model.tie_embeddings=true"], 2).config)
    check_shared(load(path, ["parallel.pipeline=2", "model.tie_embeddings=false"], 2).config)
    check_shared(load(path, ["model.tie_embeddings=true"]).config)
