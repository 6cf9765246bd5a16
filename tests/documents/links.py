"""Checks links, anchors, and the names of the project's files, in documents and in the code."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.documents.pages import INLINE_CODE, ROOT, Finding, Page, read_page

LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)|<(?:img|a)\b[^>]*?(?:src|href)=\"([^\"]+)\"")
FILE_NAME = re.compile(
    r"((?:docs|megacore|launch|tests|benchmarks|kernels|configs)/[\w./*-]*)(?::([A-Za-z_]\w*))?(#[\w-]+)?"
)
PAGE_IN_CODE = re.compile(
    r"(?<![\w/.-])"
    r"((?:docs|tests|benchmarks|kernels)/(?:[\w-]+/)*[\w-]+\.md|(?:SECURITY|CHANGELOG|CONTRIBUTING)\.md)"
    r"(?:#([\w-]+))?"
)
SOURCES = {".py", ".sh", ".json", ".yml", ".yaml", ".toml", ".sbatch", ".cff", ""}
OTHER_PROJECTS = ("benchmarks/autosp/",)  # folders of DeepSpeedExamples, which a results page lists
FOLDERS = ("megacore", "launch", "kernels", "benchmarks", "tests", "configs", ".github", ".ci")


@cache
def anchors_of(path: Path) -> set[str]:
    return read_page(path).anchors


def wrong_links(page: Page) -> Iterator[Finding]:
    """Relative links that lead to no file, or to no heading of one."""
    for number, line in page.prose:
        text = INLINE_CODE.sub("", line)
        for match in LINK.finditer(text):
            link = match[1] or match[2]
            if "://" in link or link.startswith("mailto:"):
                continue
            name, _, anchor = link.partition("#")
            target = (ROOT / page.name).parent / name if name else ROOT / page.name
            if name and not target.exists():
                yield page.finding(number, f"link to {link}: no such file")
            elif anchor and anchor not in (page.anchors if not name else anchors_of(target)):
                yield page.finding(number, f"link to {link}: no such heading")


def wrong_names(page: Page) -> Iterator[Finding]:
    """Files in backticks that the checkout does not have, or whose text does not have the name after `:`."""
    for number, code in page.inline_code:
        match = FILE_NAME.fullmatch(code)
        if match is None:
            continue
        path, name = match[1], match[2]
        matches = list(ROOT.glob(path.rstrip("/"))) if "*" in path else [ROOT / path]
        if not matches or not matches[0].exists():
            if not is_ignored(path):
                yield page.finding(number, f"`{code}`: the checkout has no {path}")
        elif name and not re.search(rf"\b{name}\b", matches[0].read_text(encoding="utf-8")):
            yield page.finding(number, f"`{code}`: {path} has no {name}")


def is_ignored(path: str) -> bool:
    """Whether a path is an example's, with capitals where a name would be, or another project's."""
    if path.startswith(OTHER_PROJECTS):
        return True
    return bool(re.search(r"/[A-Z_]{2,}(\.|/|$)", path)) and not path.endswith("README.md")


def wrong_pages_in_code() -> Iterator[Finding]:
    """Pages that strings and comments of the code refer to and that do not exist."""
    for path in sources():
        text = path.read_text(encoding="utf-8", errors="replace")
        yield from wrong_pages_in_text(str(path.relative_to(ROOT)), text)


def wrong_pages_in_text(name: str, text: str) -> Iterator[Finding]:
    """Pages that the text of the file `name` refers to and that do not exist."""
    for number, line in enumerate(text.splitlines(), 1):
        for match in PAGE_IN_CODE.finditer(line):
            target, anchor = ROOT / match[1], match[2]
            if not target.is_file():
                yield Finding(name, number, f"refers to {match[1]}, which does not exist")
            elif anchor and anchor not in anchors_of(target):
                yield Finding(name, number, f"refers to {match[0]}, which is not a heading there")


def sources() -> Iterator[Path]:
    yield from sorted(path for path in ROOT.glob("*") if path.is_file() and path.suffix in SOURCES)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            is_source = path.suffix in SOURCES and path.is_file() and "__pycache__" not in path.parts
            if is_source and path.stat().st_size < 1_000_000 and "results" not in path.parts:
                yield path


def unlisted_pages() -> Iterator[Finding]:
    """Pages of docs/ to which its table of contents has no link."""
    contents = read_page(ROOT / "docs/README.md")
    listed = {match[1].partition("#")[0] for match in LINK.finditer(contents.text) if match[1]}
    for path in sorted((ROOT / "docs").glob("*.md")):
        if path.name not in listed | {"README.md"}:
            yield contents.finding(1, f"does not list {path.name}")
