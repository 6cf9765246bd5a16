"""The table of configs in docs/training.md has every config, with its parameters and its corpus."""

import re
from pathlib import Path

from megacore.tools.planner.parameters import parameters
from tests.build import run_of

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| `(\w+)`[^|]*\| ([\d.]+) ([MBT]) \| ([^|]*) \| [^|]* \| `([\w/]+)` \|", re.MULTILINE)
UNITS = {"M": 1e6, "B": 1e9, "T": 1e12}


def devices(hardware: str) -> int:
    """The number of devices in a cell such as `a node of 8 × 80 GB and up`; 1 if it gives none."""
    number = re.search(r"([\d,]+) ×", hardware)
    return int(number[1].replace(",", "")) if number else 1


def test_the_table_of_configs_is_right() -> None:
    page = (ROOT / "docs/training.md").read_text(encoding="utf-8").partition("## Configs")[2]
    rows = {name: row for name, *row in ROW.findall(page)}
    assert set(rows) == {path.stem for path in (ROOT / "configs").glob("*.json")}

    for name, (number, unit, hardware, corpus) in rows.items():
        config = run_of(ROOT / f"configs/{name}.json", world=devices(hardware))
        tolerance = 0.05 if float(number) < 10 else 0.5
        assert abs(float(number) - parameters(config) / UNITS[unit]) <= tolerance, name
        assert config.data.train == corpus, name
