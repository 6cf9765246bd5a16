"""Runs the parts of a slice, each in a process of its own, and writes down what they find while they find it."""

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import SLICES, Part, Slice
from megacore.tools.cli import leave

CONTEXT = get_context(
    "forkserver"
)  # torch is imported once, and no process inherits a device that another has opened
CLIPPED, TAIL = 110, 4000  # characters of a cell in a table; of a log that JSON keeps
DRY = {
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "1",
}  # no GPU: kernels are interpreted, and nothing is compiled


class Rows:
    """Where a part puts what it finds: one JSON object a line, at once. A row with a key `failed` says what is wrong."""

    def __init__(self, path: Path, dry: bool, until: float, folder: Path) -> None:
        """`until`: when the part is ended, by `time.monotonic`; `folder`: for files that come with the results."""
        self.path, self.dry, self.until, self.folder = path, dry, until, folder

    def add(self, **fields: Any) -> None:
        """Writes a row."""
        with self.path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(fields, default=str) + "\n")

    def left(self) -> float:
        """Seconds until the part is ended."""
        return self.until - time.monotonic()

    def attempt(self, work: Callable[[], dict[str, Any]], **fields: Any) -> None:
        """Adds a row with `fields` and what `work` returns, or with how it failed: others are still tried."""
        try:
            found = work()
        except Exception as error:
            traceback.print_exc()
            found = {"failed": said(error)}
        self.add(**fields, **found)


