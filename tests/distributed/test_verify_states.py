"""Proofs of every optimizer with one wrong state: the report says which state, and nothing that is false."""

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import pytest

from megacore.files import ROOT
from megacore.optimizers.rule import AVERAGE, RULES
from megacore.tools.verify.layouts import parse
from megacore.tools.verify.proof_report import explain
from megacore.tools.verify.run import Options, prove
from megacore.tools.verify.workers import ProofWorkers
from tests.commands import provers

TINY = str(ROOT / "configs/gpt_tiny.json")
SMALL = ("model.num_layers=1", "train.global_batch_size=4", "train.micro_batch_size=2")
# The words of the report for states that it knows; all others have the same sentence.
KNOWN = {
    "adam_m": "every gradient and the norm agree; the first moments (clipping, decay rates) do not: first ",
    "adam_v": "every gradient, the norm and the first moments agree; the second moments do not: first ",
    "momentum": "every gradient and the norm agree; the momentum (clipping, momentum) does not: first ",
    AVERAGE: "every update agrees; the average of the weights does not: first ",
}
CASES = [
    (rule.name, state)
    for rule in RULES.values()
    for state in (
        *rule.kinds,
        *rule.numbers,
        *(rule(rule.settings_type()).own_state((1, 4, 4)) if rule.whole else ()),
    )
]
EMA = ("adamw", f"{AVERAGE} of optim.ema")


@pytest.fixture(scope="module")
def workers() -> Iterator[ProofWorkers]:
    with provers() as workers:
        yield workers


def wrong_after_first_step(state: str) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A plant: a state of one parameter is off by 1 in 1000 after the first update."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        from megacore.train.step import TrainStep

        update = TrainStep.update

        def wrong(self: TrainStep, number: int, *sums):  # type: ignore[no-untyped-def]
            result = update(self, number, *sums)
            if number == 1:
                tensors = self.engine.tensors()
                name = next(name for name in tensors if name.startswith(f"{state}/"))
                tensors[name][0].mul_(1.001)
                self.engine.load_state(self.engine.state(), tensors)
            return result

        with mock.patch.object(TrainStep, "update", wrong):
            yield

    return plant


for _, _state in CASES:
    globals()[f"wrong_{_state}"] = wrong_after_first_step(_state)


@pytest.mark.parametrize(("rule", "state"), [*CASES, EMA], ids="-".join)
def test_a_wrong_state_is_reported_as_what_it_is(rule: str, state: str, workers: ProofWorkers) -> None:
    """For all but a few states the report said that the other side does not have them."""
    overrides, state = [f"optim.kind={rule}", *SMALL], state.partition(" ")[0]
    if (rule, state) == ("adamw", AVERAGE):
        overrides.append("optim.ema=0.9")
    options = Options(TINY, overrides, [parse("one")], plant=f"{__name__}:wrong_{state}")
    result = prove(options, workers=workers).results[0]
    first, *differences = explain(result)
    usual = f"every gradient and the norm agree; the optimizer state {state} does not: first "
    name = result.beyond[0].name
    assert first == f"one: {KNOWN.get(state, usual)}{name}", (first, differences)
    assert differences[0].startswith(f"  {state} of {name}, step 1 is 1.0e-03 off"), differences
