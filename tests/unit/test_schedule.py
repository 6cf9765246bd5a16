"""Schedules as data: complete, free of deadlock, and timed as published."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from megacore.pipeline.generators import GENERATORS, build, generated
from megacore.pipeline.schedule import (
    COMPUTE,
    RECEIVES,
    Action,
    Op,
    Plan,
    forward_only,
    looped,
    lower,
    unsplit,
)
from megacore.tools.choices.held import peak_live
from megacore.tools.schedules.simulate import simulate
from megacore.tools.schedules.validate import validate

SIZES = [(1, 1), (1, 5), (2, 1), (2, 4), (3, 7), (4, 2), (4, 8), (8, 3), (8, 16)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("name", GENERATORS)
def test_every_schedule_is_valid(name: str, stages: int, microbatches: int, tied: bool) -> None:
    """A schedule that loses a microbatch, mismatches a transfer or hangs would be accepted into training."""
    whole = unsplit(generated(name, stages, microbatches))
    validate(build(name, stages, microbatches, shared=[(0, whole.stages - 1)] if tied else ()), microbatches)
    validate(lower(whole), microbatches)
    assert (
        not whole.splits
        and build(name, stages, microbatches).splits == generated(name, stages, microbatches).splits
    )


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 5), (3, 3), (4, 4), (4, 9), (5, 3)])
@pytest.mark.parametrize("chunks", [3, 4])
def test_any_number_of_chunks_can_be_interleaved(ranks: int, microbatches: int, chunks: int) -> None:
    """Microbatches that the ranks do not divide, or more than two chunks, would
    make ranks wait for each other.
    """
    validate(
        build("interleaved", ranks, microbatches, chunks, shared=[(0, ranks * chunks - 1), (1, ranks + 1)]),
        microbatches,
    )


@pytest.mark.parametrize("name", GENERATORS)
def test_receives_are_posted_while_the_action_before_computes(name: str) -> None:
    """A message would travel only after its receiver has nothing else to do; or buffers would
    wait long before they are filled.
    """
    for actions in build(name, 4, 9).actions:
        compute = [(a.op is Op.FORWARD, a.microbatch, a.chunk) for a in actions if a.op in COMPUTE]
        done = 0
        for at, action in enumerate(actions):
            done += action.op in COMPUTE
            if action.op in RECEIVES:  # it, or one that the same rank sends later
                behind = [a for a in actions[at:] if a.op in RECEIVES and a.peer == action.peer]
                taken = min(
                    compute.index((a.op is Op.RECV_ACTIVATION, a.microbatch, a.chunk)) for a in behind
                )
                assert taken == done + 1 or done == 0, f"{action} is posted {taken - done} actions ahead"


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
    return replace(plan, actions=tuple(tuple(own) for own in actions))


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
    "a lost forward": (
        1,
        lambda a: a.pop(find(a, Op.FORWARD, 3)),
        "pp rank 1, forward of microbatch 3: is missing",
    ),
    "a forward twice": (
        1,
        lambda a: a.append(Action(Op.FORWARD, 3, 0)),
        "pp rank 1, forward of microbatch 3: done 2 times",
    ),
    "a lost backward": (
        0,
        lambda a: a.pop(find(a, Op.BACKWARD, 0)),
        "pp rank 0, backward of microbatch 0: is missing",
    ),
    "a microbatch too many": (
        3,
        lambda a: a.append(Action(Op.FORWARD, 8, 0)),
        "pp rank 3, forward of microbatch 8: has no place",
    ),
    "backward first": (
        3,
        lambda a: to_front(a, Op.BACKWARD, 2),
        "pp rank 3, backward of microbatch 2: comes before its forward",
    ),
    "a receive too late": (
        2,
        lambda a: to_front(a, Op.FORWARD, 0),
        "pp rank 2, forward of microbatch 0: comes before its recv_activation",
    ),
    "a send too early": (
        2,
        lambda a: to_front(a, Op.SEND_GRADIENT, 1),
        "send_gradient of microbatch 1: comes before its backward",
    ),
    "a lost send": (
        1,
        lambda a: a.pop(find(a, Op.SEND_ACTIVATION, 5)),
        "pp rank 1, send_activation of microbatch 5: is missing",
    ),
    "a send elsewhere": (
        1,
        lambda a: change(a, Op.SEND_ACTIVATION, 5, peer=3),
        "pp rank 1, send_activation of microbatch 5: has no place",
    ),
    "receives out of order": (
        1,
        lambda a: swap(a, Op.RECV_ACTIVATION, 0, 1),
        "pp rank 0 does send_activation of microbatch 0",
    ),
    "last too early": (
        0,
        lambda a: change(a, Op.BACKWARD, 3, last=True),
        "pp rank 0, backward of microbatch 3: `last`",
    ),
    "last forgotten": (
        0,
        lambda a: change(a, Op.BACKWARD, 7, last=False),
        "pp rank 0, backward of microbatch 7: `last`",
    ),
    "no reduction": (
        2,
        lambda a: a.remove(Action(Op.REDUCE_GRADIENTS)),
        "pp rank 2, reduce_gradients: done 0 times",
    ),
    "reduced twice": (
        2,
        lambda a: a.append(Action(Op.REDUCE_GRADIENTS)),
        "pp rank 2, reduce_gradients: done 2 times",
    ),
    "reduced too early": (
        2,
        lambda a: to_front(a, Op.REDUCE_GRADIENTS),
        "pp rank 2, reduce_gradients: comes before 8 backwards",
    ),
    "tied on a stage that shares nothing": (
        2,
        lambda a: a.append(Action(Op.REDUCE_TIED)),
        "pp rank 2, reduce_tied: done 1 times, not 0",
    ),
    "one holder left out": (
        1,
        lambda a: a.remove(Action(Op.REDUCE_TIED)),
        "pp rank 1, reduce_tied: done 0 times, not 1",
    ),
    "tied twice": (
        3,
        lambda a: a.append(Action(Op.REDUCE_TIED)),
        "pp rank 3, reduce_tied: done 2 times, not 1",
    ),
    "tied too early": (
        3,
        lambda a: to_front(a, Op.REDUCE_TIED),
        "pp rank 3, reduce_tied: comes before 8 backwards",
    ),
}


SPLIT_FAULTS: dict[str, tuple[int, Callable[[list[Action]], object], str]] = {
    "weights first": (
        1,
        lambda a: to_front(a, Op.BACKWARD_WEIGHT, 0),
        "backward_weight of microbatch 0: comes before its backward_input",
    ),
    "weights lost": (
        0,
        lambda a: a.pop(find(a, Op.BACKWARD_WEIGHT, 2)),
        "pp rank 0, backward_weight of microbatch 2: is missing",
    ),
    "weights twice": (
        2,
        lambda a: a.insert(-1, Action(Op.BACKWARD_WEIGHT, 2, 0)),
        "backward_weight of microbatch 2: done 2 times",
    ),
    "whole and split": (
        2,
        lambda a: a.insert(-1, Action(Op.BACKWARD, 2, 0)),
        "pp rank 2, backward of microbatch 2: has no place",
    ),
    "last on the input": (
        3,
        lambda a: change(a, Op.BACKWARD_INPUT, 7, last=True),
        "backward_input of microbatch 7: `last`",
    ),
    "reduced too early": (
        2,
        lambda a: a.insert(-4, a.pop(find(a, Op.REDUCE_GRADIENTS))),
        "reduce_gradients: comes before 3",
    ),
}


@pytest.mark.parametrize("fault", SPLIT_FAULTS)
def test_faults_of_split_backwards_are_named(fault: str) -> None:
    """A weight's gradient would be lost, doubled, or made of what is not there yet."""
    stage, spoil, message = SPLIT_FAULTS[fault]
    with pytest.raises(ValueError) as error:
        validate(edit(build("zb_h1", 4, 8), stage, spoil), 8)
    assert message in str(error.value)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_named(fault: str) -> None:
    """Validation that lets one of these through would let a schedule train on wrong gradients."""
    stage, spoil, message = FAULTS[fault]
    with pytest.raises(ValueError) as error:
        validate(edit(build("1f1b", 4, 8, shared=[(0, 3), (0, 1)]), stage, spoil), 8)
    assert message in str(error.value)


