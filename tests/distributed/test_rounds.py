"""Contenders in processes of their own: who cannot run is out with its own reason, and the others go on."""

import math
import os
from typing import Any

import pytest
import torch

from benchmarks.peers import process
from benchmarks.peers.process import EQUAL, OWN, difference, expected
from benchmarks.rounds import ROOT, Contender, race
from tests.pool import Pool

SMALL = (
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.vocab_size=64",
    "train.seq_len=16",
    "train.global_batch_size=8",
)


States = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def states() -> States:
    """What a process of one thread has by itself, and with megacore's settings."""
    found = expected(1)
    assert found[OWN] != found[EQUAL], "on this machine megacore sets nothing, and nothing is tested here"
    return found


def test_a_race_goes_on_without_those_who_fail(states: States) -> None:
    """One library that does not run would end the comparison, or be left out without a word.

    megacore's own process has what peers are given for equal settings: it would be out here if they lacked
    something.
    """
    wrong = Contender("wrong", "megacore", 128, (*SMALL, "model.nonsense=1"))
    ours = Contender("ours", "megacore", 128, SMALL, process=states[EQUAL])
    contenders = [wrong, Contender("no python", "megacore", 128, SMALL, python="false"), ours]
    result = race(contenders, str(ROOT / "benchmarks" / "speed.json"), 2, lambda line: None)
    assert "model.nonsense" in result.failures["wrong"] and result.failures["no python"].startswith(
        "ended with status 1"
    )
    assert result.records.keys() == {"ours"}
    record = result.records["ours"]
    assert record.summary()["process"] == states[EQUAL] | {"train.compile": False}, (
        "nothing says what the run settled on"
    )
    assert len(record.turns) == len(record.others) == len(result.loads) == 2
    assert record.losses == pytest.approx([math.log(64)] * 2, rel=0.05), (
        "the model does not train on the batch it is said to"
    )


def test_a_contender_with_other_settings_than_it_must_have_is_out(
    monkeypatch: pytest.MonkeyPatch, states: States
) -> None:
    """Equal settings that do not reach a process, or that reach one which its users would not
    get, would make the ratio another.

    Both processes say what they have: one is set like megacore's; to the other that was not done, and nothing
    did it unasked.
    """
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # a minute of compiling, which this does not look at
    as_equal = Contender("equal", "plain-gpt-compiled", 128, SMALL, settings=EQUAL, process=states[EQUAL])
    not_set = Contender("not set", "plain-gpt-compiled", 128, SMALL, process=states[EQUAL])
    result = race([as_equal, not_set], str(ROOT / "benchmarks" / "speed.json"), 1, lambda line: None)
    assert result.failures == {"not set": difference(states[OWN], states[EQUAL])}
    assert result.records["equal"].summary()["process"] == states[EQUAL]
    assert result.records["equal"].losses == pytest.approx([math.log(64)], rel=0.05)


def state_without(missing: str) -> dict[str, Any]:
    """What a process has that should be like megacore's with one thread, where one function of
    megacore's settings did nothing.
    """
    os.environ.pop("OMP_NUM_THREADS", None)
    torch.set_num_threads(3)
    setattr(process, missing, lambda *_: None)  # the worker ends with the test
    process.equalise(local_world_size=10**6)  # of which each gets one thread
    return process.observed()


FAULTS = {
    "divide_cores": "threads",
    "multiply_with_onednn": "fp32 products",
    "keep_freed_memory": "keeps freed memory",
}


def test_one_missing_setting_is_noticed(states: States) -> None:
    """A ratio would then show what only one of the two has.

    Every setting is seen by what the process does, and named.
    """
    for function, name in FAULTS.items():
        workers = Pool()
        try:
            (found,) = workers.run(1, state_without, function)
        finally:
            workers.close()
        without = 3 if name == "threads" else states[OWN][name]
        wanted = states[EQUAL][name]
        expectation = (
            None
            if without == wanted
            else f"its process is not set as it should be: {name}: {without} in place of {wanted}"
        )
        assert difference(found, states[EQUAL]) == expectation
