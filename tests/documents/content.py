"""Checks what fences hold, and that guides hold no records of measurements."""

import json
import re
from collections.abc import Iterator

from tests.documents.pages import Finding, Page

# `sh` is a script, which is not typed line by line.
LANGUAGES = {"bash", "sh", "text", "json", "python", "pycon", "yaml", "ini", "diff", "toml", "dockerfile"}
LANGUAGES |= {"c", "cpp", "mermaid", "html", "jinja", "csv", "bibtex"}

MONTH = "January|February|March|April|May|June|July|August|September|October|November|December"
DATE = re.compile(rf"\b20\d\d-[01]\d(?:-[0-3]\d)?\b|\b\d{{1,2}} (?:{MONTH}) 20\d\d\b")
HASH = re.compile(r"(?<![\w/#.-])(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{7,40}(?![\w/.-])")
PROCESSOR = re.compile(
    r"\b(?:Xeon|EPYC|Epyc|Ryzen|Threadripper|Zen ?\d|Core i\d|Ice Lake|(?:Sapphire|Emerald|Granite) Rapids)\b"
)
RESULT = re.compile(r"[\w./-]*benchmarks/results/[\w./-]*|\]\([^)]*\)")  # paths may have a date


def wrong_fences(page: Page) -> Iterator[Finding]:
    """Fences without a language, with words that mean nothing, or whose content is invalid."""
    for fence in page.fences:
        if not fence.language:
            yield page.finding(fence.line, "a fence without a language (text for output, bash for commands)")
        elif fence.language not in LANGUAGES:
            known = ", ".join(sorted(LANGUAGES))
            yield page.finding(fence.line, f"{fence.language} is not a language of fences ({known})")
        elif fence.language == "bash":
            if not re.fullmatch(r"(run|needs \S.*)?", fence.words):
                yield page.finding(fence.line, f"bash {fence.words}: after bash comes run, or needs WHAT")
        elif fence.words:
            yield page.finding(fence.line, f"{fence.words}: only bash takes words after the language")
        yield from wrong_content(page, fence.line, fence.language, fence.text)


def wrong_content(page: Page, line: int, language: str, text: str) -> Iterator[Finding]:
    if language == "json":
        try:
            json.loads(text)
        except json.JSONDecodeError as error:
            yield page.finding(line + error.lineno, f"invalid JSON: {error.msg}")
    elif language == "python":
        try:
            compile(text, page.name, "exec")
        except SyntaxError as error:
            yield page.finding(line + (error.lineno or 0), f"Python that does not compile: {error.msg}")


def records(page: Page) -> Iterator[Finding]:
    """Dates, commits and processors, which belong to benchmarks/results."""
    for number, line in enumerate(page.lines, 1):
        text = RESULT.sub("", line)
        for kind, pattern in (("date", DATE), ("commit hash", HASH), ("processor's name", PROCESSOR)):
            for match in pattern.finditer(text):
                what = f"{match[0]}: a guide has no {kind} (results go to benchmarks/results)"
                yield page.finding(number, what)
