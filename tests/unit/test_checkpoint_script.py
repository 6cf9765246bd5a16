"""What launch/checkpoint.py says: the summary first, names whole in whatever is read,
and tables on request.
"""

from pathlib import Path

import pytest
import torch

from launch.checkpoint import FEW, run
from megacore.distributed.shard import Shard
from tests.checkpoints import save

LONG = (
    "adam_v/"
    "blocks.117.attention.a_part_with_a_name_of_its_own_that_goes_on_and_on_and_on_beyond_every_terminal.weight"
)

MODEL = {"hidden_size": 2, "norm": "rmsnorm"}


def saved(folder: Path, step: int, value: float) -> Path:
    """A checkpoint whose 40 tensors hold `value`, one of them under a long name."""
    tensors = {
        name: (torch.full((3, 2), value), Shard((3, 2)))
        for name in (LONG, *(f"model/w{i}" for i in range(39)))
    }
    return save(
        folder,
        step,
        tensors,
        {"samples": 80, "model": MODEL, "config": {"model": MODEL, "train": {"seed": 1}}},
        keep=1,
    )


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    """The lines."""
    run([*map(str, arguments)])
    return capsys.readouterr().out.splitlines()


def test_names_are_whole_and_the_summary_stands_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    """In 80 columns, and in a pipe, a name that is broken is found by no search."""
    monkeypatch.setenv("COLUMNS", "80")
    one, other = saved(tmp_path / "one", 10, 1.0), saved(tmp_path / "other", 20, 2.0)
    lines = said(capsys, "info", one)
    assert lines == [
        str(one),
        lines[1],
        "40 tensors, 960 B, in 1 files (--tensors lists them)",
        "samples: 80",
        "config:",
        "  model.hidden_size  2",
        '  model.norm         "rmsnorm"',
        "  train.seed         1",
    ]
    assert lines[1].startswith("step 10, ")

    full = said(capsys, "info", one, "--tensors")
    assert full[:2] == lines[:2] and full[2] == "40 tensors, 960 B, in 1 files" and full[3:8] == lines[3:]
    header, *rows = full[8:]
    assert header.split() == ["tensor", "dtype", "shape", "size", "content", "digest"] and len(rows) == 40
    assert (
        rows[0].startswith(f"{LONG}  float32  3 × 2  24 B  ")
        and len({row.index("float32") for row in rows}) == 1
    )

    lines = said(capsys, "diff", one, other)
    assert lines[:3] == [f"{one}, step 10", f"{other}, step 20", "0 of 40 tensors are equal in every bit"]
    assert lines[4].split() == [LONG, "values,", "of", "6", "6", "1", "1"]
    assert len(lines) == 3 + 1 + FEW + 1 and lines[-1] == f"and {40 - FEW} more (--tensors lists them)"
    assert len(said(capsys, "diff", one, other, "--tensors")) == 3 + 1 + 40
    assert said(capsys, "diff", one, one)[2:] == ["40 of 40 tensors are equal in every bit"]

    (header, row) = said(capsys, "verify", one)
    assert row.split() == ["step_00000010", "40", "1", *row.split()[3:5], "yes"] and row.index(
        "yes"
    ) == header.index("whole")
