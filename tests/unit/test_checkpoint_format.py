"""Checkpoints on disk: what is written is what is read, and nothing damaged is ever taken for whole."""

import itertools
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from launch.checkpoint import run
from megacore.checkpoint import Reader, checkpoints_in, locate, read
from megacore.checkpoint.slices import COLUMNS, Slices
from megacore.config import Config
from megacore.config.model import ModelConfig
from megacore.distributed.shard import Shard, TensorSlice
from megacore.errors import CheckpointError, UserError
from megacore.tools.interchange.stream import save_stream
from tests.build import model_of, run_of
from tests.checkpoints import find_latest, save
from tests.manifests import edit_manifest, edit_text
from tests.pieces import piece
from tests.pool import PATIENCE

SCRIPT = Path(__file__).parents[2] / "launch" / "checkpoint.py"
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def tensors(seed: int = 0) -> dict[str, Tensor]:
    """Every dtype, a scalar, an odd number of bytes before wider tensors, and a
    tensor that is not contiguous.
    """
    generator = torch.Generator().manual_seed(seed)
    values = {
        f"model/{str(dtype)[6:]}": (torch.randn(5, 3, generator=generator) * 4).to(dtype) for dtype in DTYPES
    }
    return values | {
        "adam_m/transposed": torch.randn(4, 6, generator=generator).t(),
        "loss_scale": torch.tensor(65536.0),
    }


def save_alone(directory: Path, step: int, values: dict[str, Tensor], keep: int = 9, **state: object) -> Path:
    pieces = {name: (tensor, Shard(tuple(tensor.shape))) for name, tensor in values.items()}
    return save(directory, step, pieces, {"step": step, **state}, keep=keep)


def assert_holds(path: Path, values: dict[str, Tensor]) -> None:
    reader = Reader(path)
    assert reader.names == sorted(values)
    for name, tensor in values.items():
        read = reader.read(name, Shard(tuple(tensor.shape)))
        assert read.dtype == tensor.dtype and torch.equal(read, tensor), name


def test_round_trip_of_every_dtype_and_state(tmp_path):
    state = {"samples": 2**61, "bits": 2**70, "loss": 0.1 + 0.2, "model": {"hidden_size": 64}}
    path = save_alone(tmp_path, 100, tensors(), **state)
    assert path == tmp_path / "step_00000100" and sorted(p.name for p in path.iterdir()) == [
        "manifest.json",
        "rank_00000.safetensors",
    ]
    assert_holds(path, tensors())
    assert Reader(path).state == {"step": 100, **state} and Reader(path).step == 100


def test_files_are_safetensors_to_the_library_too(tmp_path):
    """The files are written by hand: if the header or an offset were off, other tools could not read them."""
    path = save_alone(tmp_path, 1, tensors())
    stored = load_file(path / "rank_00000.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors().items()) and len(
        stored
    ) == len(tensors())


def test_read_into_converts_the_dtype_of_a_slice(tmp_path):
    whole = torch.randn(5, 3, dtype=torch.float64)
    reader = Reader(save_alone(tmp_path, 1, {"w": whole}))
    parameter = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    reader.read_into("w", piece((5, 3), 0, 1, 3), parameter)
    assert torch.equal(parameter, whole[2:4].to(torch.bfloat16))


def test_reading_never_holds_more_than_a_block(tmp_path, monkeypatch):
    """A tensor larger than memory can be read, and verified, in parts: no access to a file
    asks for more than a block of it.
    """
    asked = []

    class Watched:
        def __init__(self, stored):
            self.stored = stored

        def __getitem__(self, index):
            asked.append(self.stored[index].numel())
            return self.stored[index]

    stored = Reader._stored
    monkeypatch.setattr(read, "BLOCK_ELEMENTS", 7)
    monkeypatch.setattr(Reader, "_stored", lambda *arguments: Watched(stored(*arguments)))
    whole = torch.randn(5, 4, 6)
    path = save_alone(tmp_path, 1, {"w": whole})
    for trusted in (False, True):
        part = Reader(path, trusted).read("w", TensorSlice((5, 4, 6), (1, 0, 2), (3, 4, 3)))
        assert torch.equal(part, whole[1:4, :, 2:5])
    Reader(path).verify()
    assert max(asked) <= 7 and sum(asked) > 2 * whole.numel()


