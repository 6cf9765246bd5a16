"""Generate benchmarks/results/README.md, the index of all measurements.

A results page begins with a title, an empty line, one line `command` · machine · date, an empty line, and a
sentence that tells what it shows.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megacore.files import ROOT

RESULTS = ROOT / "benchmarks/results"
INDEX = "README.md"
NOT_KEPT = "not kept"
ORIGIN = re.compile(r"`(?P<command>[^`]+)` · (?P<machine>.+) · (?P<date>[^·]+)")
# Folders with files that may cite a result: pages, and programs that read it.
CITING = ("*.md", "docs/*.md", "kernels/*.md", "benchmarks/**/*.md", "benchmarks/**/*.py", "tests/**/*.py")

HEAD = """# Results

Every measurement of the documentation, with the command that repeats it, the machine and the date.
"not kept" means that it was not recorded.

| page | what it shows | command | machine | date |
|---|---|---|---|---|
"""
DATA_HEAD = """
## Data and pictures

| file | page | machine | date |
|---|---|---|---|
"""


@dataclass(frozen=True)
class ResultPage:
    """The heading of a results page."""

    name: str
    title: str
    command: str
    machine: str
    date: str
    shows: str


def page() -> str:
    """Return the text of benchmarks/results/README.md."""
    pages = [parsed for path in result_files(".md") if isinstance(parsed := parse(path), ResultPage)]
    rows = []
    for entry in pages:
        fields = (
            f"[{entry.title}]({entry.name})",
            entry.shows,
            f"`{entry.command}`",
            entry.machine,
            entry.date,
        )
        rows.append(f"| {' | '.join(fields)} |")
    data = []
    for path in result_files(".json", ".csv", ".png"):
        citing = pages_of(path)
        links = ", ".join(f"[{Path(name).name}]({relative(name)})" for name in citing if name.endswith(".md"))
        machine, date = origin_of(path, pages, citing)
        data.append(f"| [{path.name}]({path.name}) | {links or 'read by a program'} | {machine} | {date} |")
    return HEAD + "\n".join(rows) + "\n" + DATA_HEAD + "\n".join(data) + "\n"


def problems(folder: Path = RESULTS) -> list[str]:
    """Return a line for each result without the heading of a page, or that no page cites."""
    lines = []
    for path in sorted(folder.iterdir()):
        if path.name == INDEX:
            continue
        if path.suffix == ".md":
            parsed = parse(path)
            if isinstance(parsed, str):
                lines.append(f"{path.name}: {parsed}")
        elif not pages_of(path):
            lines.append(f"{path.name}: no page cites it: cite it or delete it")
    return lines


def result_files(*suffixes: str) -> list[Path]:
    """Return the results with these endings, by name."""
    return sorted(path for path in RESULTS.iterdir() if path.suffix in suffixes and path.name != INDEX)


def parse(path: Path) -> ResultPage | str:
    """Return the heading of a results page, or what is wrong with it."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if len(lines) < 5 or not lines[0].startswith("# "):
        return "does not begin with a title"
    match = ORIGIN.fullmatch(lines[2])
    if lines[1] or match is None:
        return "its third line is not `command` · machine · date"
    if lines[3] or not lines[4] or lines[4].startswith(("|", "#", "`")):
        return "its fifth line does not tell what it shows"
    end = lines.index("", 4) if "" in lines[4:] else len(lines)
    sentence = re.split(r"(?<=[.!?])\s", " ".join(lines[4:end]))[0]
    fields = [match[name].strip() for name in ("command", "machine", "date")]
    return ResultPage(path.name, lines[0].removeprefix("# "), *(cell(text) for text in [*fields, sentence]))


def cell(text: str) -> str:
    """Return a text for a cell of a Markdown table."""
    return text.replace("|", "\\|")


def pages_of(path: Path) -> list[str]:
    """Return the files that cite a result. Files with one name and several endings are one result."""
    place = path.relative_to(ROOT)
    citing = []
    for name, text in citing_texts().items():
        # A guide must cite a result by its folder, because a guide may have the same name as a result.
        is_guide = name.endswith(".md") and not name.startswith(f"{place.parent.as_posix()}/")
        cited_as = f"results/{place.stem}." if is_guide else f"{place.stem}."
        if cited_as in text or Path(name).with_suffix("") == place.with_suffix(""):
            citing.append(name)
    return citing


@cache
def citing_texts() -> dict[str, str]:
    """Return the texts of all files that may cite a result, by path."""
    files = {file for pattern in CITING for file in ROOT.glob(pattern)} - {RESULTS / INDEX}
    return {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in sorted(files)}


def relative(name: str) -> str:
    """Return a path of the repository as a link from the index."""
    inside = f"{RESULTS.relative_to(ROOT).as_posix()}/"
    return name.removeprefix(inside) if name.startswith(inside) else f"../../{name}"


def origin_of(path: Path, pages: list[ResultPage], citing: list[str]) -> tuple[str, str]:
    """Return the machine and the date of data: those of its page, or those that the file states.

    A file that states neither has those of the results page in `citing`, if there is only one.
    """
    for entry in pages:
        if Path(entry.name).stem == path.stem:
            return entry.machine, entry.date
    machine, date = stated_origin(path)
    owners = [entry for entry in pages if (RESULTS / entry.name).relative_to(ROOT).as_posix() in citing]
    if (machine, date) == (NOT_KEPT, NOT_KEPT) and len(owners) == 1:
        return owners[0].machine, owners[0].date
    return machine, date


def stated_origin(path: Path) -> tuple[str, str]:
    """Return the machine and the date that a data file, or the one that a picture is drawn from, states."""
    record: Any = {}
    source = path if path.suffix == ".json" else path.with_suffix(".json")
    if source.exists():
        record = json.loads(source.read_text(encoding="utf-8"))
    if not isinstance(record, dict):
        return NOT_KEPT, NOT_KEPT
    if isinstance(record.get("machine"), dict) and "machine" in record["machine"]:
        record = record["machine"]  # some programs record the date and versions with the machine
    machine = record.get("machine", NOT_KEPT)
    if isinstance(machine, dict):
        machine = f"{machine['processor']}, {machine['cores']} cores"
    return str(machine), str(record.get("date", NOT_KEPT)).partition("T")[0]
