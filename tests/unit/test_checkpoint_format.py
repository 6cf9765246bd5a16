"""Checkpoints on disk: what is written is what is read, and nothing damaged is ever taken for whole."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megacore.checkpoint import Reader, find_latest, locate, save
from megacore.errors import CheckpointError
from megacore.tensor_parallel.shard import Shard

SCRIPT = Path(__file__).parents[2] / "launch" / "checkpoint.py"
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


def tensors(seed: int = 0) -> dict[str, Tensor]:
    """Every dtype, a scalar, an odd number of bytes before wider tensors, and a tensor that is not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    values = {f"model/{str(dtype)[6:]}": (torch.randn(5, 3, generator=generator) * 4).to(dtype) for dtype in DTYPES}
    return values | {"adam_m/transposed": torch.randn(4, 6, generator=generator).t(), "loss_scale": torch.tensor(65536.0)}


def save_alone(directory: Path, step: int, values: dict[str, Tensor], keep: int = 9, **state: object) -> Path:
    pieces = {name: (tensor, Shard(tuple(tensor.shape))) for name, tensor in values.items()}
    return save(directory, step, pieces, {"step": step, **state}, rank=0, world=1, barrier=lambda: None, keep=keep)


def assert_holds(path: Path, values: dict[str, Tensor]) -> None:
    reader = Reader(path)
    assert reader.names == sorted(values)
    for name, tensor in values.items():
        read = reader.read(name, Shard(tuple(tensor.shape)))
        assert read.dtype == tensor.dtype and torch.equal(read, tensor), name