def test_messages_must_arrive_in_the_order_sent() -> None:
    """Messages are paired by order alone: two stages that disagree about it would
    silently exchange their contents.
    """
    plan = edit(build("gpipe", 2, 2), 1, lambda a: swap(a, Op.RECV_ACTIVATION, 0, 1))
    with pytest.raises(
        ValueError,
        match="pp rank 1, recv_activation of microbatch 1: pp rank 0 does send_activation of microbatch 0",
    ):
        validate(plan, 2)


def test_lowering_follows_the_order_of_the_sender() -> None:
    """A rank that takes messages in another order than they are sent would be refused,
    or get the wrong ones.
    """
    forward = [Action(Op.FORWARD, m, 0) for m in (0, 1)]
    backward = [Action(Op.BACKWARD, m, 0) for m in (0, 1)]
    plan = lower(Plan(((*forward, *backward), (*reversed(forward), *backward)), looped(2)))
    validate(plan, 2)
    assert [a.microbatch for a in plan.actions[1][:2]] == [0, 1], "both posted before the first is taken"


def test_a_stage_that_runs_ahead_of_its_neighbour_deadlocks() -> None:
    """Stage 1 wants both forwards first, stage 0 a gradient between them: each waits for the other."""
    forward = [Action(Op.FORWARD, m, 0) for m in range(2)]
    backward = [Action(Op.BACKWARD, m, 0) for m in range(2)]
    plan = lower(Plan(((forward[0], backward[0], forward[1], backward[1]), (*forward, *backward)), looped(2)))
    with pytest.raises(
        ValueError,
        match="deadlock: pp rank 0 waits in backward of microbatch 0; pp rank 1 waits in forward of",
    ):
        validate(plan, 2)
    with pytest.raises(ValueError, match="deadlock"):
        simulate(plan, [1, 1], [2, 2])


