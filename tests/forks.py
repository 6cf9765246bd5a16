"""Models in one file: that of docs/blocks.md, right or with a mistake, and whole models for comparisons."""

import re
from pathlib import Path

import torch

from megacore.config import Config
from megacore.model.stage import Stage
from tests.build import model_of

ROOT = Path(__file__).resolve().parents[1]


def documented() -> str:
    """The file that the document shows."""
    found = re.search(
        r"```python\n(# my_model.py\n.*?)```",
        (ROOT / "docs/blocks.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
    assert found is not None and len(found[1].splitlines()) < 70
    return found[1]


def written(folder: Path, *edits: tuple[str, str], name: str = "my_model.py") -> Path:
    """The file in a folder, with some of its text replaced."""
    text = documented()
    for before, after in edits:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (folder / name).write_text(text)
    return folder / name


def perturbed(config: Config, size: float) -> Stage:
    """A config's whole model with normal numbers of this size added, as a gradient
    through what starts at 0 is no proof.
    """
    stage, generator = model_of(config), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return stage
