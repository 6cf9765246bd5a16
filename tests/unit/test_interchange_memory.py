"""Conversions hold one tensor at a time, so that a model may be larger than memory."""

import weakref

import pytest
import torch
from torch import Tensor

from megacore.checkpoint import Reader
from megacore.tools.interchange import export_hf as exporter
from megacore.tools.interchange import import_model as importer
from megacore.tools.interchange.folder import Folder
from tests.conversion import export, random_run, take_in

pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[test]'")


class Meter:
    """Counts the bytes of tensors that were given out and are still held."""

    def __init__(self) -> None:
        self.live = self.most = 0

    def watch(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self.live += size
        self.most = max(self.most, self.live)
        weakref.finalize(storage, self.release, size)
        return tensor

    def release(self, size: int) -> None:
        self.live -= size


def test_one_tensor_at_a_time(tmp_path, monkeypatch):
    """Of ten blocks no more is held than the largest tensor and the one before it, out and in."""
    model = random_run(tmp_path / "run", num_layers=10, vocab_size=31)
    largest = max(parameter.nbytes for parameter in model.parameters())
    for module in (exporter, importer):  # which holds a whole model, and says so
        monkeypatch.setattr(module, "compare_logits", lambda *_: "not compared")
    meters = []
    for kind in (Reader, Folder):
        meter, read = Meter(), kind.read
        monkeypatch.setattr(
            kind, "read", lambda self, *args, meter=meter, read=read: meter.watch(read(self, *args).clone())
        )
        meters.append(meter)
    export(tmp_path / "run", tmp_path / "out")
    take_in(tmp_path / "out", tmp_path / "again")
    for meter in meters:
        assert largest <= meter.most <= 2 * largest and meter.live == 0, (meter.most, largest)


def test_the_meter_sees_what_is_held():
    """Without this the test above might pass because it counts nothing."""
    meter = Meter()
    held = [meter.watch(torch.zeros(10))[2:] for _ in range(3)]
    assert (meter.live, meter.most) == (120, 120)
    held.clear()
    assert (meter.live, meter.most) == (0, 120)
