"""Numbers in files that people or other programs write: of 400 digits, none, or so small that
nothing can be divided by them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch import compare
from megacore.errors import ConfigError
from megacore.tools.planner.devices import read_cluster, read_device

WRONG: list[Any] = ["1", "x", [1], {}, True, -1, 10**400, 1e300, float("nan"), float("inf"), -1e-9]
TINY = 5e-324  # infinite as a divisor
LEVEL = {"link": "x", "ranks": None, "bytes_per_second": 1e9, "latency_seconds": 0.0}
DEVICE = {
    "name": "x",
    "peak_flops": {"bf16": 1e12},
    "memory_gib": 80,
    "memory_bytes_per_second": 1e12,
    "multiprocessors": 8,
    "power_watts": 9,
}
CLUSTER = {"name": "x", "levels": [LEVEL | {"ranks": 8}, LEVEL], "call_seconds": 1e-5}

DEVICES = [
    [],
    3,
    None,
    {},
    DEVICE | {"overlaps": "x"},
    DEVICE | {"name": 3},
    DEVICE | {"name": ""},
    DEVICE | {"peak_flops": {}},
]
DEVICES += [
    DEVICE | {key: value} for key in DEVICE if key not in ("name", "peak_flops") for value in [*WRONG, TINY]
]
DEVICES += [DEVICE | {"peak_flops": {"bf16": value}} for value in [*WRONG, TINY, None]]
CLUSTERS = [
    [],
    3,
    None,
    {},
    *(CLUSTER | {"levels": value} for value in (3, [], [3], None)),
    *(CLUSTER | {"call_seconds": v} for v in WRONG),
]
CLUSTERS += [
    CLUSTER | {"levels": [LEVEL | {"ranks": 8} | {key: value}, LEVEL]}
    for key in ("ranks", "bytes_per_second", "latency_seconds")
    for value in [*WRONG, None]
]
CLUSTERS += [CLUSTER | {"levels": [LEVEL | {"ranks": 8, "bytes_per_second": TINY}, LEVEL]}]
CLUSTERS += [
    CLUSTER | {"levels": [LEVEL | {"ranks": n} for n in ranks]}
    for ranks in ((8,), (8, 8, None), (8, 4, None), (None, None))
]


@pytest.mark.parametrize(
    ("read", "option", "wrong", "whole"),
    [(read_device, "--gpu", DEVICES, DEVICE), (read_cluster, "--cluster", CLUSTERS, CLUSTER)],
)
def test_a_device_or_cluster_file(
    read: Callable[[str], Any], option: str, wrong: list[Any], whole: Any, tmp_path: Path
) -> None:
    """A traceback, or a prediction of infinitely many seconds."""
    path = tmp_path / "file.json"
    what = read.__name__.removeprefix("read_")
    for content in wrong:
        path.write_text(json.dumps(content))
        with pytest.raises(
            ConfigError,
            match=rf"^config error: {option}: \S+ is no {what} file: .*as in megacore/tools/planner/{what}s",
        ):
            read(str(path))
    path.write_text(json.dumps(whole))
    assert read(str(path)).name == "x"


def test_what_a_stranger_wrote_moves_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A terminal obeyed escape sequences in the name of a run, and of a key in its config."""
    figures = dict.fromkeys(("loss", "grad_norm", "tokens_per_second", "step_seconds"), 1.0)
    record = figures | {"step": 1, "mfu": None} | dict.fromkeys(("tokens", "memory_bytes", "skipped"), 1)
    folders = [tmp_path / name for name in ("a", "b\x1b[31m\n")]
    for folder in folders:
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        (folder / "config.json").write_text(json.dumps({"log": {"\x1b[31m": folder.name}}))
    compare.run(list(map(str, folders)))
    said = capsys.readouterr().out
    assert "\x1b" not in said and said.count("\\x1b[31m") >= 2
