"""Offloaded activations come back as they were; on a CPU the copies are for nothing, but the same code makes them."""

from pathlib import Path

import pytest
import torch
from torch import nn

from megacore.config import load
from megacore.model import offload
from megacore.model.gpt import Stage, whole_model
from megacore.model.offload import ActivationOffload, Away
from tests.training import write_config

MODELS = ["", "train.recompute=full model.dropout=0.1", "train.recompute=selective model.attention=eager model.activation=swiglu"]


def gradients(path: str, overrides: str) -> tuple[Stage, list[torch.Tensor]]:
    stage = whole_model(load(path, overrides.split()).config)
    for key in (1, 2):
        tokens = torch.arange(32).view(2, 16) * key % 65
        stage.loss(stage(tokens, key), tokens).backward()
    return stage, [parameter.grad for parameter in stage.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_bitwise_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """A tensor that came back as another, or before it was stored."""
    path = write_config(tmp_path, "unused", model={"num_layers": 3})
    stored: list[Away] = []
    store = ActivationOffload._store

    def counted(self: ActivationOffload, *rest: object) -> Away:
        stored.append(store(self, *rest))  # type: ignore[arg-type]
        return stored[-1]

    monkeypatch.setattr(ActivationOffload, "_store", counted)
    _, plain = gradients(path, model)
    assert not stored
    stage, offloaded = gradients(path, f"{model} train.offload_activations=true")
    assert len(plain) == len(list(stage.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))
    # With full recomputation a block's input alone is kept.
    assert len(stored) == 2 * 3 if "full" in model else len(stored) > 2 * 3 * 8
    assert all(away.used and away.back is None for away in stored), "what stays on the device is not offloaded"
    weights = {parameter.untyped_storage().data_ptr() for parameter in stage.parameters()}
    assert not any(away.host.untyped_storage().data_ptr() in weights for away in stored)


def test_parameters_and_small_tensors_stay() -> None:
    """Copies of weights would cost more traffic than activations, and their engine may have moved on."""
    around = ActivationOffload(torch.device("cpu")).around()
    weight = nn.Parameter(torch.randn(4, 8, 16))
    for kept in (weight, weight.flatten(0, -2), torch.zeros(offload.SMALLEST // 4 - 1)):
        assert around.pack_hook(kept) is kept
    assert isinstance(around.pack_hook(torch.zeros(offload.SMALLEST // 4)), Away)


def test_the_next_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward would wait for each of them; and one that was used must not come back for nothing."""
    monkeypatch.setattr(offload, "AHEAD", 2)
    around = ActivationOffload(torch.device("cpu")).around()
    tensors = [torch.full((300,), float(i)) for i in range(6)]
    away = [around.pack_hook(tensor) for tensor in tensors]
    assert torch.equal(around.unpack_hook(away[5]), tensors[5])
    assert [a.back is not None for a in away] == [False, False, False, True, True, False]
    assert torch.equal(around.unpack_hook(away[3]), tensors[3])  # not quite in reverse order
    assert torch.equal(around.unpack_hook(away[4]), tensors[4])
    assert [a.back is not None for a in away] == [False, True, True, False, False, False]
    assert torch.equal(around.unpack_hook(away[5]), tensors[5]), "some operations unpack twice"
