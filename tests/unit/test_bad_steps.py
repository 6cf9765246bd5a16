"""Steps that are not taken: what is called a spike, how many are too many, whose step time stands out."""

import numpy as np
import pytest
import torch

from megacore.distributed.events import Slow
from megacore.engine.spike_detector import ENOUGH, LEAST, SCALE, WINDOW, SpikeGuard
from megacore.tools.diagnosis.stragglers import Stragglers, outliers
from megacore.train.recovery import Skips, TooManySkips
from megacore.train.step import StepResult

CPU = torch.device("cpu")


def judged(norms: list[float], threshold: float = 6.0) -> tuple[list[bool], SpikeGuard]:
    guard = SpikeGuard(threshold, CPU)
    found = []
    for norm in norms:
        value = torch.tensor(norm, dtype=torch.float64)
        refused = guard.is_spike(value) | ~value.isfinite()
        guard.remember(value, refused)
        found.append(bool(refused))
    return found, guard


def plainly(norms: list[float], threshold: float = 6.0) -> list[bool]:
    """The same rule in NumPy, over lists."""
    taken: list[float] = []
    found = []
    for norm in norms:
        recent = np.sort(taken[-WINDOW:])
        spike = not np.isfinite(norm)
        if len(recent) and len(taken) >= ENOUGH:
            median = recent[(len(recent) - 1) // 2]
            deviation = max(SCALE * np.sort(np.abs(recent - median))[(len(recent) - 1) // 2], LEAST * median)
            spike = spike or norm > median + threshold * deviation
        found.append(bool(spike))
        if not spike:
            taken.append(norm)
    return found


def test_spikes_are_those_of_the_plain_rule() -> None:
    rng = np.random.default_rng(0)
    norms = np.exp(rng.normal(0, 0.2, 400)) * np.linspace(3, 1, 400)
    norms[[5, 60, 61, 62, 200, 390]] *= 20  # the first before enough is known
    norms[[7, 120]] = [np.nan, np.inf]
    found, guard = judged(norms.tolist())
    assert found == plainly(norms.tolist())
    assert {i for i, spike in enumerate(found) if spike} >= {7, 60, 61, 62, 120, 200, 390}, (
        "a burst raises no bar for itself"
    )
    assert sum(found) < 12, "and what varies as ever is taken"
    again = SpikeGuard(6.0, CPU)
    again.load_state(guard.state())
    assert again.state() == guard.state() and len(guard.state()) == WINDOW
    high = torch.tensor(30.0, dtype=torch.float64)
    assert again.is_spike(high) and guard.is_spike(high), "a resumed run must decide as the one that went on"


@pytest.mark.parametrize("steps", [5, ENOUGH, WINDOW - 1, WINDOW, WINDOW + 40])
def test_a_resumed_guard_forgets_and_decides_as_the_one_that_went_on(steps: int) -> None:
    """Norms that come back in another order, or a wrong count of them: the resumed run forgets
    others, or judges before it may.
    """
    norms = np.linspace(2, 1, WINDOW + 100)
    norms[::7] += 0.3
    _, guard = judged(norms[:steps].tolist())
    again = SpikeGuard(6.0, CPU)
    again.load_state(guard.state())
    for norm in [*norms[steps : steps + 60], 50.0]:
        value = torch.tensor(norm, dtype=torch.float64)
        found = [g.is_spike(value) for g in (guard, again)]
        assert found[0] == found[1], norm
        for g in (guard, again):
            g.remember(value, found[0])
        assert again.state() == guard.state()


def test_equal_norms_make_no_spike_of_the_next() -> None:
    """Their deviation is 0: without a least one, a norm a billionth larger would be skipped."""
    found, _ = judged([1.0] * 40 + [1.0 + 1e-9, 1.02, 3.0])
    assert found[40:] == [False, False, True]


def result(step: int, skipped: float) -> StepResult[float]:
    return StepResult(step, lr=0.0, loss=1.0, grad_norm=1.0, skipped_so_far=skipped, flags={}, losses={})


def test_too_many_skips_in_a_row_go_back_and_then_fail() -> None:
    skips = Skips(limit=3, max_rollbacks=1)
    skips.restore(skipped=5.0, rollbacks=0)
    assert [
        skips.count(result(step, count)) for step, count in [(1, 5), (2, 6), (3, 7), (4, 7), (5, 8), (6, 9)]
    ] == [
        False,
        True,
        True,
        False,
        True,
        True,
    ]
    assert not skips.are_too_many, "never three in a row"
    skips.count(result(7, 10))
    assert skips.are_too_many
    skips.count_rollback()
    for count in (11, 12, 13):
        assert not skips.are_too_many, "it counts anew"
        skips.count(result(8, count))
    with pytest.raises(TooManySkips, match="3 steps in a row"):
        skips.count_rollback()


def test_stragglers_stand_out_from_the_median() -> None:
    assert outliers([0.2, 0.2, 0.9, 0.2], 1.0) == {2: Slow(0.9, 0.2)}
    assert outliers([0.2, 0.21, 0.39, 0.2], 1.0) == {}, "less than twice the median"
    assert outliers([0.001, 0.001, 0.02, 0.001], 1.0) == {}, (
        "twenty times the median, and nothing beside the step"
    )
    stragglers = Stragglers()
    slow, even = [0.2, 0.9, 0.2, 0.2], [0.2] * 4
    assert [list(stragglers.named(own, even, 1.0)) for own in (slow, slow, even, slow, slow, slow, slow)] == [
        [],
        [],
        [],
        [],
        [],
        [1],
        [1],
    ]


def test_a_slow_device_stands_out_among_those_of_its_stage() -> None:
    """Hosts only enqueue, so all look alike; another stage has other layers, and its devices other times."""
    hosts, fast, slow = [0.1] * 8, [0.5] * 4, [0.9, 0.9, 1.1, 0.9]
    stragglers = Stragglers(stages=2)
    assert [stragglers.named(hosts, fast + slow, 1.2) for _ in range(3)] == [
        {},
        {},
        {6: Slow(1.1, 0.9, "device")},
    ]
    assert not Stragglers(stages=2).named(hosts, [*fast, 0.9, 0.9, 1.0, 0.9], 1.2), "as much as devices vary"
    assert not any(Stragglers(stages=1).named(hosts, [0.0] * 8, 1.2) for _ in range(3)), "CPUs report none"