def test_a_plan_that_needs_more_buffers_is_refused() -> None:
    """Stage 0 does all forwards first, stage 1 goes back at once: it hangs on a backend that
    does not keep stage 1's messages.
    """
    plan = lower(
        Plan((generated("gpipe", 2, 8).actions[0], unsplit(generated("1f1b", 2, 8)).actions[1]), looped(2))
    )
    with pytest.raises(
        ValueError,
        match="deadlock: pp rank 0 waits in send_activation of microbatch 6; pp rank 1 waits in "
        "send_gradient",
    ):
        validate(plan, 8)
    assert simulate(plan, [1, 1], [2, 2], in_flight=8).makespan > 0, "it is the buffers that it lacks"


def test_sends_do_not_stop_a_rank() -> None:
    """A rank would lose time in its sends: with `IN_FLIGHT` buffers every schedule is as
    fast as with any number of them.
    """
    for name in GENERATORS:
        plan = build(name, 4, 8)
        cost = [1.0] * plan.stages, [2.0] * plan.stages, 0.25
        assert simulate(plan, *cost).makespan == simulate(plan, *cost, in_flight=99).makespan, name


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_and_activations_of_equal_stages(name: str, stages: int, microbatches: int) -> None:
    """Bubble (p - 1) / (m + p - 1); activations: all of GPipe's, min(p - i, m) under 1F1B.

    Else the schedule is another one.
    """
    timeline = simulate(build(name, stages, microbatches), [1.0] * stages, [2.0] * stages)
    assert timeline.bubble_rate == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert timeline.makespan == pytest.approx(3 * (microbatches + stages - 1))
    peaks = {"gpipe": [microbatches] * stages, "1f1b": [min(stages - i, microbatches) for i in range(stages)]}
    assert peak_live(timeline.plan) == peak_live(build(name, stages, microbatches)) == peaks[name]


# Qi et al. 2023, Zero Bubble Pipeline Parallelism, tables 5 and 9: 8 stages, milliseconds; backward of inputs
# and of weights, a transfer; bubble rates of 1F1B and ZB-H1.
PUBLISHED = [
    (24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585),
    (32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242),
    (64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674),
    (24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323),
    (32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045),
    (64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554),
]


@pytest.mark.parametrize("row", PUBLISHED)
def test_published_bubble_rates(row: tuple[int, float, float, float, float, float, float]) -> None:
    """The simulator would time transfers, split backwards, or define the bubble
    differently from the literature.
    """
    microbatches, forward, inputs, weight, transfer, *rates = row
    for name, rate in zip(("1f1b", "zb_h1"), rates, strict=True):
        plan = build(name, 8, microbatches)
        costs = [forward] * 8, [inputs + weight] * 8
        assert simulate(plan, *costs, transfer, [weight] * 8).bubble_rate == pytest.approx(rate, abs=1e-4)
        assert simulate(plan, *costs, 0.0, [weight] * 8).bubble_rate != pytest.approx(rate, abs=1e-3)


