"""Searches for a schedule: given what a stage's actions cost and how much a rank may hold, the
order of actions that is fastest.

`search` tries every known schedule that fits, and builds others: action by action it takes what can begin
first, under a policy (`Policy`) for how far forwards run ahead, what comes first, and when a weight's
gradient may fill a gap. It takes the plan that is fastest under `simulate`, and improves a short one by
moving single actions. No step depends on time or chance, so every rank finds the same plan.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import product

from megacore.config.parallel import CHUNKS
from megacore.pipeline.generators import GENERATORS, generated
from megacore.pipeline.schedule import Action, Op, Placement, Plan, lower, unsplit
from megacore.tools.choices.held import peak_held
from megacore.tools.schedules.simulate import simulate
from megacore.tools.schedules.validate import validate


@dataclass(frozen=True)
class Costs:
    """What the actions of each stage take, in any one unit of time, and what a forward leaves to
    hold, in any one unit of memory.
    """

    forward: tuple[float, ...]
    inputs: tuple[float, ...]  # the backward of inputs
    weights: tuple[float, ...]  # the backward of weights
    transfer: float = 0.0  # a message
    sizes: tuple[float, ...] = ()  # held from the forward until the backward; () for 1 each
    waiting: tuple[float, ...] = ()  # held between the two parts of a backward; () for as much as before

    @property
    def backward(self) -> list[float]:
        """The whole backward of each stage."""
        return [a + b for a, b in zip(self.inputs, self.weights, strict=True)]

    def held(self, plan: Plan) -> list[float]:
        """What each rank holds at most."""
        sizes = self.sizes or (1.0,) * plan.stages
        return peak_held(plan, sizes, self.waiting or sizes)

    def makespan(self, plan: Plan) -> float:
        """The time of a lowered plan."""
        return simulate(plan, self.forward, self.backward, self.transfer, self.weights).makespan


@dataclass(frozen=True)
class Policy:
    """How a plan is built.

    `ahead`: how many forwards a rank does before their backwards, for itself and each rank behind it (None:
    as many as it may hold).
    `patience`: how long a rank waits for a forward or an input's backward before it fills the gap, in parts
    of what would fill it.
    `forward_first`: where both could begin, the forward does. `split`: backwards are split.
    """

    ahead: float | None = None
    patience: float = 0.5
    forward_first: bool = False
    split: bool = True


POLICIES = [Policy(*row) for row in product((None, 1.0, 1.75, 2.0), (0.1, 0.3, 1.0), (False, True))]
# of a plan that policies are tried on; a longer one gets the policy that is best for fewer microbatches
MOST_ACTIONS = 3000
MOST_MOVES = 120  # actions of a plan that is improved by moving single ones


class Builder:
    """Builds a plan of compute actions: at each step the rank that can begin earliest
    takes its next action.
    """

    def __init__(
        self, placement: Placement, microbatches: int, costs: Costs, limit: float, policy: Policy
    ) -> None:
        self.placement, self.microbatches, self.costs, self.policy = placement, microbatches, costs, policy
        ranks, stages = len(placement), sum(map(len, placement))
        self.where = {stage: rank for rank, own in enumerate(placement) for stage in own}
        self.last = stages - 1
        self.sizes = costs.sizes or (1.0,) * stages
        self.waiting = costs.waiting or self.sizes
        self.backward = costs.inputs if policy.split else tuple(costs.backward)
        whole = [sum(self.sizes[stage] for stage in own) for own in placement]
        self.limit = [max(limit, size) for size in whole]
        most = microbatches * stages
        self.ahead = [
            most if policy.ahead is None else max(1, round(policy.ahead * (ranks - rank) * len(own)))
            for rank, own in enumerate(placement)
        ]
        self.open = [0] * ranks  # forwards whose backward has not begun
        # when what a stage's forward or backward takes is there
        self.arrived = {(True, 0, m): 0.0 for m in range(microbatches)}
        self.done = {(forward, stage): 0 for forward in (True, False) for stage in range(stages)}
        self.free, self.held = [0.0] * ranks, [0.0] * ranks
        # weights' backwards: stage and microbatch
        self.late: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        self.plan: list[list[Action]] = [[] for _ in range(ranks)]

    def candidates(self, rank: int) -> Iterator[tuple[float, bool, int]]:
        """When each next forward and backward of a rank could begin; whether it is a forward; its stage."""
        for stage in self.placement[rank]:
            for forward in (True, False):
                arrived = self.arrived.get((forward, stage, self.done[forward, stage]))
                if forward and (
                    self.open[rank] >= self.ahead[rank]
                    or self.held[rank] + self._room(rank, stage) > self.limit[rank] + 1e-9
                ):
                    continue
                if arrived is not None:
                    yield max(arrived, self.free[rank]), forward, stage

    def _room(self, rank: int, stage: int) -> float:
        """What must be free for a forward: its own size, and that of the rank's later stages, through
        which it must pass to be freed.
        """
        return sum(self.sizes[own] for own in self.placement[rank] if own >= stage)

    def choice(self, rank: int) -> tuple[float, Op, int] | None:
        """What a rank does next, and when: start, op, stage.

        None where it waits for a message that nobody has sent yet.
        """
        free, policy, best = self.free[rank], self.policy, None
        for start, forward, stage in self.candidates(rank):
            preferred = forward == policy.forward_first
            delay = start - (policy.patience * self.costs.forward[stage] if preferred else 0.0)
            key = (max(delay, free), not preferred, -stage)
            if best is None or key < best[0]:
                best = (
                    key,
                    start,
                    Op.FORWARD if forward else (Op.BACKWARD_INPUT if policy.split else Op.BACKWARD),
                    stage,
                )
        if self.late[rank]:
            stage, _ = self.late[rank][0]
            if best is None or best[1] > free + policy.patience * self.costs.weights[stage]:
                return free, Op.BACKWARD_WEIGHT, stage
        return None if best is None else best[1:]

    def take(self, rank: int, start: float, op: Op, stage: int) -> set[int]:
        """Does it; returns the ranks for which something changed."""
        chunk = self.placement[rank].index(stage)
        if op is Op.BACKWARD_WEIGHT:
            _, m = self.late[rank].pop(0)
            self.free[rank] = start + self.costs.weights[stage]
            self.held[rank] -= self.waiting[stage]
            self.plan[rank].append(Action(op, m, chunk))
            return {rank}
        forward = op is Op.FORWARD
        m = self.done[forward, stage]
        self.done[forward, stage] += 1
        end = self.free[rank] = start + (self.costs.forward if forward else self.backward)[stage]
        self.open[rank] += 1 if forward else -1
        if forward:
            self.held[rank] += self.sizes[stage]
        elif op is Op.BACKWARD:
            self.held[rank] -= self.sizes[stage]
        else:
            self.held[rank] += self.waiting[stage] - self.sizes[stage]
            self.late[rank].append((stage, m))
        self.plan[rank].append(Action(op, m, chunk))
        after = stage + 1 if forward else stage - 1
        if forward and stage == self.last:
            self.arrived[False, stage, m] = end
        elif after in self.where:
            self.arrived[forward, after, m] = end + (
                self.costs.transfer if self.where[after] != rank else 0.0
            )
            return {rank, self.where[after]}
        return {rank}

    def build(self) -> Plan | None:
        """The plan, or None if the ranks come to wait for each other, each with as much as it may hold."""
        ranks = len(self.placement)
        left = 2 * self.microbatches * len(self.where) + (
            self.microbatches * len(self.where) if self.policy.split else 0
        )
        choices = [self.choice(rank) for rank in range(ranks)]
        queue = [(choice[0], rank, 0) for rank, choice in enumerate(choices) if choice is not None]
        heapify(queue)
        version = [0] * ranks
        while queue:
            _, rank, number = heappop(queue)
            choice = choices[rank]
            if number != version[rank] or choice is None:
                continue
            left -= 1
            for other in self.take(rank, *choice):
                version[other] += 1
                choices[other] = new = self.choice(other)
                if new is not None:
                    heappush(queue, (new[0], other, version[other]))
        return None if left else Plan(tuple(map(tuple, self.plan)), self.placement)


Maker = Callable[[int], Plan | None]  # from the number of microbatches


def search(
    placements: list[Placement], microbatches: int, costs: Costs, limit: float, *, split: bool = True
) -> Plan:
    """The fastest plan found, of compute actions, for one of the placements, which have equally many stages.

    No rank holds more than `limit`, or, where that is less, than one microbatch in all of its chunks.

    It is as fast as the best of `GENERATORS` within the limit, or faster. (Of a plan with more than
    `MOST_ACTIONS` this is known for a step of fewer microbatches, and the plan repeats what is best there.)
    """
    makers = [maker for placement in placements for maker in _makers(placement, costs, limit, split)]
    ranks, stages = len(placements[0]), sum(map(len, placements[0]))
    few = microbatches
    while 3 * few * stages > MOST_ACTIONS and few >= 4 * ranks:
        few -= ranks
    scored = []
    for number, maker in enumerate(makers):
        plan = maker(few)
        span = None if plan is None else _span(plan, costs, limit)
        if span is not None:
            scored.append((span, number))
    for _, number in sorted(scored):
        plan = makers[number](microbatches)
        if plan is not None and (few == microbatches or _span(plan, costs, limit) is not None):
            return _improved(plan, microbatches, costs, limit)
    if split:  # with recomputation, what waits for a weight's gradient may alone be more than the limit
        return search(placements, microbatches, costs, limit, split=False)
    raise ValueError(f"no plan holds at most {limit:g}")


def _makers(placement: Placement, costs: Costs, limit: float, split: bool) -> Iterator[Maker]:
    """The known schedules of a placement, and those of every policy."""
    ranks, chunks = len(placement), len(placement[0])
    for name in GENERATORS:
        if fits(name, chunks) and generated(name, ranks, 1, chunks).placement == placement:
            yield partial(_known, name, ranks, chunks, split)
    for policy in POLICIES:
        own = Policy(policy.ahead, policy.patience, policy.forward_first, split)
        yield partial(_made, placement, costs, limit, own)


def fits(name: str, chunks: int) -> bool:
    """Whether a known schedule can have so many chunks a rank."""
    return chunks == CHUNKS[name] or (name == "interleaved" and chunks > CHUNKS[name])


def _known(name: str, ranks: int, chunks: int, split: bool, microbatches: int) -> Plan:
    plan = generated(name, ranks, microbatches, chunks)
    return plan if split else unsplit(plan)


def _made(placement: Placement, costs: Costs, limit: float, policy: Policy, microbatches: int) -> Plan | None:
    return Builder(placement, microbatches, costs, limit, policy).build()


def _span(plan: Plan, costs: Costs, limit: float) -> float | None:
    """The time of a plan, or None if it holds too much or hangs."""
    sizes = costs.sizes or (1.0,) * plan.stages
    least = [max(limit, sum(sizes[stage] for stage in stages)) for stages in plan.placement]
    if any(held > most + 1e-9 for held, most in zip(costs.held(plan), least, strict=True)):
        return None
    try:
        return costs.makespan(lower(plan))
    except ValueError:
        return None


def _improved(plan: Plan, microbatches: int, costs: Costs, limit: float) -> Plan:
    """A plan, improved by moving single actions to other places of their rank, as
    long as one makes it faster.
    """
    best = _span(plan, costs, limit)
    if best is None or sum(map(len, plan.actions)) > MOST_MOVES:
        return plan
    for _ in range(3):
        before = best
        for rank, actions in enumerate(plan.actions):
            for at, to in product(range(len(actions)), repeat=2):
                row = list(plan.actions[rank])
                row.insert(to, row.pop(at))
                moved = Plan((*plan.actions[:rank], tuple(row), *plan.actions[rank + 1 :]), plan.placement)
                if abs(at - to) > 6 or not _in_order(row):
                    continue
                span = _span(moved, costs, limit)
                if span is not None and span < best - 1e-9 * best and _holds(moved, microbatches):
                    plan, best = moved, span
        if best == before:
            break
    return plan


def _in_order(row: list[Action]) -> bool:
    """Whether each microbatch's actions on a rank follow each other in a chunk as they must."""
    rank_of = {Op.FORWARD: 0, Op.BACKWARD: 1, Op.BACKWARD_INPUT: 1, Op.BACKWARD_WEIGHT: 2}
    last: dict[tuple[int, int], int] = {}
    for action in row:
        key = action.microbatch, action.chunk
        if rank_of[action.op] < last.get(key, 0):
            return False
        last[key] = rank_of[action.op]
    return True


def _holds(plan: Plan, microbatches: int) -> bool:
    try:
        validate(lower(plan), microbatches)
    except ValueError:
        return False
    return True
