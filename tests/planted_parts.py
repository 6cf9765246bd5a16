"""Parts of `benchmarks.gpu` that do well, fail, find something wrong, or never end; they import next to
nothing, so as to begin at once.
"""

import json
import subprocess
import time
from pathlib import Path

from benchmarks.gpu.running import Rows


def good(rows: Rows) -> None:
    rows.add(number=1.5, name="a")
    rows.add(number=None, name="b | c")


def broken(rows: Rows) -> None:
    rows.add(name="before")
    raise OSError("a disk is gone\nsecond line")


def wrong(rows: Rows) -> None:
    rows.attempt(lambda: {"failed": "off by 3"}, name="x")
    rows.attempt(lambda: {"found": 2}, name="y")


def endless(rows: Rows, file: str) -> None:
    child = subprocess.Popen(["sleep", "100"])
    rows.add(child=child.pid)
    while not json.loads(Path(file).read_text())["parts"]["endless"]["rows"]:
        time.sleep(0.05)
    rows.add(seen=True)  # the report already had the first row
    time.sleep(3600)


def meets(rows: Rows, own: str, other: str) -> None:
    """Ends when another part has begun too."""
    Path(own).touch()
    while not Path(other).exists():
        time.sleep(0.05)
    rows.add(met=True)


def waits(rows: Rows) -> None:
    """Never ends, and has started something that does not either."""
    rows.add(child=subprocess.Popen(["sleep", "1000"]).pid)
    time.sleep(3600)


def never(rows: Rows) -> None:
    raise AssertionError("this part must not begin")