@pytest.mark.parametrize(
    ("ranks", "rounds", "chunks"), [(2, 1, 2), (3, 2, 3), (4, 1, 4), (4, 4, 2), (8, 3, 3)]
)
def test_interleaving_divides_the_bubble(ranks: int, rounds: int, chunks: int) -> None:
    """m·T + (p - 1)·T / v (Narayanan et al. 2021, section 2.2), with 2(p - i - 1) + (v - 1)·p + 1
    chunks' activations on rank i.
    """
    plan, microbatches = build("interleaved", ranks, rounds * ranks, chunks), rounds * ranks
    part = 3.0 / chunks
    timeline = simulate(plan, [part / 3] * plan.stages, [part * 2 / 3] * plan.stages)
    assert timeline.makespan == pytest.approx(microbatches * 3.0 + (ranks - 1) * part, abs=1e-9)
    live = [min(2 * (ranks - i - 1) + (chunks - 1) * ranks + 1, chunks * microbatches) for i in range(ranks)]
    assert peak_live(plan) == live


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("rounds", [2, 3])
def test_bubbles_and_activations_of_split_schedules(ranks: int, rounds: int) -> None:
    """Where the three parts take equally long, Qi et al. (2023, section 2; 2024, table 1) give the
    bubble and what is held at most.
    """
    microbatches, part = rounds * ranks, 1.0
    found = {}
    for name in ("zb_h1", "zb_v", "v_half", "v_min"):
        plan = build(name, ranks, microbatches)
        chunks = len(plan.placement[0])
        timeline = simulate(plan, [part / chunks] * plan.stages, [2 * part / chunks] * plan.stages)
        found[name] = timeline.makespan - 3 * part * microbatches, [live / chunks for live in peak_live(plan)]
    whole = 3 * part * (ranks - 1)  # 1F1B's
    assert found["zb_h1"] == (pytest.approx(whole / 3), [ranks] * ranks)
    assert found["zb_v"] == (pytest.approx(0.0), [ranks] * ranks)
    idle, live = found["v_half"]
    assert idle <= whole / 2 + 1e-9 and max(live) == (ranks + 2) // 2
    idle, live = found["v_min"]  # if 3 divides the ranks, patterns must be kept apart
    assert (
        idle <= whole * 2 / 3 + (part / 2 if ranks % 3 == 0 else 0.0) + 1e-9 and max(live) == (ranks + 4) // 3
    )


@pytest.mark.parametrize("name", GENERATORS)
def test_uneven_stages_against_the_recurrence(name: str) -> None:
    """Starts and ends would not follow from what each action waits for: its rank,
    and its neighbour's message.

    A message leaves when it is computed and the action before the one that takes it begins; then it is under
    way while that computes.
    """
    ranks, microbatches, transfer = 4, 6, 0.3
    rng = random.Random(0)
    plan = build(name, ranks, microbatches)
    forward, inputs, weight = ([rng.uniform(0.5, 2.0) for _ in range(plan.stages)] for _ in range(3))
    whole = [a + b for a, b in zip(inputs, weight, strict=True)]
    cost = {Op.FORWARD: forward, Op.BACKWARD: whole, Op.BACKWARD_INPUT: inputs, Op.BACKWARD_WEIGHT: weight}
    order = [
        [(a.op, a.microbatch, a.chunk) for a in actions]
        for actions in generated(name, ranks, microbatches).actions
    ]
    backward = Op.BACKWARD_INPUT if plan.splits else Op.BACKWARD

    @cache
    def start(rank: int, at: int) -> float:
        op, m, chunk = order[rank][at]
        ready = end(rank, at - 1) if at else 0.0
        stage = plan.placement[rank][chunk] + (-1 if op is Op.FORWARD else 1)
        if stage in plan.where and op is not Op.BACKWARD_WEIGHT:
            other, its_chunk = plan.where[stage]
            sent = end(other, order[other].index((op if op is Op.FORWARD else backward, m, its_chunk)))
            posted = start(rank, at - 1) if at else 0.0
            ready = max(ready, sent if other == rank else max(sent, posted) + transfer)
        return ready

    def end(rank: int, at: int) -> float:
        op, _, chunk = order[rank][at]
        return start(rank, at) + cost[op][plan.placement[rank][chunk]]

    timeline = simulate(plan, forward, whole, transfer, weight, in_flight=99)
    for rank, row in enumerate(timeline.spans):
        spans = [span for span in row if span.action.op in COMPUTE]
        assert [span.start for span in spans] == pytest.approx([start(rank, at) for at in range(len(spans))])
        assert [span.end for span in spans] == pytest.approx([end(rank, at) for at in range(len(spans))])