def edit_manifest(path: Path, edit) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    edit(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_round_trip_of_every_dtype_and_state(tmp_path):
    state = {"samples": 2**70, "loss": 0.1 + 0.2, "model": {"hidden_size": 64}}
    path = save_alone(tmp_path, 100, tensors(), **state)
    assert path == tmp_path / "step_00000100" and sorted(p.name for p in path.iterdir()) == ["manifest.json", "rank_00000.safetensors"]
    assert_holds(path, tensors())
    assert Reader(path).state == {"step": 100, **state} and Reader(path).step == 100


def test_files_are_safetensors_to_the_library_too(tmp_path):
    """The files are written by hand: if the header or an offset were off, other tools could not read them."""
    path = save_alone(tmp_path, 1, tensors())
    stored = load_file(path / "rank_00000.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors().items()) and len(stored) == len(tensors())


def test_read_into_converts_the_dtype_of_a_slice(tmp_path):
    whole = torch.randn(5, 3, dtype=torch.float64)
    reader = Reader(save_alone(tmp_path, 1, {"w": whole}))
    parameter = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    reader.read_into("w", Shard((5, 3), dim=0, index=1, count=3), parameter)
    assert torch.equal(parameter, whole[2:4].to(torch.bfloat16))


def truncate(path: Path) -> None:
    file = path / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def corrupt_header(path: Path) -> None:
    with (path / "rank_00000.safetensors").open("r+b") as file:  # the size stays
        file.write(b"\xff" * 16)


def corrupt_shape(path: Path) -> None:
    def edit(manifest):
        manifest["tensors"]["w"] = manifest["tensors"]["w"] | {"shape": [2, 3]}
        manifest["tensors"]["w"]["slices"][0]["shape"] = [2, 3]

    edit_manifest(path, edit)


def overlap(path: Path) -> None:
    def edit(manifest):
        manifest["tensors"]["w"]["slices"].append({"file": "rank_00000.safetensors", "key": "w", "offset": [2, 1], "shape": [1, 1]})

    edit_manifest(path, edit)


FAULTS = {
    "truncated": (truncate, r"rank_00000\.safetensors has \d+ bytes of \d+"),
    "missing file": (lambda path: (path / "rank_00000.safetensors").unlink(), r"rank_00000\.safetensors is missing"),
    "header": (corrupt_header, r"rank_00000\.safetensors is damaged"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), r"has no manifest\.json"),
    "half a manifest": (lambda path: (path / "manifest.json").write_text('{"format_version": 1,'), r"manifest\.json is damaged"),
    "not a manifest": (lambda path: (path / "manifest.json").write_text("[1]"), r"manifest\.json is damaged"),
    "manifest key": (lambda path: edit_manifest(path, lambda m: m.pop("files")), r"manifest\.json is damaged.*files"),
    "version": (lambda path: edit_manifest(path, lambda m: m.update(format_version=7)), r"format version 7 .*format version 1"),
    "hole": (lambda path: edit_manifest(path, lambda m: m["tensors"]["w"].update(shape=[4, 3])), r"tensor w has slices for 9 of its 12"),
    "overlap": (overlap, r"tensor w has overlapping slices, at \(0, 0\).* and at \(2, 1\)"),
    "outside": (
        lambda path: edit_manifest(path, lambda m: m["tensors"]["w"].update(shape=[2, 3])),
        r"tensor w .*outside its shape \(2, 3\)",
    ),
    "shape in file": (corrupt_shape, r"tensor w is F32 \(3, 3\) in rank_00000"),
    "dtype in file": (lambda path: edit_manifest(path, lambda m: m["tensors"]["w"].update(dtype="int32")), r"tensor w is F32 .*says I32"),
    "dtype": (
        lambda path: edit_manifest(path, lambda m: m["tensors"]["w"].update(dtype="float3")),
        r"tensor w has the unknown dtype float3",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_named_in_one_line_and_skipped(fault, tmp_path, caplog):
    """A planted fault in the newest checkpoint: refused by name when asked for, passed over when the newest whole one is."""
    damage, message = FAULTS[fault]
    earlier = save_alone(tmp_path, 5, {"w": torch.randn(3, 3)})
    path = save_alone(tmp_path, 10, {"w": torch.randn(3, 3)})
    assert find_latest(tmp_path) == path
    damage(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        locate(path)
    assert str(caught.value).startswith(f"checkpoint error: {path}: ") and "\n" not in str(caught.value)
    with caplog.at_level(logging.WARNING):
        assert find_latest(tmp_path) == earlier
    assert str(caught.value) in caplog.text


def test_another_model_is_refused(tmp_path):
    reader = Reader(save_alone(tmp_path, 1, {"w": torch.zeros(4, 2)}, model={"hidden_size": 2, "dropout": 0.0}))
    with pytest.raises(CheckpointError, match=r"tensor w has shape \(4, 2\), and the model of this config \(4, 3\)"):
        reader.read("w", Shard((4, 3)))
    with pytest.raises(CheckpointError, match=r"has no tensor v of shape \(4, 2\)"):
        reader.read("v", Shard((4, 2)))
    with pytest.raises(CheckpointError, match=r"model\.hidden_size=2, and the config says 3"):
        reader.check_model({"hidden_size": 3})
    reader.check_model({"hidden_size": 2, "dropout": 0.1, "key_of_a_later_version": 1})


@pytest.mark.parametrize("moment", ["_write_rank", "_merge", "_commit"])
def test_interrupted_save_leaves_the_earlier_one(moment, tmp_path, monkeypatch):
    """Killed at any moment of a save, the run resumes from the checkpoint before; the next save clears what was left."""

    def interrupted(*_):
        raise KeyboardInterrupt

    earlier = save_alone(tmp_path, 10, tensors(1))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(f"megacore.checkpoint.write.{moment}", interrupted)
        save_alone(tmp_path, 20, tensors(2))
    assert find_latest(tmp_path) == earlier
    assert_holds(earlier, tensors(1))
    save_alone(tmp_path, 30, tensors(3))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000010", "step_00000030"]


def test_full_disk_is_reported_with_the_rank_and_its_reason(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    earlier = save_alone(tmp_path, 10, tensors(1))
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"rank 0 of 1 .*step_00000020.*No space left on device"):
        save_alone(tmp_path, 20, tensors(2))
    assert find_latest(tmp_path) == earlier


def test_saving_a_step_again_replaces_it(tmp_path):
    save_alone(tmp_path, 10, tensors(1))
    path = save_alone(tmp_path, 10, tensors(2))
    assert_holds(path, tensors(2))
    assert list(tmp_path.iterdir()) == [path]


def test_replacing_is_never_without_a_whole_one(tmp_path, monkeypatch):
    """Stopped between the two renames, the old one is still found, and it goes once a new one is in its place."""
    rename = Path.rename

    def stop_at_the_new_one(self, target):
        if self.suffix == ".partial":
            raise KeyboardInterrupt
        return rename(self, target)

    save_alone(tmp_path, 10, tensors(1))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", stop_at_the_new_one)
        save_alone(tmp_path, 10, tensors(2))
    found = find_latest(tmp_path)
    assert found is not None
    assert_holds(found, tensors(1))
    path = save_alone(tmp_path, 10, tensors(3))
    assert list(tmp_path.iterdir()) == [path]
    assert_holds(path, tensors(3))


def test_keep_counts_whole_checkpoints_and_spares_the_new_one(tmp_path):
    values = {"w": torch.ones(2)}
    for step in (10, 20, 30):
        save_alone(tmp_path, step, values, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000020", "step_00000030"]
    truncate(tmp_path / "step_00000030")
    save_alone(tmp_path, 40, values, keep=2)
    assert (tmp_path / "step_00000020").exists(), "the damaged one took the room of the last but one whole one"
    save_alone(tmp_path, 5, values, keep=1)  # a run that went back to an earlier step
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000005"]


def test_slices_that_do_not_tile_are_not_committed(tmp_path):
    """A rank that saves one of two halves, and nobody the other: an error at the save, not at the next start."""
    half = {"w": (torch.ones(2, 3), Shard((4, 3), dim=0, index=0, count=2))}
    with pytest.raises(CheckpointError, match="tensor w has slices for 6 of its 12 elements"):
        save(tmp_path, 1, half, {}, rank=0, world=1, barrier=lambda: None, keep=1)
    assert find_latest(tmp_path) is None


def run_script(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_script_shows_and_verifies_a_run(tmp_path):
    directory = tmp_path / "checkpoints"
    save_alone(directory, 10, {"model/w": torch.ones(3, 2)}, samples=80, model={"hidden_size": 2})
    save_alone(directory, 20, {"model/w": torch.ones(3, 2)})
    truncate(directory / "step_00000020")
    shown = run_script("info", tmp_path)
    assert shown.returncode == 0 and "skipped" in shown.stderr
    for part in ("model/w", "float32", "3 × 2", "24 B", "step 10", "samples: 80", '"hidden_size": 2'):
        assert part in shown.stdout
    checked = run_script("verify", directory)
    assert checked.returncode == 2 and "step_00000010" in checked.stdout
    assert checked.stderr.startswith(f"checkpoint error: {directory}/step_00000020: ") and checked.stderr.count("\n") == 1
