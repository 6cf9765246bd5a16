"""Runs over the strict wire, `tests/strict`: what it forbids, the layouts that hold, and the mistakes
that it finds and gloo does not.

`python -m tests.strict` runs all layouts and mistakes; tests/strict/README.md has what it found.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.strict import Rules, plants, probes
from tests.strict.cases import CASES, EVERY_TIME
from tests.strict.plants import PLANTS, Plant
from tests.strict.report import FOUND
from tests.strict.runs import Case, Runs

QUICK = Rules(seed=1, patience=5.0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(tmp_path_factory.mktemp("strict"))
    yield runs
    runs.close()


def test_what_is_allowed_gives_what_gloo_gives(runs: Runs) -> None:
    """Every operation; results are poison before their wait, and an input that is changed while under
    way is read as late as may be.
    """
    found, over_gloo = (runs.pool.run(2, probes.probe, probes.right, rules) for rules in (QUICK, None))
    assert found == over_gloo
    assert runs.pool.run(2, probes.probe, probes.poisoned, QUICK) == [(True, 11.0, True, 11)] * 2
    assert runs.pool.run(2, probes.probe, probes.changed, QUICK) == [0.0, 0.0]


DISAGREEMENTS = [
    (probes.other_sizes, "differing in count"),
    (probes.other_dtypes, "differing in dtype"),
    (probes.other_lines, "differing in line"),
    (probes.alone, "waits in vain"),
]


@pytest.mark.parametrize(("program", "said"), DISAGREEMENTS, ids=lambda x: getattr(x, "__name__", ""))
def test_ranks_that_disagree_are_told(runs: Runs, program: Any, said: str) -> None:
    """With both sides named, where there are two."""
    answers = runs.pool.run(2, probes.probe, program, QUICK)
    assert any(isinstance(answer, str) and said in answer for answer in answers), answers


def test_what_is_posted_ahead_holds_up_a_queue(runs: Runs) -> None:
    """A program that two streams run, and one hardware queue does not."""
    assert runs.pool.run(2, probes.probe, probes.ahead, QUICK)[0] == 40.0
    assert (
        "waits in vain" in runs.pool.run(2, probes.probe, probes.ahead, Rules(1, queues=1, patience=2.0))[0]
    )


@pytest.mark.parametrize("case", [CASES[i] for i in EVERY_TIME], ids=lambda case: case.name)
def test_a_layout_holds(runs: Runs, case: Case) -> None:
    """Three steps with a validation after each, and a checkpoint that is written while
    training goes on: as on one process.
    """
    at = CASES.index(case)
    assert runs.verdict(case, Rules(seed=at, queues=(None, 8, 1)[at % 3], pairs=at % 2 == 0)) == ""


# The last is one that neither a proof nor gloo shows: a proof reads all tensors before it validates.
PLANTED_EVERY_TIME = [
    plant
    for plant in PLANTS
    if plant.function in (plants.missing_wait, plants.buffer_reused, plants.gather_before_evaluation)
]


@pytest.mark.parametrize("plant", PLANTED_EVERY_TIME, ids=lambda plant: plant.function.__name__)
def test_a_mistake_is_found(runs: Runs, plant: Plant) -> None:
    assert plant.found in runs.verdict(plant.case, plant.rules, plant.path)


def test_what_was_found_is_of_these_layouts_and_mistakes() -> None:
    """`python -m tests.strict --write` renews it."""
    record = json.loads(FOUND.read_text(encoding="utf-8"))
    assert record["layouts"] == {case.name: [""] * 3 for case in CASES}
    assert record["mistakes"].keys() == {plant.mistake for plant in PLANTS}
    for plant in PLANTS:
        assert plant.found in record["mistakes"][plant.mistake]["strict"]
