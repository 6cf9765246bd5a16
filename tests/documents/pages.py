"""Reads documents: their fences, the text outside them, and what a finding says."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^ *(```+) *(\S*) *(.*?) *$")
INLINE_CODE = re.compile(r"(`+)(.+?)\1")


@dataclass(frozen=True)
class Finding:
    """Something that is wrong in a file, at a line."""

    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


@dataclass(frozen=True)
class Fence:
    """A code block. `line` is the number of its opening line, which is `LANGUAGE WORDS`."""

    line: int
    language: str
    words: str
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@dataclass(frozen=True)
class Page:
    """A document. `name` is its path from the root of the checkout."""

    name: str
    text: str

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def fences(self) -> list[Fence]:
        fences = list[Fence]()
        opening: re.Match[str] | None = None
        first = 0
        for number, line in enumerate(self.lines, 1):
            match = FENCE.match(line)
            if opening is None:
                opening, first = match, number
            elif match is not None and match[1] == opening[1] and not match[2]:
                fences.append(Fence(first, opening[2], opening[3], tuple(self.lines[first : number - 1])))
                opening = None
        if opening is not None:  # never closed: all that follows is code
            fences.append(Fence(first, opening[2], opening[3], tuple(self.lines[first:])))
        return fences

    @cached_property
    def prose(self) -> list[tuple[int, str]]:
        """The lines outside fences, with their numbers from 1."""
        in_fences = {
            number for fence in self.fences for number in range(fence.line, fence.line + len(fence.lines) + 2)
        }
        return [(number, line) for number, line in enumerate(self.lines, 1) if number not in in_fences]

    @cached_property
    def inline_code(self) -> list[tuple[int, str]]:
        """The texts in backticks, with their lines' numbers."""
        return [(number, match[2]) for number, line in self.prose for match in INLINE_CODE.finditer(line)]

    @cached_property
    def anchors(self) -> set[str]:
        """What a link may have after `#`: the headings, as GitHub writes them."""
        seen = dict[str, int]()
        anchors = set[str]()
        for _, line in self.prose:
            if not re.match(r"#{1,6} ", line):
                continue
            title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line.lstrip("#")).strip().lower()
            anchor = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
            repeated = seen.get(anchor, 0)
            seen[anchor] = repeated + 1
            anchors.add(f"{anchor}-{repeated}" if repeated else anchor)
        return anchors

    def finding(self, line: int, what: str) -> Finding:
        return Finding(self.name, line, what)


def read_page(path: Path) -> Page:
    return Page(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))


def documents() -> Iterator[Page]:
    """Every document of the checkout."""
    patterns = (
        *("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/*.md"),
        *("kernels/README.md", "benchmarks/README.md", "benchmarks/results/*.md", "tests/**/*.md"),
    )
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            yield read_page(path)


def is_guide(page: Page) -> bool:
    """Whether a page explains something, unlike a record of what was measured or changed."""
    return page.name in (
        "CONTRIBUTING.md",
        "SECURITY.md",
        "benchmarks/README.md",
        "kernels/README.md",
    ) or page.name.startswith("docs/")
