"""MoE models with latent attention do not depend on the layout; `tests/equal.py` has the table."""

from pathlib import Path

import pytest

from megacore.tools.verify.workers import ProofWorkers
from tests.equal import LATENT_ATTENTION, Fault, Row, cases, check


@pytest.mark.parametrize(("row", "fault"), cases(LATENT_ATTENTION))
def test_equals_one_process(workers: ProofWorkers, tmp_path: Path, row: Row, fault: Fault | None) -> None:
    """A mistake in a layout makes a user's model a little worse, and its loss curve does not show it."""
    check(row, fault, workers, tmp_path)
