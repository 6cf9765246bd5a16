"""Checks a lowered schedule, and predicts what it costs, without a device.

`validate` proves that a plan computes everything once, in an order that its transfers allow, and cannot
deadlock. `simulate` gives every action a start and an end. Both read the same plan as the runtime, and share
its rule that a maximal run of adjacent transfers is one batch, posted together.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

from megacore.pipeline.schedule import TRANSFERS, Action, Op, Plan

SENDS = frozenset({Op.SEND_ACTIVATION, Op.SEND_GRADIENT})
COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD})
REDUCTIONS = frozenset({Op.REDUCE_GRADIENTS, Op.REDUCE_TIED})

# What must stand before an action of the same microbatch and chunk on the same stage, where the stage has it at all.
NEEDS = {
    Op.FORWARD: (Op.RECV_ACTIVATION,),
    Op.SEND_ACTIVATION: (Op.FORWARD,),
    Op.BACKWARD: (Op.FORWARD, Op.RECV_GRADIENT),
    Op.SEND_GRADIENT: (Op.BACKWARD,),
}


def validate(plan: Plan, stages: int, microbatches: int, chunks: int = 1, forward_only: bool = False) -> None:
    """Raises `ValueError`, naming stage and action, unless the lowered plan is complete, ordered, matched and free of deadlock.

    Complete: every stage does exactly the actions that `microbatches` through `chunks` need, each once.
    Ordered: receive, compute, send; backward behind its forward; `last` on a chunk's final backward; reductions
    once, behind every backward. Matched: from one stage to another, messages are received in the order in
    which they are sent, which is how NCCL pairs them. Deadlock: every batch of transfers waits until all of its
    peers have posted theirs (a rendezvous, the strictest thing a backend may do; buffered sends only wait less).
    """
    if len(plan) != stages:
        raise ValueError(f"the plan has {len(plan)} stages, not {stages}")
    for stage, actions in enumerate(plan):
        _check_complete(stage, actions, _required(stage, stages, microbatches, chunks, forward_only))
        _check_order(stage, actions)
        _check_reductions(stage, actions, forward_only)
    _check_tied(plan)
    _check_matched(plan)
    _check_progress(plan)


def _required(stage: int, stages: int, microbatches: int, chunks: int, forward_only: bool) -> set[tuple[Op, int, int, int]]:
    """(op, microbatch, chunk, peer) of everything but reductions that a stage must do."""
    required = set()
    for chunk in range(chunks):
        virtual = chunk * stages + stage
        before, after = (virtual - 1) % stages, (virtual + 1) % stages
        first, last = virtual == 0, virtual == stages * chunks - 1
        for m in range(microbatches):
            required.add((Op.FORWARD, m, chunk, -1))
            required |= set() if first else {(Op.RECV_ACTIVATION, m, chunk, before)}
            required |= set() if last else {(Op.SEND_ACTIVATION, m, chunk, after)}
            if not forward_only:
                required.add((Op.BACKWARD, m, chunk, -1))
                required |= set() if first else {(Op.SEND_GRADIENT, m, chunk, before)}
                required |= set() if last else {(Op.RECV_GRADIENT, m, chunk, after)}
    return required


def _check_complete(stage: int, actions: Sequence[Action], required: set[tuple[Op, int, int, int]]) -> None:
    counts = Counter((a.op, a.microbatch, a.chunk, a.peer) for a in actions if a.op not in REDUCTIONS)
    for key, count in counts.items():
        if key not in required:
            raise ValueError(f"stage {stage}, {describe(Action(*key))}: has no place on this stage")
        if count > 1:
            raise ValueError(f"stage {stage}, {describe(Action(*key))}: done {count} times")
    for key in sorted(required - counts.keys(), key=lambda k: k[1:]):
        raise ValueError(f"stage {stage}, {describe(Action(*key))}: is missing")


def _check_order(stage: int, actions: Sequence[Action]) -> None:
    has = {(a.op, a.microbatch, a.chunk) for a in actions}
    final = {a.chunk: i for i, a in enumerate(actions) if a.op is Op.BACKWARD}
    seen = set()
    for i, action in enumerate(actions):
        for op in NEEDS.get(action.op, ()):
            need = (op, action.microbatch, action.chunk)
            if need in has and need not in seen:
                raise ValueError(f"stage {stage}, {describe(action)}: comes before its {op.value}")
        if action.last != (action.op is Op.BACKWARD and final[action.chunk] == i):
            raise ValueError(f"stage {stage}, {describe(action)}: `last` must mark the final backward of its chunk, and only that")
        seen.add((action.op, action.microbatch, action.chunk))


def _check_reductions(stage: int, actions: Sequence[Action], forward_only: bool) -> None:
    counts = Counter(a.op for a in actions)
    wanted = 0 if forward_only else 1
    if counts[Op.REDUCE_GRADIENTS] != wanted:
        raise ValueError(f"stage {stage}, reduce_gradients: done {counts[Op.REDUCE_GRADIENTS]} times, not {wanted}")
    if counts[Op.REDUCE_TIED] > wanted:
        raise ValueError(f"stage {stage}, reduce_tied: done {counts[Op.REDUCE_TIED]} times, not {wanted}")
    backwards_left = counts[Op.BACKWARD]
    for action in actions:
        backwards_left -= action.op is Op.BACKWARD
        if action.op in REDUCTIONS and backwards_left:
            raise ValueError(f"stage {stage}, {describe(action)}: comes before {backwards_left} backwards whose gradients it would miss")


def _check_tied(plan: Plan) -> None:
    tied = [stage for stage, actions in enumerate(plan) if any(a.op is Op.REDUCE_TIED for a in actions)]
    if tied and tied != [0, len(plan) - 1]:
        raise ValueError(f"stage {tied[0]}, reduce_tied: is between the first and the last stage, but stands on {tied}")


def message(action: Action, stage: int, stages: int) -> tuple[str, int, int]:
    """What a transfer carries, named alike by sender and receiver: kind, boundary (virtual stage below it) and microbatch."""
    virtual = action.chunk * stages + stage
    kind = "activation" if action.op in (Op.SEND_ACTIVATION, Op.RECV_ACTIVATION) else "gradient"
    boundary = virtual if action.op in (Op.SEND_ACTIVATION, Op.RECV_GRADIENT) else virtual - 1
    return kind, boundary, action.microbatch


def _check_matched(plan: Plan) -> None:
    """The k-th send from one stage to another must be what the other's k-th receive from it awaits."""
    sent, awaited = defaultdict(list), defaultdict(list)
    for stage, actions in enumerate(plan):
        for action in actions:
            if action.op in SENDS:
                sent[stage, action.peer].append(action)
            elif action.op in TRANSFERS:
                awaited[action.peer, stage].append(action)
    for sender, receiver in sorted(sent.keys() | awaited.keys()):
        # Completeness was checked: both lists hold the same messages, and only their order is open.
        for send, receive in zip(sent[sender, receiver], awaited[sender, receiver], strict=True):
            if message(send, sender, len(plan)) != message(receive, receiver, len(plan)):
                raise ValueError(f"stage {receiver}, {describe(receive)}: stage {sender} does {describe(send)} at its place in the order")


