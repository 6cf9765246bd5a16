"""The model of docs/blocks.md: a file of a user's own, right or with a mistake."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def documented() -> str:
    """The file that the document shows."""
    found = re.search(r"```python\n(# my_model.py\n.*?)```", (ROOT / "docs/blocks.md").read_text(encoding="utf-8"), re.DOTALL)
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
