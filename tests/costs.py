"""What tests cost: seconds of processors, of a test's own process and of all that
it starts, by file and by test.

python -m pytest --costs 30          after the tests, the 30 files and the 30 tests that cost most
python -m pytest --write-slow        writes into tests/slow.txt which tests take long: `--quick` leaves them
    out

Not wall time, which says more about who else is on the machine. Workers are counted for the test that first
needs them.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

SLOW = Path(__file__).with_name("slow.txt")
SECONDS = 0.3  # what a test is slow from; one with many parameters by their mean
TICKS = os.sysconf("SC_CLK_TCK")


def spent() -> float:
    """Seconds that this process has computed, with those below it, and with those that
    they have waited for.
    """
    parents, ticks = {}, {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path("/proc", name, "stat").read_text(errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended since
        parents[int(name)], ticks[int(name)] = int(words[1]), sum(map(int, words[11:15]))
    ours, total = {os.getpid()}, 0
    while ours:
        total += sum(ticks[pid] for pid in ours)
        ours = {pid for pid, parent in parents.items() if parent in ours}
    return total / TICKS


def function_of(test: str) -> str:
    """The test of a node's name, whatever its parameters."""
    return test.partition("[")[0]


class Costs:
    """Notes in every test's last report what it has cost, where tests run; counts together and
    prints, where they are reported.
    """

    def __init__(self, shown: int, write: bool) -> None:
        self.shown, self.write, self.before = shown, write, spent()
        self.tests, self.wall = Counter[str](), Counter[str]()

    def pytest_collection_finish(self) -> None:
        """What it took to find the tests is no test's."""
        self.before = spent()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        """Of fixtures' ends too, and of whatever still goes on behind the test before."""
        report = yield
        if call.when == "teardown":
            now = spent()
            report.user_properties.append(("seconds", now - self.before))
            self.before = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One of setup, call and end of a test."""
        self.wall[report.nodeid] += report.duration
        self.tests[report.nodeid] += sum(
            value for name, value in report.user_properties if name == "seconds" and report.when == "teardown"
        )

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The tables."""
        functions, files = summed(self.tests, function_of), summed(self.tests, file_of)
        for name, costs, key in (("files", files, file_of), ("tests", functions, function_of)):
            wall = summed(self.wall, key)
            terminalreporter.write_sep("=", f"costliest {name}: seconds of processors, seconds on the clock")
            for node, seconds in costs.most_common(self.shown):
                terminalreporter.write_line(f"{seconds:8.1f} {wall[node]:8.1f}  {node}")
        terminalreporter.write_line(f"{sum(files.values()):8.1f} {sum(self.wall.values()):8.1f}  in all")
        if self.write:
            write(functions, Counter(map(function_of, self.tests)))


def file_of(test: str) -> str:
    """The file of a node's name."""
    return test.partition("::")[0]


def summed(costs: Counter[str], key: Any) -> Counter[str]:
    """Costs of what has one key, together."""
    total = Counter[str]()
    for test, seconds in costs.items():
        total[key(test)] += seconds
    return total


def slow() -> set[str]:
    """The tests that take long, by their names without parameters."""
    return set(SLOW.read_text(encoding="utf-8").split())


def write(functions: Counter[str], cases: Counter[str]) -> None:
    """Notes which of these tests are slow; of others it stays as it was noted."""
    found = {test for test in slow() if test not in functions}
    found |= {test for test, seconds in functions.items() if seconds >= SECONDS * cases[test]}
    SLOW.write_text("".join(f"{test}\n" for test in sorted(found)), encoding="utf-8")
