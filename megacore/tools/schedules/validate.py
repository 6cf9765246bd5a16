"""Proves that a lowered schedule computes everything once and cannot deadlock, without a device."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from megacore.pipeline.schedule import (
    BACKWARDS,
    COMPLETING,
    REDUCTIONS,
    SENDS,
    TRANSFERS,
    Action,
    Op,
    Plan,
    message,
    neighbours,
)
from megacore.tools.schedules.simulate import describe, simulate

# Ops that must come before an op of the same microbatch and chunk on the same rank, if the rank has them at
# all.
NEEDS = {
    Op.FORWARD: (Op.RECV_ACTIVATION,),
    Op.SEND_ACTIVATION: (Op.FORWARD,),
    Op.BACKWARD: (Op.FORWARD, Op.RECV_GRADIENT),
    Op.BACKWARD_INPUT: (Op.FORWARD, Op.RECV_GRADIENT),
    Op.BACKWARD_WEIGHT: (Op.BACKWARD_INPUT,),
    Op.SEND_GRADIENT: (Op.BACKWARD, Op.BACKWARD_INPUT),
}


def validate(plan: Plan, microbatches: int, forward_only: bool = False) -> None:
    """Raises `ValueError`, naming rank and action, unless the lowered plan is complete,
    ordered, matched and free of deadlock.

    Complete: one rank holds each stage, and every rank does exactly the actions that `microbatches` need in
    its chunks, each once; of each backward the whole, or its two parts. Ordered: receive, compute, send;
    backward after its forward, of the input before of the weights; a chunk after the chunk of the same rank
    whose result it takes; `last` on the action that completes a chunk's gradients;
    reductions once, behind these. Matched: a rank receives messages from another in the order in which they
    are sent, as NCCL pairs them. Free of deadlock under the rules of `schedule.py`: a message is under way
    only when both ends have posted it, and a rank waits for the sends before it posts more than `IN_FLIGHT`.
    A plan that needs more buffers is refused, also where a backend has them.
    """
    held = sorted(stage for stages in plan.placement for stage in stages)
    if held != list(range(len(held))) or len(plan.placement) != len(plan.actions) or not all(plan.placement):
        raise ValueError(
            f"the ranks hold stages {[list(stages) for stages in plan.placement]}: each of 0, 1, 2, … "
            "must have one place"
        )
    for rank, actions in enumerate(plan.actions):
        _check_complete(rank, actions, _required(plan, rank, microbatches, forward_only))
        _check_order(plan, rank)
        _check_reductions(plan, rank, forward_only)
    _check_matched(plan)
    idle = [0.0] * plan.stages
    simulate(plan, idle, idle)


def _required(plan: Plan, rank: int, microbatches: int, forward_only: bool) -> set[tuple[Op, int, int, int]]:
    """(op, microbatch, chunk, peer) of everything but reductions that a rank must do."""
    required = set()
    split = {
        (a.microbatch, a.chunk) for a in plan.actions[rank] if a.op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    }
    for chunk in range(len(plan.placement[rank])):
        before, after = neighbours(plan, rank, chunk)
        for m in range(microbatches):
            required.add((Op.FORWARD, m, chunk, -1))
            required |= set() if before is None else {(Op.RECV_ACTIVATION, m, chunk, before)}
            required |= set() if after is None else {(Op.SEND_ACTIVATION, m, chunk, after)}
            if not forward_only:
                parts = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) if (m, chunk) in split else (Op.BACKWARD,)
                required |= {(op, m, chunk, -1) for op in parts}
                required |= set() if before is None else {(Op.SEND_GRADIENT, m, chunk, before)}
                required |= set() if after is None else {(Op.RECV_GRADIENT, m, chunk, after)}
    return required


def _check_complete(rank: int, actions: Sequence[Action], required: set[tuple[Op, int, int, int]]) -> None:
    counts = Counter((a.op, a.microbatch, a.chunk, a.peer) for a in actions if a.op not in REDUCTIONS)
    for key, count in counts.items():
        if key not in required:
            raise ValueError(f"pp rank {rank}, {describe(Action(*key))}: has no place on this rank")
        if count > 1:
            raise ValueError(f"pp rank {rank}, {describe(Action(*key))}: done {count} times")
    for key in sorted(required - counts.keys(), key=lambda k: k[1:]):
        raise ValueError(f"pp rank {rank}, {describe(Action(*key))}: is missing")


def _check_order(plan: Plan, rank: int) -> None:
    actions, stages = plan.actions[rank], plan.placement[rank]
    has = {(a.op, a.microbatch, a.chunk) for a in actions}
    final = {a.chunk: i for i, a in enumerate(actions) if a.op in COMPLETING}
    seen = set()
    for i, action in enumerate(actions):
        needs = [(op, action.microbatch, action.chunk) for op in NEEDS.get(action.op, ())]
        # the chunk on this rank whose result it takes over, if there is one
        if action.op is Op.FORWARD or action.op in BACKWARDS:
            source = stages[action.chunk] + (-1 if action.op is Op.FORWARD else 1)
            kinds = (Op.FORWARD,) if action.op is Op.FORWARD else BACKWARDS
            needs += [
                (op, action.microbatch, chunk)
                for chunk, stage in enumerate(stages)
                if stage == source
                for op in kinds
            ]
        for need in needs:
            if need in has and need not in seen:
                other = "its " if need[2] == action.chunk else f"chunk {need[2]}'s "
                raise ValueError(f"pp rank {rank}, {describe(action)}: comes before {other}{need[0].value}")
        if action.last != (action.op in COMPLETING and final[action.chunk] == i):
            wrong = "`last` must mark what completes the gradients of its chunk, and only that"
            raise ValueError(f"pp rank {rank}, {describe(action)}: {wrong}")
        seen.add((action.op, action.microbatch, action.chunk))


def _check_reductions(plan: Plan, rank: int, forward_only: bool) -> None:
    actions = plan.actions[rank]
    counts = Counter(a.op for a in actions)
    for op, wanted in (
        (Op.REDUCE_GRADIENTS, not forward_only),
        (Op.REDUCE_TIED, not forward_only and plan.shares(rank)),
    ):
        if counts[op] != wanted:
            raise ValueError(f"pp rank {rank}, {op.value}: done {counts[op]} times, not {wanted:d}")
    backwards_left = sum(counts[op] for op in COMPLETING)
    for action in actions:
        backwards_left -= action.op in COMPLETING
        if action.op in REDUCTIONS and backwards_left:
            wrong = f"comes before {backwards_left} backwards whose gradients it would miss"
            raise ValueError(f"pp rank {rank}, {describe(action)}: {wrong}")


def _check_matched(plan: Plan) -> None:
    """Checks that the k-th send from one rank to another is what the other's k-th receive expects."""
    sent, awaited = defaultdict(list), defaultdict(list)
    for rank, actions in enumerate(plan.actions):
        for action in actions:
            if action.op in SENDS:
                sent[rank, action.peer].append(action)
            elif action.op in TRANSFERS:
                awaited[action.peer, rank].append(action)
    for sender, receiver in sorted(sent.keys() | awaited.keys()):
        # Completeness was checked: both lists hold the same messages, and only their order is open.
        for send, receive in zip(sent[sender, receiver], awaited[sender, receiver], strict=True):
            if message(plan, sender, send) != message(plan, receiver, receive):
                wrong = f"pp rank {sender} does {describe(send)} at its place in the order"
                raise ValueError(f"pp rank {receiver}, {describe(receive)}: {wrong}")
