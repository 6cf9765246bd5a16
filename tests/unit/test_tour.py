"""docs/tour.md leads through code that exists: a renamed function or a moved file would
send readers astray.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATH = re.compile(r"`((?:megacore|launch|kernels|tests|configs|benchmarks)/[\w./]*)`")
NAMED = re.compile(r"`((?:megacore|launch)/[\w./]+\.py)`\**\s+·\s+`(\w+)`((?:,\s+(?:method\s+)?`\w+`)*)")
ALSO_IN = re.compile(r"`(\w+)` in `((?:megacore|launch)/[\w./]+\.py)`")


def names_in(path: Path) -> set[str]:
    """Functions, classes, methods and module-level names that a file defines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return defined | {
        t.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for t in node.targets
        if isinstance(t, ast.Name)
    }


def wrong_in(text: str) -> list[str]:
    """What a guide names that does not exist."""
    wrong = [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    named = [
        (path, name)
        for path, first, more in NAMED.findall(text)
        for name in [first, *re.findall(r"`(\w+)`", more)]
    ]
    named += [(path, name) for name, path in ALSO_IN.findall(text)]
    return wrong + [
        f"{path} · {name}"
        for path, name in named
        if (ROOT / path).exists() and name not in names_in(ROOT / path)
    ]


GUIDES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "kernels/README.md", "benchmarks/README.md")),
]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: str(guide.relative_to(ROOT)))
def test_every_path_and_name_exists(guide: Path) -> None:
    assert wrong_in(guide.read_text(encoding="utf-8")) == []


def test_the_tour_names_what_matters() -> None:
    text = (ROOT / "docs/tour.md").read_text(encoding="utf-8")
    assert len(NAMED.findall(text)) > 20, "the pattern that reads the tour no longer matches it"


def test_a_wrong_name_is_reported() -> None:
    text = (
        "`megacore/distributed/mesh.py` · `Mesh`, `Mush`, and `run` in `megacore/distributed/mesh.py`, "
        "`megacore/nowhere.py`"
    )
    assert wrong_in(text) == [
        "megacore/nowhere.py",
        "megacore/distributed/mesh.py · Mush",
        "megacore/distributed/mesh.py · run",
    ]
