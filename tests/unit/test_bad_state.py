"""What a checkpoint says of its run is read as if anybody could have written it, before any tensor is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from launch import checkpoint as script
from megacore.checkpoint import Reader, checkpoints_in
from megacore.checkpoint.manifest import MANIFEST, sealed, unsealed
from megacore.checkpoint.slices import Slices
from megacore.config import Config
from megacore.errors import CheckpointError
from megacore.tools.inputs import Inputs
from tests.build import run_of
from tests.checkpoints import save
from tests.manifests import edit_text
from tests.pieces import piece
from tests.training import write_config, write_corpus

STEP, BATCH = 3, 8
WRONG: list[Any] = ["3", "x", [3], {}, None, True, -1, 10**400, 1e300, 2**63, STEP + 1]


@pytest.fixture
def run(tmp_path: Path) -> tuple[Config, Path]:
    """A config, and the checkpoint of step 3 in its run's folder."""
    overrides = [f"log.dir={tmp_path}/run", "train.global_batch_size=8", "model.num_layers=1"]
    config = run_of(write_config(tmp_path, write_corpus(tmp_path)), *overrides)
    state = {
        "samples": STEP * BATCH,
        "rollbacks": 0,
        "engine": {"updates": 3.0, "skipped": 0.0, "loss_scale": 1.0, "good_steps": 3.0, "norms": [1.0]},
        "model": config.model.model_dump(),
        "config": config.model_dump(by_alias=True),
    }
    tensors = {f"{kind}/w": (torch.zeros(2), piece((2,), 0, 0, 1)) for kind in ("model", "adam_m", "adam_v")}
    return config, save(tmp_path / "run/checkpoints", STEP, tensors, state, keep=1)


def forged(path: Path, where: tuple[str, ...], value: Any) -> None:
    """Changes one entry of the state."""

    def edit(manifest: dict[str, Any]) -> None:
        inner = manifest["state"]
        for key in where[:-1]:
            inner = inner[key]
        inner[where[-1]] = value

    edit_text(path, edit)


@pytest.mark.parametrize(
    ("where", "values"),
    [
        (("samples",), [*WRONG, STEP * BATCH + 1, (STEP - 1) * BATCH, 2**61, 24.0]),
        (("rollbacks",), [value for value in WRONG if value != STEP + 1] + [1.5]),
        (("engine", "updates"), WRONG),
        (("engine", "skipped"), WRONG),
        (("engine", "good_steps"), WRONG),
        (
            ("engine", "loss_scale"),
            [value for value in WRONG if value not in (STEP + 1, 2**63)] + [0, 5e-324],
        ),
        (("engine", "norms"), ["x", [["x"]], [-1], [True], [10**400], {}, None, [1.0] * 129]),
        (("engine",), ["x", [1], 3, {"updates": 3.0}, {}, None]),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else "values",
)
def test_a_forged_count_is_one_line(
    where: tuple[str, ...], values: list[Any], run: tuple[Config, Path]
) -> None:
    """A traceback on every rank; or a run that goes on with other samples, or with moments of no step."""
    config, path = run
    right = (path / MANIFEST).read_bytes()
    assert Inputs(config, 0).checkpoint == path, "it was whole to begin with"
    for value in values:
        (path / MANIFEST).write_bytes(right)
        forged(path, where, value)
        with pytest.raises(CheckpointError) as caught:
            Inputs(config, 0)
        line = str(caught.value)
        assert (where[-1] in line or "weights alone" in line) and "\n" not in line and len(line) < 600, (
            value,
            line,
        )


def test_a_manifest_of_many_tensors_is_read_at_once(
    run: tuple[Config, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 300,000 tensors without elements each was looked at by itself, for a minute and a half in all."""
    _, path = run
    text = json.loads(unsealed((path / MANIFEST).read_bytes()))
    empty = {"shape": [0], "dtype": "float32", "digest": "0" * 16, "slices": 0}
    text["tensors"] |= {f"model/{i}": empty for i in range(2000)}
    (path / MANIFEST).write_bytes(sealed(text))
    looked, get = [0], Slices.__getitem__

    def counted(slices: Slices, rows: Any) -> Slices:
        looked[0] += 1
        return get(slices, rows)

    monkeypatch.setattr(Slices, "__getitem__", counted)
    assert len(Reader(path).names) == 2003 and looked[0] < 10


def test_what_a_stranger_wrote_moves_no_cursor(
    run: tuple[Config, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal obeyed escape sequences in the names of a checkpoint's state and in its version."""
    path = run[1]

    def edit(manifest: dict[str, Any]) -> None:
        escape = "\x1b[31m\n"
        manifest["megacore_version"] = escape
        manifest["state"] |= {escape: 1, f"{escape}.": {escape: {escape: 1}}, f"{escape}_": {escape: 1}}

    edit_text(path, edit)
    script.run(["info", str(path)])
    said = capsys.readouterr().out
    assert "\x1b" not in said and said.count(r"\x1b[31m\n") == 7


@pytest.mark.parametrize("digits", ["０００００００７", "٠٠٠٠٠٠٠٧"])
def test_digits_of_another_script_name_no_step(run: tuple[Config, Path], digits: str) -> None:
    """The folder was the run's newest checkpoint, damaged."""
    (run[1].parent / f"step_{digits}").mkdir()
    assert checkpoints_in(run[1].parent) == [run[1]]
