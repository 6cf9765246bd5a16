"""Prints every finding in the documents. See `tests.documents`."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import tests.documents
from megacore.errors import ConfigError
from megacore.tools.cli import exit_with
from tests.documents.commands import wrong_commands
from tests.documents.content import records, wrong_fences
from tests.documents.examples import failed_examples, runnable
from tests.documents.idioms import idioms
from tests.documents.links import unlisted_pages, wrong_links, wrong_names, wrong_pages_in_code
from tests.documents.pages import Finding, Page, documents, is_guide


def findings_in(page: Page) -> list[Finding]:
    """All findings of a page, without running its examples, in the order of its lines."""
    findings = [*wrong_fences(page), *wrong_links(page), *wrong_names(page), *wrong_commands(page)]
    if is_guide(page):
        findings += records(page)
    findings += idioms(page)
    return sorted(findings, key=lambda finding: finding.line)


def all_findings(run: bool) -> Iterator[Finding]:
    for page in documents():
        yield from findings_in(page)
        if run and runnable(page):
            with tempfile.TemporaryDirectory() as folder:
                yield from failed_examples(page, Path(folder))
    yield from wrong_pages_in_code()
    yield from unlisted_pages()


def main(argv: list[str]) -> int:
    """Print all findings. Returns 1 if there are any. Raises `ConfigError`."""
    if argv in (["-h"], ["--help"]):
        print(tests.documents.__doc__)
        return 0
    if argv not in ([], ["--run"]):
        raise ConfigError("arguments", f"{' '.join(argv)} is not an option", "--run, or nothing")
    number = 0
    for finding in all_findings(run="--run" in argv):
        number += 1
        print(finding, flush=True)
    print(f"{number} findings", file=sys.stderr)
    return 1 if number else 0


if __name__ == "__main__":
    exit_with(main)
