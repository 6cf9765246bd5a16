"""Whether it computes what it should on a GPU: tests, and what the libraries were told."""

import os
import time
from collections import Counter
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from benchmarks import machine
from benchmarks.gpu.running import Rows
from benchmarks.rounds import ROOT
from megacore.config import Config
from megacore.tools.machine.gpu import environment
from megacore.tools.settings.load import load

TINY = str(ROOT / "configs/gpt_tiny.json")
SMALL = ("train.global_batch_size=4", "train.micro_batch_size=1", "train.seq_len=64", "model.vocab_size=515")
DRY = (
    "train.global_batch_size=2",
    "train.seq_len=16",
    "model.num_layers=1",
    "model.hidden_size=32",
    "train.compile=false",
)
PROCESSES = 6  # of tests: they compile more than they compute
# streams that are to run side by side; about so many cycles of a GPU's clock
QUEUES, MILLISECOND = 24, 2_000_000


def config_of(rows: Rows, *overrides: str) -> Config:
    """configs/gpt_tiny.json with little data on the device."""
    own = (*DRY, "train.device=cpu") if rows.dry else ("train.device=cuda", "train.precision=bf16")
    return load(TINY, [*SMALL, *own, *overrides], 1).config


# --- tests --------------------------------------------------------------------------------------------------


class Outcomes:
    """A plugin of pytest: a row for each test that fails, and one for each file."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.files: dict[str, Counter[str]] = {}
        self.why: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called for the set-up, the call and the end of every test."""
        file = self.files.setdefault(report.nodeid.split("::")[0], Counter())
        file["seconds"] += report.duration
        if report.failed:
            file["failing"] += 1
            text = report.longreprtext.strip()
            self.rows.add(
                test=report.nodeid, failed=text.splitlines()[-1] if text else report.when, report=text[-1500:]
            )
        elif report.skipped:
            file["skipped"] += 1
            self.why[report.nodeid.split("::")[0]] = str(
                report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
            )
        elif report.when == "call":
            file["passed"] += 1

    def pytest_collectreport(self, report: Any) -> None:
        """Called for every file."""
        if report.failed:
            self.rows.add(
                test=report.nodeid,
                failed=report.longreprtext.strip().splitlines()[-1],
                report=report.longreprtext[-1500:],
            )

    def pytest_sessionfinish(self) -> None:
        """Called at the end."""
        for name, found in self.files.items():
            counts = {key: int(found[key]) for key in ("passed", "failing", "skipped")}
            self.rows.add(
                test=name, **counts, seconds=float(found["seconds"]), skipped_because=self.why.get(name)
            )


def tests(rows: Rows, *files: str) -> None:
    """Some files of tests/gpu, several at a time where pytest-xdist is installed.

    Those that need a GPU skip themselves in a dry run.
    """
    several = ["-n", str(PROCESSES)] if find_spec("xdist") and not rows.dry else ["-p", "no:xdist"]
    arguments = [
        "-q",
        "-p",
        "no:cacheprovider",
        *several,
        *(str(ROOT / "tests/gpu" / file) for file in files),
    ]
    status = pytest.main(arguments, plugins=[Outcomes(rows)])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        rows.add(test="pytest", failed=f"{status!r}")


# --- the environment ----------------------------------------------------------------------------------------


def queues(rows: Rows) -> dict[str, Any]:
    """Kernels that hold a little for a while, each on a stream of its own: with too few
    queues some stand behind others.
    """
    cycles, streams = 50 * MILLISECOND, [torch.cuda.Stream() for _ in range(QUEUES)]

    def seconds(used: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for stream in streams[:used]:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    machine.measured_peak(torch.bfloat16, torch.device("cuda"), 0.5)  # the clock goes up
    one, all_of_them = seconds(1), seconds(QUEUES)
    found = {"one_ms": 1e3 * one, "together_ms": 1e3 * all_of_them, "streams": QUEUES}
    return found | ({"failed": f"{QUEUES} streams take turns"} if all_of_them > 1.8 * one else {})


def expandable() -> dict[str, Any]:
    """Whether the allocator's segments can grow."""
    kept = torch.empty(2**26, dtype=torch.uint8, device="cuda")
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["total_size"] >= kept.nbytes]
    grows = [bool(segment.get("is_expandable")) for segment in segments]
    return {"segments": len(grows), "expandable": sum(grows)} | (
        {} if grows and all(grows) else {"failed": "segments do not grow"}
    )


def environment_check(rows: Rows) -> None:
    """What the variables say, and whether CUDA and the allocator took them."""
    for name, value in environment(config_of(rows)).items():
        rows.add(name=name, wanted=value, found=os.environ.get(name))
    if rows.dry:
        return
    rows.attempt(lambda: queues(rows), name="queues")
    rows.attempt(expandable, name="segments")
    properties = torch.cuda.get_device_properties(0)
    rows.add(name="nccl", found=".".join(map(str, torch.cuda.nccl.version())))
    rows.add(
        name="device",
        found=f"{properties.name}, {properties.multi_processor_count} multiprocessors, CUDA "
        f"{torch.version.cuda}",
    )
