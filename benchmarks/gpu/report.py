"""The results of a slice: one JSON file and one table in Markdown, both whole at any time.

Standard library only.
"""

import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.summary import summary

# What a part's `status` may be, besides why it failed.
OK, WAITING, UNDER_WAY, STOPPED = "ok", "not begun", "under way", "stopped"
UNFINISHED = (WAITING, UNDER_WAY, STOPPED)
CLIPPED = 110  # characters of a cell


class Report:
    """What is known of a slice so far: of every part its status, its seconds and its rows."""

    def __init__(self, name: str, title: str, folder: Path, dry: bool, machine: dict[str, Any]) -> None:
        self.name, self.folder, self.dry = name, folder, dry
        self.json, self.markdown = folder / f"gpu_{name}.json", folder / f"gpu_{name}.md"
        self.began = time.monotonic()
        self.content: dict[str, Any] = {"slice": name, "title": title, "dry_run": dry, "complete": False}
        self.content |= {
            "ended_by": None,
            "seconds": 0.0,
            "failed": [],
            "unfinished": [],
            **machine,
            "parts": {},
        }

    def expect(self, names: Sequence[str]) -> None:
        """Enter parts that are to run, so that those that never do are reported too."""
        for name in names:
            self.content["parts"][name] = {"status": WAITING, "seconds": 0.0, "rows": []}
        self.write()

    def entry(self, name: str) -> dict[str, Any]:
        """What is known of a part; to be changed in place."""
        return self.content["parts"][name]

    def close(self, ended_by: signal.Signals | None) -> None:
        """Write the last version: all parts have run, or a signal ended them."""
        self.content["complete"] = ended_by is None
        self.content["ended_by"] = None if ended_by is None else ended_by.name
        self.write()

    def write(self) -> None:
        """Write both files. If this process is killed meanwhile, the old or the new ones are there."""
        statuses = {name: part["status"] for name, part in self.content["parts"].items()}
        self.content["failed"] = [
            name for name, status in statuses.items() if status not in (OK, *UNFINISHED)
        ]
        self.content["unfinished"] = [name for name, status in statuses.items() if status in UNFINISHED]
        self.content["seconds"] = round(time.monotonic() - self.began, 1)
        texts = {self.json: json.dumps(self.content, indent=1) + "\n", self.markdown: table(self.content)}
        for path, text in texts.items():
            new = path.with_suffix(".new")
            new.write_text(text, encoding="utf-8")
            new.replace(path)


def table(content: dict[str, Any]) -> str:
    """A slice as Markdown: a table for each part, a column for each key; at the
    end the summary, if there is one.
    """
    gpus = ", ".join(content["machine"]["gpus"]) or f"no GPU, {content['machine']['processor']}"
    machine = (
        f"{gpus}; PyTorch {content['versions']['torch']}; {content['date']}; {content['seconds']:.0f} s."
    )
    lines = [f"# {content['title']}", "", machine]
    if content["dry_run"]:
        lines += ["", "A dry run: nothing here is a speed."]
    for name, part in content["parts"].items():
        why = f": {part['why']}" if "why" in part else ""
        lines += ["", f"## {name}", "", f"{part['status']}, {part['seconds']:.0f} s{why}"]
        keys = list(dict.fromkeys(key for row in part["rows"] for key in row))
        if keys:
            lines += ["", f"| {' | '.join(keys)} |", "|" + "---|" * len(keys)]
            lines += [f"| {' | '.join(cell(row.get(key)) for key in keys)} |" for row in part["rows"]]
    lines += summary(content)
    if content["ended_by"]:
        lines += [
            "",
            f"Ended by {content['ended_by']}. Unfinished: {', '.join(content['unfinished']) or 'nothing'}.",
        ]
    if content["complete"] or content["ended_by"]:
        lines += ["", f"Failed: {', '.join(content['failed']) or 'nothing'}."]
    return "\n".join(lines) + "\n"


def cell(value: Any) -> str:
    """A value in a table."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    text = " ".join(str(value).split()).replace("|", "/")
    return text if len(text) <= CLIPPED else text[:CLIPPED] + "…"
