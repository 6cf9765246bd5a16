"""Schedules as data: complete, free of deadlock, and timed as published."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megacore.plan import validate as validate_module
from megacore.plan.schedule import GENERATORS, Action, Op, Plan, build, forward_only, looped, lower
from megacore.plan.simulate import COMPUTE, peak_live, simulate
from megacore.plan.validate import validate

SIZES = [(1, 1), (1, 5), (2, 1), (2, 4), (3, 7), (4, 2), (4, 8), (8, 3), (8, 16)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("name", GENERATORS)
def test_every_schedule_is_valid(name: str, stages: int, microbatches: int, tied: bool) -> None:
    """A schedule that loses a microbatch, mismatches a transfer or hangs would be accepted into training."""
    validate(build(name, stages, microbatches, tied=tied), microbatches)


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_validation_plan_is_valid(stages: int, microbatches: int) -> None:
    """The forward-only plan would hang, or would carry a backward."""
    validate(forward_only(looped(stages), microbatches), microbatches, forward_only=True)
    with pytest.raises(ValueError, match="backward of microbatch 0: is missing"):
        validate(forward_only(looped(1), 1), 1)


def edit(plan: Plan, stage: int, change: Callable[[list[Action]], object]) -> Plan:
    """`plan` with the actions of one stage changed in place."""
    actions = [list(own) for own in plan.actions]
    change(actions[stage])
    return Plan(tuple(tuple(own) for own in actions), plan.placement)


def find(actions: list[Action], op: Op, microbatch: int = -1) -> int:
    return next(i for i, a in enumerate(actions) if (a.op, a.microbatch) == (op, microbatch))


def swap(actions: list[Action], op: Op, first: int, second: int) -> None:
    """Exchanges the actions of two microbatches."""
    i, j = find(actions, op, first), find(actions, op, second)
    actions[i], actions[j] = actions[j], actions[i]


def to_front(actions: list[Action], op: Op, microbatch: int = -1) -> None:
    actions.insert(0, actions.pop(find(actions, op, microbatch)))


def change(actions: list[Action], op: Op, microbatch: int, **fields: Any) -> None:
    i = find(actions, op, microbatch)
    actions[i] = replace(actions[i], **fields)


FAULTS: dict[str, tuple[int, Callable[[list[Action]], object], str]] = {
    "a lost forward": (1, lambda a: a.pop(find(a, Op.FORWARD, 3)), "pp rank 1, forward of microbatch 3: is missing"),
    "a forward twice": (1, lambda a: a.append(Action(Op.FORWARD, 3, 0)), "pp rank 1, forward of microbatch 3: done 2 times"),
    "a lost backward": (0, lambda a: a.pop(find(a, Op.BACKWARD, 0)), "pp rank 0, backward of microbatch 0: is missing"),
    "a microbatch too many": (3, lambda a: a.append(Action(Op.FORWARD, 8, 0)), "pp rank 3, forward of microbatch 8: has no place"),
    "backward first": (3, lambda a: to_front(a, Op.BACKWARD, 2), "pp rank 3, backward of microbatch 2: comes before its forward"),
    "a receive too late": (2, lambda a: to_front(a, Op.FORWARD, 0), "pp rank 2, forward of microbatch 0: comes before its recv_activation"),
    "a send too early": (2, lambda a: to_front(a, Op.SEND_GRADIENT, 1), "send_gradient of microbatch 1: comes before its backward"),
    "a lost send": (1, lambda a: a.pop(find(a, Op.SEND_ACTIVATION, 5)), "pp rank 1, send_activation of microbatch 5: is missing"),
    "a send elsewhere": (1, lambda a: change(a, Op.SEND_ACTIVATION, 5, peer=3), "pp rank 1, send_activation of microbatch 5: has no place"),
    "receives out of order": (1, lambda a: swap(a, Op.RECV_ACTIVATION, 0, 1), "comes before its recv_activation"),
    "last too early": (0, lambda a: change(a, Op.BACKWARD, 3, last=True), "pp rank 0, backward of microbatch 3: `last`"),
    "last forgotten": (0, lambda a: change(a, Op.BACKWARD, 7, last=False), "pp rank 0, backward of microbatch 7: `last`"),
    "no reduction": (2, lambda a: a.remove(Action(Op.REDUCE_GRADIENTS)), "pp rank 2, reduce_gradients: done 0 times"),
    "reduced twice": (2, lambda a: a.append(Action(Op.REDUCE_GRADIENTS)), "pp rank 2, reduce_gradients: done 2 times"),
    "reduced too early": (2, lambda a: to_front(a, Op.REDUCE_GRADIENTS), "pp rank 2, reduce_gradients: comes before 8 backwards"),
    "tied on a middle stage": (2, lambda a: a.append(Action(Op.REDUCE_TIED)), "reduce_tied: is between the first and the last stage"),
    "tied on one side": (3, lambda a: a.remove(Action(Op.REDUCE_TIED)), "reduce_tied: is between the first and the last stage"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_named(fault: str) -> None:
    """Validation that lets one of these through would let a schedule train on wrong gradients."""
    stage, spoil, message = FAULTS[fault]
    with pytest.raises(ValueError) as error:
        validate(edit(build("1f1b", 4, 8, tied=True), stage, spoil), 8)
    assert message in str(error.value)


def test_messages_must_arrive_in_the_order_sent() -> None:
    """NCCL pairs messages by order alone: two stages that disagree about it would silently exchange their contents."""
    first = tuple(Action(Op.FORWARD, m, 0) for m in (0, 1)) + tuple(Action(Op.BACKWARD, m, 0) for m in (0, 1))
    second = tuple(Action(Op.FORWARD, m, 0) for m in (1, 0)) + tuple(Action(Op.BACKWARD, m, 0) for m in (0, 1))
    plan = lower(Plan((first, second), looped(2)))
    with pytest.raises(ValueError, match="pp rank 1, recv_activation of microbatch 1: pp rank 0 does send_activation of microbatch 0"):
        validate(plan, 2)


def test_a_stage_that_runs_ahead_of_its_neighbour_deadlocks() -> None:
    """Stage 1 wants both forwards first, stage 0 a gradient between them: each waits for the other."""
    forward = [Action(Op.FORWARD, m, 0) for m in range(2)]
    backward = [Action(Op.BACKWARD, m, 0) for m in range(2)]
    plan = lower(Plan(((forward[0], backward[0], forward[1], backward[1]), (*forward, *backward)), looped(2)))
    with pytest.raises(ValueError, match="deadlock: pp rank 0 waits in .*recv_gradient of microbatch 0; pp rank 1 waits"):
        validate(plan, 2)
    with pytest.raises(ValueError, match="deadlock"):
        simulate(plan, [1, 1], [2, 2])


def test_only_batches_save_1f1b_from_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the check ignored rendezvous, it would not notice that single blocking transfers hang in 1F1B's steady state."""
    plan = build("1f1b", 4, 8)
    validate(plan, 8)
    monkeypatch.setattr(validate_module, "in_batches", lambda actions: [[action] for action in actions])
    with pytest.raises(ValueError, match="deadlock"):
        validate(plan, 8)


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("name", GENERATORS)
def test_bubble_and_activations_of_equal_stages(name: str, stages: int, microbatches: int) -> None:
    """Bubble (p - 1) / (m + p - 1); activations: all of GPipe's, min(p - i, m) under 1F1B. Else the schedule is another one."""
    timeline = simulate(build(name, stages, microbatches), [1.0] * stages, [2.0] * stages)
    assert timeline.bubble_rate == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert timeline.makespan == pytest.approx(3 * (microbatches + stages - 1))
    peaks = {"gpipe": [microbatches] * stages, "1f1b": [min(stages - i, microbatches) for i in range(stages)]}
    assert peak_live(timeline.plan) == peak_live(build(name, stages, microbatches)) == peaks[name]


