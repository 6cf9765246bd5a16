"""Predicts the time of a lowered schedule, without a device.

`simulate` gives every action a start and an end. It reads the same plan as the runtime, with the same rule: a maximal run of
adjacent transfers is one batch, posted together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from megacore.plan.schedule import TRANSFERS, Action, Op, Plan

SENDS = frozenset({Op.SEND_ACTIVATION, Op.SEND_GRADIENT})
COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD})
REDUCTIONS = frozenset({Op.REDUCE_GRADIENTS, Op.REDUCE_TIED})


def message(plan: Plan, rank: int, action: Action) -> tuple[str, int, int]:
    """A name for a transfer's content, the same for sender and receiver: kind, boundary (the stage below it) and microbatch."""
    stage = plan.placement[rank][action.chunk]
    kind = "activation" if action.op in (Op.SEND_ACTIVATION, Op.RECV_ACTIVATION) else "gradient"
    boundary = stage if action.op in (Op.SEND_ACTIVATION, Op.RECV_GRADIENT) else stage - 1
    return kind, boundary, action.microbatch


def in_batches(actions: Sequence[Action]) -> list[list[Action]]:
    """Groups a rank's actions: each maximal run of adjacent transfers is one batch, and any other action is alone."""
    out: list[list[Action]] = []
    for transfers, group in groupby(actions, key=lambda a: a.op in TRANSFERS):
        run = list(group)
        out += [run] if transfers else [[action] for action in run]
    return out


@dataclass(frozen=True)
class Span:
    """An action with its times. A send lasts until it arrives; a receive lasts while its rank waits."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated plan: for every rank of the pipeline, its spans in order. Seconds, or whatever unit the costs were in."""

    plan: Plan
    spans: tuple[tuple[Span, ...], ...]

    @property
    def busy(self) -> list[float]:
        """The time that each rank computes. Transfers do not occupy the device."""
        return [sum(s.end - s.start for s in row if s.action.op in COMPUTE) for row in self.spans]

    @property
    def makespan(self) -> float:
        """The longest time from a rank's first start to its last end, which is a step's time when steps follow each other."""
        compute = [[s for s in row if s.action.op in COMPUTE] for row in self.spans]
        return max(row[-1].end - row[0].start for row in compute)

    @property
    def bubble_rate(self) -> float:
        """The fraction of the makespan in which a rank is idle, averaged over the ranks (Qi et al. 2023, where all are equal)."""
        makespan = self.makespan
        return 1 - sum(self.busy) / (len(self.spans) * makespan) if makespan else 0.0


def peak_live(plan: Plan) -> list[int]:
    """For every rank, the most forwards (microbatch and chunk) whose activations await their backward at one time."""
    return [int(peak) for peak in peak_held(plan, [1] * plan.stages)]


def peak_held(plan: Plan, sizes: Sequence[float]) -> list[float]:
    """For every rank, the most that its live forwards hold at one time, if one of stage i holds ``sizes[i]``."""
    peaks = []
    for stages, actions in zip(plan.placement, plan.actions, strict=True):
        held = peak = 0.0
        for action in actions:
            if action.op in COMPUTE:
                held += sizes[stages[action.chunk]] * (1 if action.op is Op.FORWARD else -1)
                peak = max(peak, held)
        peaks.append(peak)
    return peaks


def simulate(plan: Plan, forward: Sequence[float], backward: Sequence[float], transfer: float = 0.0) -> Timeline:
    """Times every action of a valid plan. One action of stage i takes `forward[i]` or `backward[i]`.

    A message leaves when its batch is posted, and arrives `transfer` later. A rank waits for the receives of a batch and not for its
    sends. Reductions take no time. Raises `ValueError` if the plan deadlocks.
    """
    runs = [in_batches(actions) for actions in plan.actions]
    spans: list[list[Span]] = [[] for _ in runs]
    position, clock = [0] * len(runs), [0.0] * len(runs)
    arrival: dict[tuple[str, int, int], float] = {}
    cost = {Op.FORWARD: forward, Op.BACKWARD: backward}
    moved = True
    while moved:
        moved = False
        for rank, batches in enumerate(runs):
            while position[rank] < len(batches):
                batch, now = batches[position[rank]], clock[rank]
                sends = {message(plan, rank, a): now + transfer for a in batch if a.op in SENDS}
                moved |= not sends.keys() <= arrival.keys()
                arrival.update(sends)
                receives = [message(plan, rank, a) for a in batch if a.op in TRANSFERS - SENDS]
                if any(m not in arrival for m in receives):
                    break
                for action in batch:
                    if action.op in TRANSFERS:
                        end = max(now, arrival[message(plan, rank, action)])
                    else:
                        end = now + cost[action.op][plan.placement[rank][action.chunk]] if action.op in cost else now
                    spans[rank].append(Span(action, now, end))
                    if action.op not in SENDS:
                        clock[rank] = max(clock[rank], end)
                position[rank] += 1
                moved = True
    if any(at < len(batches) for at, batches in zip(position, runs, strict=True)):
        raise ValueError("the plan deadlocks: see validate")
    return Timeline(plan, tuple(tuple(row) for row in spans))
