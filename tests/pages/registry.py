"""Which pages and blocks are generated, and how they are written and checked."""

from collections.abc import Callable
from pathlib import Path

from tests import engines
from tests.faults import checks
from tests.pages import blocks, cli, config, proved, results
from tests.strict import report

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "python -m tests.pages"

# Whole pages, by path.
PAGES: dict[str, Callable[[], str]] = {
    "docs/config.md": config.page,
    "docs/cli.md": cli.page,
    "docs/engine_features.md": engines.page,
    "tests/faults/README.md": checks.document,
    "tests/strict/README.md": report.document,
    "tests/proved_layouts.md": proved.page,
    "benchmarks/results/README.md": results.page,
}


# Pages that people write, in which blocks and numbers may be generated.
WRITTEN = ("*.md", "docs/*.md", "kernels/*.md", "benchmarks/*.md", "benchmarks/results/*.md")


def current_texts() -> dict[str, str]:
    """Return the text that each generated page, or page with generated blocks, should have, by path."""
    texts = {path: write() for path, write in PAGES.items()}
    for pattern in WRITTEN:
        for file in sorted(ROOT.glob(pattern)):
            path = file.relative_to(ROOT).as_posix()
            text = file.read_text(encoding="utf-8")
            if path not in texts and blocks.MARK in text:
                texts[path] = blocks.filled(text, path)
    return texts


def stale_pages(texts: dict[str, str], root: Path = ROOT) -> list[str]:
    """Return a line for each page that differs from the text that it should have."""
    lines = []
    for path, text in texts.items():
        file = root / path
        if not file.exists():
            lines.append(f"{path} is missing: run `{COMMAND}`")
        elif file.read_text(encoding="utf-8") != text:
            lines.append(f"{path} is stale: run `{COMMAND}`")
    return lines
