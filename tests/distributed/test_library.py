"""megacore as a library: the cells of docs/library.md, one after the other, as a notebook would run them."""

import re
from pathlib import Path
from typing import Any

import pytest

import megacore
from megacore.tools.verify import run
from tests import forks
from tests.commands import provers, run_script
from tests.pool import ROOT

CELLS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), re.DOTALL)
FOLDER = re.compile(r'^folder = "runs/notebook"', re.MULTILINE)
BEFORE = """
import torch
from megacore.distributed import cpu
cpu.WIDENED.add(torch.int8)  # as another set-up would
"""
AFTER = """
assert torch.int8 not in cpu.WIDENED, "the process is not set up as that of a run"
assert losses[-1] < losses[0] - 1.0, "a model that learns nothing"
assert found.step > 0
megacore.one_process(megacore.load_config("configs/gpt_tiny.json", [*small, "train.deterministic=true"]))
assert torch.are_deterministic_algorithms_enabled()
"""


def test_the_documents_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader who types them one by one would stop at the first that does not.

    They have a process of their own, because what sets it up, and torch's threads, would stay in this one.
    """
    monkeypatch.chdir(ROOT)
    proofs = [cell for cell in CELLS if "megacore.prove(" in cell]
    script, folder = tmp_path / "cells.py", f"folder = {str(tmp_path)!r}"
    cells, replaced = FOLDER.subn(folder, "\n".join(cell for cell in CELLS if cell not in proofs))
    assert replaced == 1, "the page says where its files go"
    script.write_text("\n".join([BEFORE, cells, AFTER]))
    done = run_script(str(script))
    assert done.returncode == 0, done.stderr
    assert "The planner " in done.stdout and "backward 0" in done.stdout
    (settings,) = (cell for cell in CELLS if "small = [" in cell)
    monkeypatch.setattr(run, "ProofWorkers", lambda _: provers())  # which need not import torch
    names: dict[str, Any] = {}
    for cell in (folder, settings, *proofs):
        exec(compile(cell, "docs/library.md", "exec"), names)
    assert names["proof"].holds


def test_what_is_predicted_for_a_model_of_the_users_own_is_of_its_layers(tmp_path: Path) -> None:
    """The figures would be those of megacore's own blocks, and nobody would be told."""
    config = megacore.load_config("configs/gpt_tiny.json", [f"model.source={forks.written(tmp_path)}"])
    plain = megacore.load_config("configs/gpt_tiny.json", [])
    assert megacore.memory(config)[0].activations != megacore.memory(plain)[0].activations
    assert megacore.predict(config).terms["products"] < 0.96 * megacore.predict(plain).terms["products"], (
        "it has no gate"
    )


def test_every_name_is_there_and_explained() -> None:
    """A name that only fails when it is used, or that no document tells of."""
    text = (ROOT / "docs/library.md").read_text()
    for name in megacore.__all__:
        assert getattr(megacore, name).__doc__ and f"`{name}`" in text, name
    with pytest.raises(AttributeError, match="megacore has no Trainr; it has .*TrainStep"):
        megacore.Trainr  # noqa: B018