# Qi et al. 2023, Zero Bubble Pipeline Parallelism, tables 5 and 9: 8 stages, milliseconds, backward without and of weights.
PUBLISHED = [
    (24, 18.522, 18.086, 9.337, 0.601, 0.2431),
    (64, 18.546, 18.097, 9.321, 0.762, 0.1240),
    (32, 29.802, 29.428, 19.530, 0.577, 0.1898),
]


@pytest.mark.parametrize(("microbatches", "forward", "backward", "weight", "transfer", "rate"), PUBLISHED)
def test_published_bubble_rates(microbatches: int, forward: float, backward: float, weight: float, transfer: float, rate: float) -> None:
    """The simulator would time transfers, or define the bubble, differently from the literature."""
    plan = build("1f1b", 8, microbatches)
    assert simulate(plan, [forward] * 8, [backward + weight] * 8, transfer).bubble_rate == pytest.approx(rate, abs=1e-4)
    assert simulate(plan, [forward] * 8, [backward + weight] * 8).bubble_rate != pytest.approx(rate, abs=1e-3)


@pytest.mark.parametrize("name", GENERATORS)
def test_uneven_stages_against_the_recurrence(name: str) -> None:
    """Starts and ends would not follow from what each action waits for: its stage, and its neighbour's message."""
    stages, microbatches, transfer = 4, 6, 0.3
    rng = random.Random(0)
    cost = {op: [rng.uniform(0.5, 2.0) for _ in range(stages)] for op in COMPUTE}
    order = [[(a.op, a.microbatch) for a in actions] for actions in GENERATORS[name](stages, microbatches, 1).actions]

    def end(stage: int, op: Op, m: int) -> float:
        at = order[stage].index((op, m))
        ready = end(stage, *order[stage][at - 1]) if at else 0.0
        neighbour = stage - 1 if op is Op.FORWARD else stage + 1
        if 0 <= neighbour < stages:
            ready = max(ready, end(neighbour, op, m) + transfer)
        return ready + cost[op][stage]

    timeline = simulate(build(name, stages, microbatches), cost[Op.FORWARD], cost[Op.BACKWARD], transfer)
    for stage, row in enumerate(timeline.spans):
        for span in row:
            if span.action.op in COMPUTE:
                assert span.end == pytest.approx(end(stage, span.action.op, span.action.microbatch))
                assert span.end - span.start == pytest.approx(cost[span.action.op][stage])