def test_the_newest_is_that_of_the_highest_step(tmp_path: Path) -> None:
    """A copy, a restore from a backup or a touch changes times: by these a run would go on from an
    older step, and delete the newest.
    """
    paths = [save_alone(tmp_path, step, {"w": torch.ones(2)}) for step in (200, 10, 9)]
    for times in itertools.permutations(range(1, 4)):
        for path, seconds in zip(paths, times, strict=True):
            for each in (*path.iterdir(), path):
                os.utime(each, (seconds, seconds))
        assert checkpoints_in(tmp_path) == paths and locate(tmp_path) == find_latest(tmp_path) == paths[0], (
            times
        )
    os.utime(paths[2], None)
    newest = save_alone(tmp_path, 201, {"w": torch.ones(2)}, keep=2)
    assert checkpoints_in(tmp_path) == [newest, paths[0]]


BASES: list[dict[str, Any]] = [
    {"position": "rope", "num_kv_heads": 2, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {
        "qk_norm": True,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "tie_embeddings": False,
        "chunked_loss": True,
        "attention": "eager",
    },
]


def others_of(key: str, value: Any) -> list[Any]:
    """Other values of a key of the model section."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [2 * value, value / 2 if isinstance(value, float) else value // 2, 0.5]
    if key == "rope_scaling":
        return [None, {"type": "ntk", "factor": 3.0}, {"type": "linear", "factor": 3.0}]
    if key == "window_schedule":
        return [[[1, 4]]]
    choices = get_args(ModelConfig.model_fields[key].annotation)
    if value is None and not any(isinstance(choice, str) for choice in choices):
        return [2]
    # which needs a GPU
    return [choice for choice in choices if isinstance(choice, str) and choice not in (value, "triton")]


@pytest.mark.parametrize("base", BASES, ids=["learned to rope", "without"])
def test_any_other_model_key_is_refused_or_leaves_logits(base: dict[str, Any]) -> None:
    """Another base of the rotary positions, another scale, another eps: the resumed run would train another
    function, from weights that fit.
    """
    sizes = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 4,
        "vocab_size": 53,
        "init_std": 0.2,
        "dropout": 0.1,
    } | base
    train = {"seq_len": 12, "precision": "fp64", "device": "cpu"}

    def configured(model: dict[str, Any]) -> Config:
        return run_of({"model": model, "train": train})

    def logits(config: Config) -> Tensor:
        model = model_of(config).eval()
        model.load_state_dict(weights)
        return model.logits(model.hidden(tokens))

    written = configured(sizes)
    recorded, weights = written.model.model_dump(), model_of(written).state_dict()
    tokens = torch.randint(53, (2, 12), generator=torch.Generator().manual_seed(0))
    right, refused, free = logits(written), set(), set()
    reader: Any = SimpleNamespace(path=Path("step_00000001"), state={"model": recorded})
    for key, value in recorded.items():
        for other in others_of(key, value):
            try:
                changed = configured(recorded | {key: other})
                Reader.check_model(reader, changed.model.model_dump())
            except UserError:
                refused.add(key)
                continue
            if (key, recorded["position"]) != ("max_positions", "learned"):  # whose table has another shape
                assert float((logits(changed) - right).detach().abs().max()) < 1e-12, (key, other)
            free.add(key)
    assert refused | free >= recorded.keys() - {"block", "source", "source_digest"}, (
        "every key was tried; of a source in test_source.py"
    )
    assert {"attention", "dropout", "init_std", "chunked_loss"} <= free and {
        "rope_theta",
        "norm_eps",
        "logit_scale",
    } <= refused


def test_a_model_of_before_a_key_has_its_default() -> None:
    """A checkpoint of an earlier release says nothing of a newer key: a run with another value would
    train another function in silence.
    """
    now = run_of({"model": {"hidden_size": 32, "num_heads": 4, "position": "rope"}}).model.model_dump(
        mode="json"
    )
    newer = ("nope_every", "window", "window_schedule", "norm_place", "num_kv_heads", "dropout")
    earlier = {key: value for key, value in now.items() if key not in newer}
    reader: Any = SimpleNamespace(path=Path("step_00000001"), state={"model": earlier})
    Reader.check_model(reader, now | {"dropout": 0.1})
    for key, other in (("nope_every", 2), ("window", 8), ("norm_place", "post")):
        with pytest.raises(UserError, match=rf"was written with model\.{key}=.* \(the config says {other}\)"):
            Reader.check_model(reader, now | {key: other})


@pytest.mark.parametrize("column", COLUMNS)
def test_columns_hold_every_number_up_to_their_width(column: str) -> None:
    """A width too small by one: 256 in a byte is 0, and a slice of a file, or of
    a size, that was never written.
    """
    numbers = [
        2**bits + more for bits in range(8, 64 if column == "digest" else 48, 8) for more in (-1, 0)
    ] + [1]
    for number in [*numbers, *([2**64 - 1] if column == "digest" else [])]:
        row = {"file": 0, "number": 1, "offset": (3, 4), "shape": (5, 6), "digest": 7}
        row[column] = (2, number) if column in ("offset", "shape") else number
        slices = Slices.of([tuple(row.values()), (0, 1, (0,), (1,), 2)])
        read = Slices.of_texts(slices.texts(), 2, 2)
        for found in (slices, read, Slices.joined([slices[:1], slices[1:]])):
            assert np.array_equal(getattr(found, column)[0], row[column]), number
        if column == "file":
            assert slices.behind(number).file.tolist() == [2 * number, number]


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
        slices = manifest["tensors"]["w"]["slices"]
        slices.append(slices[0] | {"offset": [2, 1], "shape": [1, 1]})

    edit_manifest(path, edit)


FAULTS = {
    "truncated": (truncate, r"rank_00000\.safetensors has \d+ bytes of \d+"),
    "missing file": (
        lambda path: (path / "rank_00000.safetensors").unlink(),
        r"rank_00000\.safetensors is missing",
    ),
    "header": (corrupt_header, r"rank_00000\.safetensors is damaged"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), r"has no manifest\.json"),
    "half a manifest": (
        lambda path: (path / "manifest.json").write_text('{"format_version": 1,'),
        r"manifest\.json is damaged",
    ),
    "not a manifest": (lambda path: (path / "manifest.json").write_text("[1]"), r"manifest\.json is damaged"),
    "manifest key": (
        lambda path: edit_text(path, lambda m: m.pop("files")),
        r"manifest\.json is damaged.*files",
    ),
    "a later version": (
        lambda path: edit_text(path, lambda m: m.update(format_version=7)),
        r"has format version 7, and this megacore reads version 5 \(use the megacore that wrote it\)",
    ),
    "an earlier version": (
        lambda path: edit_text(path, lambda m: m.update(format_version=4)),
        r"has format version 4, and this megacore reads version 5 \(use the megacore that wrote it\)",
    ),
    "hole": (
        lambda path: edit_manifest(path, lambda m: m["tensors"]["w"].update(shape=[4, 3])),
        r"tensor w has slices for 9 of its 12",
    ),
    "overlap": (overlap, r"tensor w has overlapping slices, at \(0, 0\).* and at \(2, 1\)"),
    "outside": (
        lambda path: edit_manifest(path, lambda m: m["tensors"]["w"].update(shape=[2, 3])),
        r"tensor w .*outside its shape \(2, 3\)",
    ),
    "shape in file": (corrupt_shape, r"tensor w is F32 \(3, 3\) in rank_00000"),
    "dtype in file": (
        lambda path: edit_manifest(path, lambda m: m["tensors"]["w"].update(dtype="int32")),
        r"tensor w is F32 .*says I32",
    ),
    "dtype": (
        lambda path: edit_manifest(path, lambda m: m["tensors"]["w"].update(dtype="float3")),
        r"tensor w has the unknown dtype float3",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_named_in_one_line_and_skipped(fault, tmp_path, caplog):
    """A planted fault in the newest checkpoint: refused by name when asked for, passed
    over when the newest whole one is.
    """
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
    reader = Reader(
        save_alone(tmp_path, 1, {"w": torch.zeros(4, 2)}, model={"hidden_size": 2, "dropout": 0.0})
    )
    with pytest.raises(
        CheckpointError, match=r"tensor w has shape \(4, 2\), and the model of this config \(4, 3\)"
    ):
        reader.read("w", Shard((4, 3)))
    with pytest.raises(CheckpointError, match=r"has no tensor v of shape \(4, 2\)"):
        reader.read("v", Shard((4, 2)))
    with pytest.raises(CheckpointError, match=r"model\.hidden_size=2 \(the config says 3\)"):
        reader.check_model({"hidden_size": 3})
    reader.check_model({"hidden_size": 2, "dropout": 0.1, "key_of_a_later_version": 1})


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
def test_together_ranks_verify_every_file_once(tmp_path: Path, parts: int) -> None:
    """A file that no rank reads may be damaged; one that all read makes thousands wait.

    Here ranks are more or fewer than files.
    """
    layout = {f"w{i}": (torch.float32, (2,)) for i in range(5)}
    path = save_stream(tmp_path, 1, layout, (torch.ones(2) for _ in layout), {}, 8)
    seen = []
    for part in range(parts):
        with patch.object(read, "file_digest", side_effect=read.file_digest) as digest:
            Reader(path).verify(part, parts)
        seen.append([call.args[0].name for call in digest.call_args_list])
    assert sorted(itertools.chain(*seen)) == [f"rank_{i:05d}.safetensors" for i in range(5)]
    assert max(map(len, seen)) - min(map(len, seen)) <= 1


def test_slices_that_do_not_tile_are_not_committed(tmp_path):
    """A rank that saves one of two halves, and nobody the other: an error at the save,
    not at the next start.
    """
    half = {"w": (torch.ones(2, 3), piece((4, 3), 0, 0, 2))}
    with pytest.raises(CheckpointError, match="tensor w has slices for 6 of its 12 elements"):
        save(tmp_path, 1, half, {}, keep=1)
    assert find_latest(tmp_path) is None


def run_script(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=PATIENCE
    )


def test_script_shows_and_verifies_a_run(tmp_path):
    directory = tmp_path / "checkpoints"
    save_alone(directory, 10, {"model/w": torch.ones(3, 2)}, samples=80, model={"hidden_size": 2})
    save_alone(directory, 20, {"model/w": torch.ones(3, 2)})
    truncate(directory / "step_00000020")
    shown = run_script("info", tmp_path, "--tensors")
    assert shown.returncode == 0 and "SKIPPED" in shown.stderr
    for part in ("model/w", "float32", "3 × 2", "24 B", "step 10", "samples: 80", "hidden_size  2"):
        assert part in shown.stdout
    checked = run_script("verify", directory)
    assert checked.returncode == 2 and "step_00000010" in checked.stdout
    assert (
        checked.stderr.startswith(f"checkpoint error: {directory}/step_00000020: ")
        and checked.stderr.count("\n") == 1
    )


@pytest.mark.parametrize("version", [4, 6])
def test_script_rejects_another_format_version(version: int, tmp_path: Path) -> None:
    """Without the version in the message, a user would take a whole checkpoint for a damaged one."""
    path = save_alone(tmp_path, 10, {"model/w": torch.ones(3, 2)})
    edit_text(path, lambda manifest: manifest.update(format_version=version))
    shown = run_script("info", path)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr == (
        f"checkpoint error: {path}: manifest.json has format version {version}, and this megacore reads "
        "version 5 (use the megacore that wrote it)\n"
    )


def test_script_tells_how_two_checkpoints_differ(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    whole = torch.arange(8.0).view(4, 2)
    first = save_alone(
        tmp_path / "first",
        10,
        {"model/w": whole, "model/v": whole, "model/z": torch.zeros(2), "model/x": whole},
    )
    moved = whole.clone()
    moved[1, 0] += 0.5
    other = {"model/w": moved, "model/v": whole, "model/z": torch.tensor([0.0, -0.0]), "model/y": whole}
    second = save_alone(tmp_path / "second", 20, other)
    assert run(["diff", str(first), str(tmp_path / "second")]) == 1
    out = " ".join(capsys.readouterr().out.split())
    for part in (
        "model/w values, of 8 1 0.5 0.0423",
        "only in the first",
        "only in the second",
        "sign of zeros",
        "1 of 5 tensors are equal",
    ):
        assert part in out
    assert (
        run(["diff", str(second), str(second)]) == 0
        and "4 of 4 tensors are equal in every bit" in capsys.readouterr().out
    )
    assert (
        run(["diff", "--trust", str(second), str(second)]) == 0
        and "equal by their digests (--trust: " in capsys.readouterr().out
    )


def test_equal_bits_of_another_dtype_are_a_difference(tmp_path, capsys, monkeypatch):
    """An optimizer's step count that was saved as an integer would be read as a number near zero."""
    monkeypatch.setenv("COLUMNS", "200")
    bits = torch.arange(8, dtype=torch.int32)
    first, second = (
        save_alone(tmp_path / str(i), 10, {"w": tensor})
        for i, tensor in enumerate((bits, bits.view(torch.float32)))
    )
    for flags in ([], ["--trust"]):
        assert run(["diff", *flags, str(first), str(second)]) == 1
        out = " ".join(capsys.readouterr().out.split())
        assert "int32 (8,), then float32 (8,)" in out and "0 of 1 tensors" in out
