"""Runs the commands of `bash run` fences, in a folder that sees the checkout."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.documents.pages import ROOT, Fence, Finding, Page

SECONDS = 120  # for one fence
VARIES = "…"


def runnable(page: Page) -> list[Fence]:
    return [fence for fence in page.fences if fence.language == "bash" and fence.words == "run"]


def failed_examples(page: Page, folder: Path) -> Iterator[Finding]:
    """Run the fences of a page in their order, in `folder`, and compare what they print with the page."""
    environment = prepare(folder)
    for fence in runnable(page):
        try:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", fence.text],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            yield page.finding(fence.line, f"its commands take longer than {SECONDS} s")
            continue
        if done.returncode:
            last = done.stdout.strip().splitlines()[-1:] or ["no output"]
            yield page.finding(fence.line, f"its commands end with status {done.returncode}: {last[0]}")
            continue
        output = output_after(page, fence)
        if output is not None:
            for number, line in missing_lines(output, done.stdout):
                yield page.finding(number, f"the commands before do not print this line: {line.strip()}")


def prepare(folder: Path) -> dict[str, str]:
    """Make `folder` look like the checkout, and return the environment of its commands.

    Results go into `folder` itself, which has no corpus and no run yet.
    """
    for path in ROOT.iterdir():
        if path.name not in ("data", "runs", "models", ".git", "hostfile"):
            (folder / path.name).symlink_to(path)
    programs = folder / ".programs"
    programs.mkdir()
    command = programs / "megacore"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m megacore "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    places = (str(programs), str(Path(sys.executable).parent), os.environ.get("PATH", ""))
    return os.environ | {
        "PATH": os.pathsep.join(places),
        "PYTHONPATH": str(ROOT),
        "PYTHONSAFEPATH": "",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
        "NO_COLOR": "1",
    }


def output_after(page: Page, fence: Fence) -> Fence | None:
    """The `text` fence that follows a fence with nothing but empty lines between, or None."""
    end = fence.line + len(fence.lines) + 1
    for other in page.fences:
        if other.line > end:
            between = page.lines[end : other.line - 1]
            return other if other.language == "text" and not any(line.strip() for line in between) else None
    return None


def missing_lines(output: Fence, printed: str) -> Iterator[tuple[int, str]]:
    """The lines of a page's output, with their numbers, that were not printed."""
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    for number, line in enumerate(output.lines, output.line + 1):
        wanted = " ".join(line.split())
        if wanted in ("", VARIES, "..."):
            continue
        pattern = re.compile(".*".join(re.escape(part) for part in wanted.split(VARIES)))
        if not any(pattern.fullmatch(line) for line in lines):
            yield number, line