def said(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def work(part: Part, dry: bool, rows: Path, log: Path, seconds: float, folder: Path) -> None:
    """A part's process: its own session, its output in `log`."""
    os.setsid()
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(target, descriptor)
    out = Rows(rows, dry, time.monotonic() + seconds, folder)
    try:
        set_up(dry)
        module, function = part.function.split(":")
        getattr(import_module(module), function)(out, *part.arguments)
    except BaseException as error:
        traceback.print_exc()
        out.add(failed=said(error))
        leave(1)
    leave(0)


def set_up(dry: bool) -> None:
    """As a run sets up a process on a GPU, before CUDA starts; in a dry run one thread."""
    if dry:
        import torch

        torch.set_num_threads(1)
        return
    from megacore.caches import keep_inductor_private, keep_triton_local
    from megacore.tools.machine.gpu import set_up_environment
    from megacore.tools.settings.load import resolve

    set_up_environment(resolve({}, [], "benchmarks.gpu", 1).config)
    keep_triton_local()
    keep_inductor_private()


class Report:
    """A slice's results: one JSON file and one table, both whole at any time."""

    def __init__(self, name: str, folder: Path, dry: bool, machine: dict[str, Any]) -> None:
        self.json, self.markdown = folder / f"gpu_{name}.json", folder / f"gpu_{name}.md"
        self.content: dict[str, Any] = {
            "slice": name,
            "dry_run": dry,
            "complete": False,
            "seconds": 0.0,
            "failed": [],
        }
        self.content |= machine | {"parts": {}}

    def write(self) -> None:
        """Both files; a reader, and whoever kills this process, finds the old or the new ones."""
        self.content["failed"] = [
            name for name, part in self.content["parts"].items() if part["status"] not in ("ok", "under way")
        ]
        for path, text in (
            (self.json, json.dumps(self.content, indent=1) + "\n"),
            (self.markdown, table(self.content)),
        ):
            new = path.with_suffix(".new")
            new.write_text(text, encoding="utf-8")
            new.replace(path)


def run_slice(
    name: str,
    folder: Path,
    dry: bool,
    only: list[str],
    machine: dict[str, Any],
    say: Callable[[str], None],
    patience: float = 1.0,
) -> list[str]:
    """Runs a slice's parts, as long as it has time; returns the names of those that failed. `patience`: how many times as long all may
    take as they should."""
    whole, began = SLICES[name], time.monotonic()
    report = Report(name, folder, dry, machine)
    for part in whole.parts:
        if (only and part.name not in only) or (dry and not part.dry):
            continue
        entry: dict[str, Any] = {"status": "under way", "seconds": 0.0, "rows": []}
        report.content["parts"][part.name] = entry
        report.write()
        limit = min(patience * part.seconds, patience * whole.seconds - (time.monotonic() - began))
        if limit < 5:
            entry["status"] = "no time was left"
        else:
            run_part(part, dry, folder, limit, entry, report)
        failing = sum("failed" in row for row in entry["rows"])
        say(
            f"{name}, {part.name}: {entry['status']}{f', {failing} rows failed' if failing else ''} ({entry['seconds']:.0f} s)"
        )
        report.content["seconds"] = round(time.monotonic() - began, 1)
        report.write()
    report.content["complete"] = True
    report.write()
    return report.content["failed"]


def run_part(
    part: Part, dry: bool, folder: Path, limit: float, entry: dict[str, Any], report: Report
) -> None:
    """Runs a part for `limit` seconds at most, and copies its rows into the report as they come."""
    with tempfile.TemporaryDirectory() as scratch:
        rows, log = Path(scratch) / "rows", Path(scratch) / "log"
        rows.touch()
        log.touch()
        began, seen = time.monotonic(), 0
        process = CONTEXT.Process(target=work, args=(part, dry, rows, log, limit, folder))
        process.start()
        try:
            while process.is_alive() and time.monotonic() - began < limit:
                process.join(0.5)
                if rows.stat().st_size != seen:
                    seen = rows.stat().st_size
                    entry["rows"] = read(rows)
                    report.write()
            late = process.is_alive()
        finally:
            end(process)
        entry["rows"], entry["seconds"] = read(rows), round(time.monotonic() - began, 1)
        failing = [row["failed"] for row in entry["rows"] if "failed" in row]
        entry["status"] = (
            f"out of time ({limit:.0f} s)" if late else "failed" if failing or process.exitcode else "ok"
        )
        if entry["status"] != "ok":
            entry["log"] = log.read_text(encoding="utf-8", errors="replace")[-TAIL:]
            entry["why"] = failing[0] if failing else f"exit status {process.exitcode}"


def read(rows: Path) -> list[dict[str, Any]]:
    """The whole lines so far."""
    return [
        json.loads(line)
        for line in rows.read_text(encoding="utf-8").splitlines(keepends=True)
        if line.endswith("\n")
    ]


def end(process: Any) -> None:
    """Ends a part, and whatever it has started."""
    if process.pid is not None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # nothing is left, or it has just begun and has no session yet
            process.kill()
    process.join()


def table(content: dict[str, Any]) -> str:
    """A slice as Markdown: a table for each part, a column for each key."""
    whole: Slice = SLICES[content["slice"]]
    gpus = ", ".join(content["machine"]["gpus"]) or f"no GPU, {content['machine']['processor']}"
    lines = [
        f"# {whole.title}",
        "",
        f"{gpus}; PyTorch {content['versions']['torch']}; {content['date']}; {content['seconds']:.0f} s.",
    ]
    if content["dry_run"]:
        lines += ["", "A dry run: nothing here is a speed."]
    for name, part in content["parts"].items():
        lines += [
            "",
            f"## {name}",
            "",
            f"{part['status']}, {part['seconds']:.0f} s" + (f": {part['why']}" if "why" in part else ""),
        ]
        keys = list(dict.fromkeys(key for row in part["rows"] for key in row))
        if keys:
            lines += ["", f"| {' | '.join(keys)} |", "|" + "---|" * len(keys)]
            lines += [f"| {' | '.join(cell(row.get(key)) for key in keys)} |" for row in part["rows"]]
    if content["complete"]:
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


def prepare_processes(dry: bool) -> None:
    """Says what the process that all others are forked from imports; to be called once, when packages are at hand."""
    os.environ.update(DRY if dry else {})
    sys.path[:] = [path or os.getcwd() for path in sys.path]
    preload = ["torch", "benchmarks.training"]
    CONTEXT.set_forkserver_preload(
        [*preload, "benchmarks.kernel_operations", "pytest", "torch._dynamo"] if dry else preload
    )
