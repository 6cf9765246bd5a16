"""Contenders in processes of their own: who cannot run is out with its own reason, and the others go on."""

import math

import pytest

from benchmarks.rounds import ROOT, Contender, race

SMALL = ("model.num_layers=1", "model.hidden_size=32", "model.vocab_size=64", "train.seq_len=16", "train.global_batch_size=8")


def test_a_race_goes_on_without_those_who_fail() -> None:
    """One library that does not run would end the comparison, or be left out without a word."""
    wrong = Contender("wrong", "megacore", 128, (*SMALL, "model.nonsense=1"))
    contenders = [wrong, Contender("no python", "megacore", 128, SMALL, python="false"), Contender("ours", "megacore", 128, SMALL)]
    result = race(contenders, str(ROOT / "benchmarks" / "speed.json"), 2, lambda line: None)
    assert "model.nonsense" in result.failures["wrong"] and result.failures["no python"].startswith("status 1")
    assert result.records.keys() == {"ours"}
    ours = result.records["ours"]
    assert len(ours.turns) == len(ours.others) == len(result.loads) == 2
    assert ours.losses == pytest.approx([math.log(64)] * 2, rel=0.05), "the model does not train on the batch it is said to"
