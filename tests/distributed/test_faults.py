"""Faults of the catalogue are caught, by the check and in the words that tests/faults/README.md says;
the checks are silent without.
"""

from collections.abc import Iterator

import pytest

from tests.faults.checks import FAULTS, ROOT, Checks, document


@pytest.fixture(scope="module")
def checks() -> Iterator[Checks]:
    checks = Checks()
    yield checks
    checks.close()


# A fifth of them, those that are quick, of compression, races and of 16 bits: all take
# `python -m tests.faults` some minutes.
SPECIAL = ("tests.faults.compression", "tests.faults.precision", "tests.faults.races")
SOME = [
    fault
    for i, fault in enumerate(FAULTS)
    if fault.check != "verify" or fault.plant.__module__ in SPECIAL or i % 5 == 0
]


@pytest.mark.parametrize("fault", SOME, ids=lambda fault: fault.name)
def test_fault_is_caught(checks: Checks, fault: object) -> None:
    assert checks.run(fault) == fault.found  # type: ignore[arg-type, attr-defined]


def test_the_same_checks_are_silent_without_faults(checks: Checks) -> None:
    """One that always spoke would catch everything and prove nothing."""
    cases = {fault.case: fault for fault in SOME}
    assert [checks.run(fault, as_it_is=True) for fault in cases.values()] == [""] * len(cases)


def test_the_table_in_the_docs_is_this_catalogue() -> None:
    assert (ROOT / "tests/faults/README.md").read_text(encoding="utf-8") == document()
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20