def _check_progress(plan: Plan) -> None:
    """Runs the plan by rendezvous; raises if it stops before its end."""
    runs = [_batches(actions) for actions in plan]
    position = [0] * len(plan)
    posted: set[tuple[int, Hashable]] = set()

    def meets(stage: int, action: Action) -> tuple[int, Hashable] | None:
        """The stage that an action waits for, and what both of them post."""
        if action.op is Op.REDUCE_TIED:
            return (len(plan) - 1 if stage == 0 else 0), "tied embeddings"
        return (action.peer, message(action, stage, len(plan))) if action.op in TRANSFERS else None

    moved = True
    while moved:
        moved = False
        for stage, batches in enumerate(runs):
            while position[stage] < len(batches):
                meetings = [meeting for action in batches[position[stage]] if (meeting := meets(stage, action))]
                new = {(stage, what) for _, what in meetings} - posted
                posted |= new
                moved |= bool(new)
                if any(meeting not in posted for meeting in meetings):
                    break
                position[stage] += 1
                moved = True
    stuck = [(stage, batches[at]) for stage, (batches, at) in enumerate(zip(runs, position, strict=True)) if at < len(batches)]
    if stuck:
        raise ValueError("deadlock: " + "; ".join(f"stage {stage} waits in {', '.join(map(describe, batch))}" for stage, batch in stuck))


