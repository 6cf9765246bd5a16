"""Predicts the time of a lowered schedule, without a device.

`simulate` gives every action a start and an end. It reads the same plan as the runtime, with the same rules
(`schedule.py`): a rank posts receives and sends and goes on; a message leaves when both ends have posted it
and the one before it has arrived; the action that takes a message waits for it; a send waits for the one
`IN_FLIGHT` places before it on its channel.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from megacore.pipeline.schedule import COMPUTE, IN_FLIGHT, REDUCTIONS, SENDS, Action, Op, Plan, message


@dataclass(frozen=True)
class Span:
    """An action with its times. A transfer lasts from when this rank posted it until it arrives."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated plan: for every rank of the pipeline, its spans in order.

    Seconds, or whatever unit the costs were in.
    """

    plan: Plan
    spans: tuple[tuple[Span, ...], ...]

    @property
    def busy(self) -> list[float]:
        """The time that each rank computes. Transfers do not occupy the device."""
        return [sum(s.end - s.start for s in row if s.action.op in COMPUTE) for row in self.spans]

    @property
    def makespan(self) -> float:
        """The longest time from a rank's first start to its last end, which is a step's
        time when steps follow each other.
        """
        compute = [[s for s in row if s.action.op in COMPUTE] for row in self.spans]
        return max(row[-1].end - row[0].start for row in compute)

    @property
    def bubble_rate(self) -> float:
        """The fraction of the makespan in which a rank is idle, averaged over the ranks (Qi et
        al. 2023, where all are equal).
        """
        makespan = self.makespan
        return 1 - sum(self.busy) / (len(self.spans) * makespan) if makespan else 0.0


@dataclass
class SimulatedChannel:
    """The messages from one rank to another, in the order of their posts: when each end
    posted, and when each arrived.
    """

    sent: list[float]
    awaited: list[float]
    arrived: list[float]


def simulate(
    plan: Plan,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: float | Sequence[float] = 0.0,
    weight: Sequence[float] | None = None,
    in_flight: int = IN_FLIGHT,
) -> Timeline:
    """Times every action of a valid plan.

    One action of stage i takes ``forward[i]`` or ``backward[i]``. Of a split backward BACKWARD_WEIGHT takes
    ``weight[i]``, by default half of it, and BACKWARD_INPUT the rest. A message between stages i and i + 1
    takes `transfer`, or ``transfer[i]``. Reductions take no time. Raises `ValueError` if the plan deadlocks.
    """
    weights = [cost / 2 for cost in backward] if weight is None else weight
    inputs = [whole - late for whole, late in zip(backward, weights, strict=True)]
    cost = {
        Op.FORWARD: forward,
        Op.BACKWARD: backward,
        Op.BACKWARD_INPUT: inputs,
        Op.BACKWARD_WEIGHT: weights,
    }
    travels = [transfer] * (plan.stages - 1) if isinstance(transfer, int | float) else list(transfer)
    ranks = len(plan.actions)
    starts: list[list[float]] = [[] for _ in range(ranks)]
    # of a transfer: where its arrival will stand
    ends: list[list[float | tuple[SimulatedChannel, int]]] = [[] for _ in range(ranks)]
    clock = [0.0] * ranks
    channels: dict[tuple[int, int], SimulatedChannel] = defaultdict(lambda: SimulatedChannel([], [], []))
    # receives, by what takes them
    taken: list[dict[tuple[bool, int, int], tuple[SimulatedChannel, int]]] = [{} for _ in range(ranks)]
    ready = deque(range(ranks))
    while ready:
        rank = ready.popleft()
        placed, actions = plan.placement[rank], plan.actions[rank]
        while len(starts[rank]) < len(actions):
            action, now = actions[len(starts[rank])], clock[rank]
            end: float | tuple[SimulatedChannel, int] = now
            if action.op in COMPUTE:
                needed = taken[rank].get((action.op is Op.FORWARD, action.microbatch, action.chunk))
                if needed is not None and action.op is not Op.BACKWARD_WEIGHT:
                    channel, at = needed
                    if at >= len(channel.arrived):
                        break
                    now = max(now, channel.arrived[at])
                end = clock[rank] = now + cost[action.op][placed[action.chunk]]
            elif action.op not in REDUCTIONS:
                sends = action.op in SENDS
                channel = channels[(rank, action.peer) if sends else (action.peer, rank)]
                posts = channel.sent if sends else channel.awaited
                if sends and len(posts) >= in_flight:
                    if len(posts) - in_flight >= len(channel.arrived):
                        break
                    now = clock[rank] = max(now, channel.arrived[len(posts) - in_flight])
                end = channel, len(posts)
                posts.append(now)
                if not sends:
                    taken[rank][action.op is Op.RECV_ACTIVATION, action.microbatch, action.chunk] = end
                if len(channel.arrived) < min(len(channel.sent), len(channel.awaited)):
                    at = len(channel.arrived)
                    leaves = max(channel.sent[at], channel.awaited[at], channel.arrived[-1] if at else 0.0)
                    channel.arrived.append(leaves + travels[message(plan, rank, action)[1]])
                    ready.append(action.peer)
            starts[rank].append(now)
            ends[rank].append(end)
    stuck = {
        rank: actions[len(starts[rank])]
        for rank, actions in enumerate(plan.actions)
        if len(starts[rank]) < len(actions)
    }
    if stuck:
        raise ValueError(
            "deadlock: "
            f"{'; '.join(f'pp rank {rank} waits in {describe(action)}' for rank, action in stuck.items())}"
        )
    rows = []
    for actions, own_starts, own_ends in zip(plan.actions, starts, ends, strict=True):
        over = [end if isinstance(end, float) else end[0].arrived[end[1]] for end in own_ends]
        rows.append(tuple(map(Span, actions, own_starts, over)))
    return Timeline(plan, tuple(rows))


def describe(action: Action) -> str:
    """An action in words, for messages."""
    if action.op in REDUCTIONS:
        return action.op.value
    return f"{action.op.value} of microbatch {action.microbatch}" + (
        f", chunk {action.chunk}" if action.chunk else ""
    )
