"""Proves that a lowered schedule computes everything once and cannot deadlock, without a device."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

from megacore.plan.schedule import TRANSFERS, Action, Op, Plan, neighbours
from megacore.plan.simulate import COMPUTE, REDUCTIONS, SENDS, in_batches, message

# Ops that must come before an op of the same microbatch and chunk on the same rank, if the rank has them at all.
NEEDS = {
    Op.FORWARD: (Op.RECV_ACTIVATION,),
    Op.SEND_ACTIVATION: (Op.FORWARD,),
    Op.BACKWARD: (Op.FORWARD, Op.RECV_GRADIENT),
    Op.SEND_GRADIENT: (Op.BACKWARD,),
}


def validate(plan: Plan, microbatches: int, forward_only: bool = False) -> None:
    """Raises `ValueError`, naming rank and action, unless the lowered plan is complete, ordered, matched and free of deadlock.

    Complete: one rank holds each stage, and every rank does exactly the actions that `microbatches` need in its chunks, each once.
    Ordered: receive, compute, send; backward after its forward; a chunk after the chunk of the same rank whose result it takes;
    `last` on a chunk's final backward; reductions once, after every backward. Matched: a rank receives messages from another in the
    order in which they are sent, as NCCL pairs them. Free of deadlock under rendezvous, where every batch of transfers waits until
    all of its peers have posted theirs. No backend waits longer; buffered sends wait less.
    """
    held = sorted(stage for stages in plan.placement for stage in stages)
    if held != list(range(len(held))) or len(plan.placement) != len(plan.actions) or not all(plan.placement):
        raise ValueError(f"the ranks hold stages {[list(stages) for stages in plan.placement]}: each of 0, 1, 2, … must have one place")
    for rank, actions in enumerate(plan.actions):
        _check_complete(rank, actions, _required(plan, rank, microbatches, forward_only))
        _check_order(plan, rank)
        _check_reductions(rank, actions, forward_only)
    _check_tied(plan)
    _check_matched(plan)
    _check_progress(plan)


def _required(plan: Plan, rank: int, microbatches: int, forward_only: bool) -> set[tuple[Op, int, int, int]]:
    """(op, microbatch, chunk, peer) of everything but reductions that a rank must do."""
    required = set()
    for chunk in range(len(plan.placement[rank])):
        before, after = neighbours(plan, rank, chunk)
        for m in range(microbatches):
            required.add((Op.FORWARD, m, chunk, -1))
            required |= set() if before is None else {(Op.RECV_ACTIVATION, m, chunk, before)}
            required |= set() if after is None else {(Op.SEND_ACTIVATION, m, chunk, after)}
            if not forward_only:
                required.add((Op.BACKWARD, m, chunk, -1))
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
    final = {a.chunk: i for i, a in enumerate(actions) if a.op is Op.BACKWARD}
    seen = set()
    for i, action in enumerate(actions):
        needs = [(op, action.microbatch, action.chunk) for op in NEEDS.get(action.op, ())]
        if action.op in COMPUTE:  # the chunk on this rank whose result it takes over without a message, if there is one
            source = stages[action.chunk] + (-1 if action.op is Op.FORWARD else 1)
            needs += [(action.op, action.microbatch, chunk) for chunk, stage in enumerate(stages) if stage == source]
        for need in needs:
            if need in has and need not in seen:
                other = "its " if need[2] == action.chunk else f"chunk {need[2]}'s "
                raise ValueError(f"pp rank {rank}, {describe(action)}: comes before {other}{need[0].value}")
        if action.last != (action.op is Op.BACKWARD and final[action.chunk] == i):
            wrong = "`last` must mark the final backward of its chunk, and only that"
            raise ValueError(f"pp rank {rank}, {describe(action)}: {wrong}")
        seen.add((action.op, action.microbatch, action.chunk))


def _check_reductions(rank: int, actions: Sequence[Action], forward_only: bool) -> None:
    counts = Counter(a.op for a in actions)
    wanted = 0 if forward_only else 1
    if counts[Op.REDUCE_GRADIENTS] != wanted:
        raise ValueError(f"pp rank {rank}, reduce_gradients: done {counts[Op.REDUCE_GRADIENTS]} times, not {wanted}")
    if counts[Op.REDUCE_TIED] > wanted:
        raise ValueError(f"pp rank {rank}, reduce_tied: done {counts[Op.REDUCE_TIED]} times, not {wanted}")
    backwards_left = counts[Op.BACKWARD]
    for action in actions:
        backwards_left -= action.op is Op.BACKWARD
        if action.op in REDUCTIONS and backwards_left:
            wrong = f"comes before {backwards_left} backwards whose gradients it would miss"
            raise ValueError(f"pp rank {rank}, {describe(action)}: {wrong}")


def _check_tied(plan: Plan) -> None:
    tied = {rank for rank, actions in enumerate(plan.actions) if any(a.op is Op.REDUCE_TIED for a in actions)}
    ends = {plan.where[0][0], plan.where[plan.stages - 1][0]}
    if tied and (tied != ends or len(ends) == 1):
        raise ValueError(f"pp rank {min(tied)}, reduce_tied: is between the first and the last stage, but stands on {sorted(tied)}")


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


def _check_progress(plan: Plan) -> None:
    """Runs the plan under rendezvous. Raises if it stops before its end."""
    runs = [in_batches(actions) for actions in plan.actions]
    position = [0] * len(runs)
    posted: set[tuple[int, Hashable]] = set()
    ends = (plan.where[0][0], plan.where[plan.stages - 1][0])

    def meets(rank: int, action: Action) -> tuple[int, Hashable] | None:
        """The rank that an action waits for, and the message that both post."""
        if action.op is Op.REDUCE_TIED:
            return ends[rank == ends[0]], "tied embeddings"
        return (action.peer, message(plan, rank, action)) if action.op in TRANSFERS else None

    moved = True
    while moved:
        moved = False
        for rank, batches in enumerate(runs):
            while position[rank] < len(batches):
                meetings = [meeting for action in batches[position[rank]] if (meeting := meets(rank, action))]
                new = {(rank, what) for _, what in meetings} - posted
                posted |= new
                moved |= bool(new)
                if any(meeting not in posted for meeting in meetings):
                    break
                position[rank] += 1
                moved = True
    stuck = [(rank, batches[at]) for rank, (batches, at) in enumerate(zip(runs, position, strict=True)) if at < len(batches)]
    if stuck:
        waits = (f"pp rank {rank} waits in {', '.join(map(describe, batch))}" for rank, batch in stuck)
        raise ValueError(f"deadlock: {'; '.join(waits)}")


def describe(action: Action) -> str:
    """An action in words, for messages."""
    if action.op in REDUCTIONS:
        return action.op.value
    return f"{action.op.value} of microbatch {action.microbatch}" + (f", chunk {action.chunk}" if action.chunk else "")
