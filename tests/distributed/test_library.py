"""megacore as a library: the cells of docs/library.md, one after the other, as a notebook would run them."""

import re
from pathlib import Path
from typing import Any

import pytest

import megacore
from tests.pool import ROOT

CELLS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), re.DOTALL)


def test_the_documents_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A reader who types them one by one would stop at the first that does not."""
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {"folder": str(tmp_path)}
    for cell in CELLS:
        exec(compile(cell, "docs/library.md", "exec"), names)
    said = capsys.readouterr().out
    assert names["losses"][-1] < names["losses"][0] - 1.0, "a model that learns nothing"
    assert "The planner " in said and "equal to one process" in said and "backward 0" in said
    assert names["found"].step > 0 and names["proof"].holds


def test_every_name_is_there_and_explained() -> None:
    """A name that only fails when it is used, or that no document tells of."""
    text = (ROOT / "docs/library.md").read_text()
    for name in megacore.__all__:
        assert getattr(megacore, name).__doc__ and f"`{name}`" in text, name
    with pytest.raises(AttributeError, match="megacore has no Trainr; it has .*TrainStep"):
        megacore.Trainr  # noqa: B018
