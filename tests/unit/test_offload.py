"""Offloaded activations come back as they were; on a CPU the copies are for
nothing, but the same code makes them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megacore.model import offload
from megacore.model.offload import ActivationOffload, Away
from megacore.model.stage import Stage
from tests.build import model_of, run_of
from tests.training import write_config

MODELS = [
    "",
    "train.recompute=full model.dropout=0.1",
    "train.recompute=selective model.attention=eager model.activation=swiglu",
]


def gradients(path: str, overrides: str) -> tuple[Stage, list[torch.Tensor]]:
    stage = model_of(run_of(path, *overrides.split()))
    for key in (1, 2):
        tokens = torch.arange(32).view(2, 16) * key % 65
        stage.loss(stage.hidden(tokens, key), tokens).backward()
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
    assert all(away.used and away.back is None for away in stored), (
        "what stays on the device is not offloaded"
    )
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


class Streams:
    """A device whose streams do nothing, but know what has happened before what: `known` of a
    stream are the events it is behind.
    """

    def __init__(self) -> None:
        self.entered = [self.Stream()]

    class Stream:
        def __init__(self) -> None:
            self.known: set[object] = set()

        def wait_stream(self, other: "Streams.Stream") -> None:
            self.known |= other.known

        def wait_event(self, event: frozenset[object]) -> None:
            self.known |= event

        def record_event(self) -> frozenset[object]:
            return frozenset(self.known)

    def current_stream(self) -> "Streams.Stream":
        return self.entered[-1]

    @contextmanager
    def stream(self, stream: "Streams.Stream") -> Iterator[None]:
        self.entered.append(stream)
        yield
        self.entered.pop()


class Noted(TorchDispatchMode):
    """Notes every copy between devices as done by the stream of that moment, and checks that
    it comes behind what it reads.
    """

    def __init__(self, device: Streams) -> None:
        super().__init__()
        self.device, self.copies = device, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            stream = self.device.current_stream()
            assert stream is not self.device.entered[0], "a copy that holds up the computation"
            assert ("computed" if self.copies == 0 else "copy 0") in stream.known, (
                "a copy that does not wait for what it reads"
            )
            stream.known.add(f"copy {self.copies}")
            self.copies += 1
        return result


def test_copies_wait_and_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a copy is done at once.

    On a GPU one that is begun before its tensor is computed, used before it has arrived, or whose memory is
    given away meanwhile, is a race: activations that are wrong now and then.
    """
    device = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    kept: list[object] = []
    monkeypatch.setattr(ActivationOffload, "_keep", lambda self, tensor, stream: kept.append(stream))
    mover = ActivationOffload(torch.device("cpu"))
    computing, around = device.current_stream(), mover.around()
    tensor = torch.randn(300)
    computing.known.add("computed")
    with Noted(device) as noted:
        away = around.pack_hook(tensor)
        assert noted.copies == 1 and "copy 0" not in computing.known, "the forward pass does not wait for it"
        back = around.unpack_hook(away)
        assert noted.copies == 2
    assert "copy 1" in computing.known, "what is used has arrived"
    assert kept == [mover.out, computing], "memory is kept for whoever reads it last"
    assert torch.equal(back, tensor)
