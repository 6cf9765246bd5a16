"""The sentences of a proof's report: each is true for what was compared."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacore.distributed.shard import Shard
from megacore.tools.verify.compare import Difference, Records, against_reference, rank_by_rank
from megacore.tools.verify.layouts import parse
from megacore.tools.verify.proof_report import explain, verdict
from megacore.tools.verify.record import ProofRecord
from megacore.tools.verify.run import Proof, Result
from megacore.tools.verify.tolerances import BOUND, LARGEST_BOUND, Bounds


def report(*differences: Difference) -> list[str]:
    return list(explain(Result(parse("tp2"), beyond=list(differences))))


def recorded(folder: Path, tensors: dict[str, torch.Tensor]) -> Records:
    folder.mkdir()
    record = ProofRecord(folder)
    for key, tensor in tensors.items():
        kind, _, name = key.partition("|")
        record.tensors(kind, {name: (tensor, Shard(tuple(tensor.shape)))})
    record.figures(1, 2.0, 1.0)
    record.close()
    return Records(folder, 1)


def first_difference(layout: Records, reference: Records) -> Difference:
    return max(against_reference(layout, reference), key=lambda difference: difference.relative)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("lion_m", "every gradient and the norm agree; the optimizer state lion_m does not: first w"),
        ("own lion_m", "the optimizer state lion_m does not follow from the gradients: first w"),
        ("own average", "the optimizer state average does not follow from the gradients: first w"),
        ("a_custom_state", "every gradient and the norm agree; the optimizer state a_custom_state does not"),
    ],
)
def test_a_state_that_differs_is_not_called_missing(state: str, words: str) -> None:
    first, second = report(Difference(state, 2, "w", 1, 0.5))
    assert (
        first.startswith(f"tp2: {words}")
        and second == f"  {state} of w, step 2 is 5.0e-01 off, most on rank 1"
    )


def test_a_state_is_computed_before_the_update_that_takes_it() -> None:
    """A wrong momentum makes a wrong update, which the report named as the first difference."""
    order = ["gradient", "own lion_m", "lion_m", "own parameter", "parameter", "average", "buffer"]
    moments = [Difference(kind, 1, "w", 0, 1.0).moment for kind in order]
    assert moments == sorted(moments) and len(set(moments)) == len(moments)


def test_what_only_one_side_has_is_told_from_what_is_not_finite(tmp_path: Path) -> None:
    """Each is an infinite difference, and each has another cause."""
    ones = torch.ones(2, dtype=torch.float64)
    usual = recorded(tmp_path / "usual", {"gradient 1|w": ones, "average 1|w": ones})
    less = recorded(tmp_path / "less", {"gradient 1|w": ones})
    reshaped = recorded(tmp_path / "reshaped", {"gradient 1|w": ones, "average 1|w": torch.ones(3).double()})
    infinite = recorded(tmp_path / "infinite", {"gradient 1|w": ones, "average 1|w": ones * math.inf})
    for layout, words in (
        (first_difference(usual, less), "average of w, step 1 exists only in the layout"),
        (first_difference(reshaped, usual), "average of w, step 1 has another shape in the layout"),
    ):
        assert layout.relative == math.inf and report(layout)[0] == f"tp2: {words}"
    by_rank = max(rank_by_rank(less, usual), key=lambda difference: difference.relative)
    assert report(by_rank)[0] == "tp2: average of w, step 1 does not exist in the layout"
    not_finite = report(first_difference(infinite, usual))
    assert not_finite[0] == "tp2: every update agrees; the average of the weights does not: first w"
    assert not_finite[1].startswith("  average of w, step 1 is not finite")


def test_a_loss_that_a_rank_lacks_is_told_from_one_that_is_not_a_number(tmp_path: Path) -> None:
    reference = recorded(tmp_path / "reference", {})
    for value, words in ((None, "loss, step 1 does not exist in the layout"), (math.nan, "every activation")):
        layout = recorded(tmp_path / str(value), {})
        layout.figures[0]["1"].pop("loss")
        if value is not None:
            layout.figures[0]["1"]["loss"] = value
        assert report(first_difference(layout, reference))[0].startswith(f"tp2: {words}")


def difference(relative: float, kind: str = "gradient", step: int = 1) -> Difference:
    return Difference(kind, step, "loss" if kind == "figure" else "w", 0, relative)


def test_the_bound_is_the_condition_s_between_1e_9_and_1e_7() -> None:
    """A measured condition must neither sharpen the bound nor let through what is larger than 1e-7."""
    bounds = Bounds("fp64", 4, {"w": 1}, {})
    assert bounds.of(difference(0.0)) == BOUND == 1e-9
    for change, bound in ((1e-15, 1e-9), (1e-10, 32e-10), (1e-3, 1e-7)):
        bounds.take_condition([difference(change)])
        assert bounds.of(difference(0.0)) == pytest.approx(bound)
        assert bounds.is_rounding(difference(31 * change)) and not bounds.is_rounding(
            difference(1.1 * 32 * change + 1e-9)
        )
    assert bounds.of(difference(0.0)) == LARGEST_BOUND


def test_only_what_comes_before_explains_a_difference() -> None:
    """A gradient cannot be off because of a state that is computed from it."""
    bounds = Bounds("fp64", 4, {"w": 1}, {})
    bounds.take_condition(
        [difference(1e-9, "soap_ql"), difference(math.inf, "gradient"), difference(1.0, step=0)]
    )
    assert bounds.of(difference(0.0)) == BOUND, "before it, and what is not finite explains nothing"
    assert (
        bounds.of(difference(0.0, "parameter")) == bounds.of(difference(0.0, step=2)) == pytest.approx(32e-9)
    )
    assert bounds.of(difference(0.0, "figure")) == pytest.approx(32e-9)
    assert bounds.of(difference(0.0, "parameter", step=0)) == BOUND, "first weights are compared as they are"


def result(relative: float, **fields: Any) -> Result:
    found = difference(relative)
    return Result(parse("tp2"), {("gradient", 1, "w"): found}, **fields)


def test_the_verdict_prints_the_largest_difference_and_its_bound() -> None:
    bounds = Bounds("fp64", 4, {"w": 1}, {})
    options: Any = SimpleNamespace(against=None, precision="fp64")
    assert verdict(Proof(options, ["w"], [result(1e-15)], bounds=bounds)).endswith(
        "largest relative difference 1.0e-15 (gradient of w, step 1, tp2), bound 1e-09"
    )
    bounds.take_condition([difference(1e-10)])
    text = verdict(Proof(options, ["w"], [result(2e-9)], bounds=bounds))
    assert text.startswith("EQUAL") and "2.0e-09 (gradient of w" in text
    assert (
        "bound 3.2e-09: one unit in the last place of the first weights changes this model by 1.0e-10" in text
    )
    bounds.take_condition([difference(1e-6)])
    magnified = result(2e-5, beyond=[difference(2e-5)], is_magnified=True)
    proof = Proof(options, ["w"], [result(1e-15), magnified], bounds=bounds)
    assert not proof.holds and verdict(proof).startswith("NOT PROVED: tp2 (1 of 2 layouts equal): largest")
    wrong = result(1.0, beyond=[difference(1.0)])
    assert verdict(Proof(options, ["w"], [wrong, magnified], bounds=bounds)).startswith("NOT EQUAL: tp2, tp2")