def _batches(actions: Sequence[Action]) -> list[list[Action]]:
    """The actions of a stage, each maximal run of adjacent transfers as one batch, anything else alone."""
    out: list[list[Action]] = []
    for transfers, group in groupby(actions, key=lambda a: a.op in TRANSFERS):
        run = list(group)
        out += [run] if transfers else [[action] for action in run]
    return out


def describe(action: Action) -> str:
    """An action in a word or two, for messages."""
    if action.op in REDUCTIONS:
        return action.op.value
    return f"{action.op.value} of microbatch {action.microbatch}" + (f", chunk {action.chunk}" if action.chunk else "")


@dataclass(frozen=True)
class Span:
    """An action on the clock. A send spans its flight, a receive the time that its stage waits for it."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated plan: for every stage, its spans in order. Seconds, or whatever unit the costs were in."""

    spans: tuple[tuple[Span, ...], ...]

    @property
    def busy(self) -> list[float]:
        """Time that each stage computes; transfers do not occupy the device."""
        return [sum(s.end - s.start for s in row if s.action.op in COMPUTE) for row in self.spans]

    @property
    def makespan(self) -> float:
        """The longest time from a stage's first start to its last end: what a step costs when steps follow each other."""
        compute = [[s for s in row if s.action.op in COMPUTE] for row in self.spans]
        return max(row[-1].end - row[0].start for row in compute)

    @property
    def bubble_rate(self) -> float:
        """Share of the makespan in which a stage is idle, averaged over the stages (Qi et al. 2023, where all are equal)."""
        makespan = self.makespan
        return 1 - sum(self.busy) / (len(self.spans) * makespan) if makespan else 0.0

    @property
    def peak_live(self) -> list[int]:
        """See `peak_live`."""
        return peak_live(tuple(tuple(s.action for s in row) for row in self.spans))


def peak_live(plan: Plan) -> list[int]:
    """For every stage, the most forwards (microbatch and chunk) whose activations await their backward at one time."""
    peaks = []
    for actions in plan:
        live = peak = 0
        for action in actions:
            live += (action.op is Op.FORWARD) - (action.op is Op.BACKWARD)
            peak = max(peak, live)
        peaks.append(peak)
    return peaks


def simulate(plan: Plan, forward: Sequence[float], backward: Sequence[float], transfer: float = 0.0) -> Timeline:
    """Times every action of a valid plan. `forward[i]` and `backward[i]` are what one of stage i's actions costs.

    A message leaves when its batch is posted and arrives `transfer` later; a stage waits for the receives of a batch,
    not for its sends; reductions are free. Raises `ValueError` if the plan deadlocks.
    """
    runs = [_batches(actions) for actions in plan]
    spans: list[list[Span]] = [[] for _ in plan]
    position, clock = [0] * len(plan), [0.0] * len(plan)
    arrival: dict[tuple[str, int, int], float] = {}
    cost = {Op.FORWARD: forward, Op.BACKWARD: backward}
    moved = True
    while moved:
        moved = False
        for stage, batches in enumerate(runs):
            while position[stage] < len(batches):
                batch, now = batches[position[stage]], clock[stage]
                sends = {message(a, stage, len(plan)): now + transfer for a in batch if a.op in SENDS}
                moved |= not sends.keys() <= arrival.keys()
                arrival.update(sends)
                receives = [message(a, stage, len(plan)) for a in batch if a.op in TRANSFERS - SENDS]
                if any(m not in arrival for m in receives):
                    break
                for action in batch:
                    if action.op in TRANSFERS:
                        end = max(now, arrival[message(action, stage, len(plan))])
                    else:
                        end = now + cost[action.op][stage] if action.op in cost else now
                    spans[stage].append(Span(action, now, end))
                    if action.op not in SENDS:
                        clock[stage] = max(clock[stage], end)
                position[stage] += 1
                moved = True
    if any(at < len(batches) for at, batches in zip(position, runs, strict=True)):
        raise ValueError("the plan deadlocks: see validate")
    return Timeline(tuple(tuple(row) for row in spans))
