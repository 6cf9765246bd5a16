"""Bytes of activations when a rank has most: those of its stages, and of the
microbatches whose forwards wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import le, mul

from megacore.config.implied import splits_backward
from megacore.config.schema import Config
from megacore.pipeline.generators import GENERATORS, generated
from megacore.pipeline.partition import placement_of, plan_of, stage_layers
from megacore.pipeline.schedule import IN_FLIGHT, Action, Op, Plan, unsplit
from megacore.tools.choices.activations import StageActivations, stage_activations
from megacore.tools.choices.layer_cost import BALANCED, Loads
from megacore.tools.choices.partition import partitioned
from megacore.tools.planner.model_flow import flow_of
from megacore.tools.schedules.simulate import describe

# rounds of the pipeline's ranks, after which a rank holds as much as it ever will, except under gpipe
FILLED = 2


@dataclass(frozen=True)
class Peak:
    """The bytes of a rank's activations when they are most."""

    kept: int  # of forwards that wait for their backward, or for their weights' gradients
    logits: int  # and losses, with what else the last layer keeps
    working: int  # that the action needs while it runs
    transfers: int  # messages under way
    moment: str  # the action
    live: tuple[int, ...]  # forwards of each chunk that wait, with the action's own
    waiting: tuple[int, ...]  # of each chunk, for weights' gradients

    @property
    def total(self) -> int:
        """The bytes of all kinds."""
        return self.kept + self.logits + self.working + self.transfers


def rank_activations(config: Config, loads: Loads = BALANCED) -> list[Peak]:
    """The peak of each rank of the pipeline."""
    config = partitioned(config)
    costs, peaks = stage_activations(config, stage_layers(config), loads), []
    for stages, states, message in zip(
        placement_of(config), fullest(config), transfer_buffers(config), strict=True
    ):
        own = [costs[stage] for stage in stages]
        sizes = [*(cost.kept for cost in own), *(cost.waiting for cost in own)]

        def held(state: State, sizes: Sequence[int] = sizes, own: Sequence[StageActivations] = own) -> int:
            return own[state.action.chunk].at_work[state.action.op] + sum(map(mul, state.held, sizes))

        state = max(states, key=held)
        at_work = own[state.action.chunk].at_work[state.action.op]
        logits = sum(n * cost.logits for n, cost in zip(state.live, own, strict=True))
        peaks.append(
            Peak(
                held(state) - at_work - logits,
                logits,
                at_work,
                message,
                describe(state.action),
                state.live,
                state.waiting,
            )
        )
    return peaks


def transfer_buffers(config: Config) -> list[int]:
    """Bytes of the messages that each rank of the pipeline has under way: to each neighbour as many
    as may be, and one that arrives.
    """
    config = partitioned(config)
    placement, flow = placement_of(config), flow_of(config)
    holder = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
    found = []
    for rank, stages in enumerate(placement):
        cuts = {
            (holder[other], min(stage, other))
            for stage in stages
            for other in (stage - 1, stage + 1)
            if other in holder
        }
        away = {(peer, cut) for peer, cut in cuts if peer != rank}
        largest = max((flow.message_bytes(config, cut) for _, cut in away), default=0)
        found.append(largest * (IN_FLIGHT * len({peer for peer, _ in away}) + 1) if away else 0)
    return found


@dataclass(frozen=True)
class State:
    """What a rank of the pipeline holds while an action runs: of each chunk the live forwards, and those
    between the two parts of a split backward.
    """

    action: Action
    live: tuple[int, ...]
    waiting: tuple[int, ...]

    @property
    def held(self) -> tuple[int, ...]:
        """Both."""
        return self.live + self.waiting

    @property
    def kind(self) -> tuple[Op, int]:
        """What it does, in which chunk."""
        return self.action.op, self.action.chunk

    def holds_no_more_than(self, other: "State") -> bool:
        """Whether `other`, of the same kind, has at least as much of everything."""
        return self.kind == other.kind and all(map(le, self.held, other.held))


def fullest(config: Config) -> list[list[State]]:
    """For every rank of a step's plan, the few states in which it holds most: a search asks for thousands."""
    parallel = config.parallel
    if parallel.schedule not in GENERATORS:  # a plan of its own
        return states_of(plan_of(partitioned(config)))
    if parallel.schedule == "gpipe":
        count = config.num_microbatches
        return [
            [
                State(Action(Op.FORWARD, count - 1, 0), (count,), (0,)),
                State(Action(Op.BACKWARD, 0, 0), (count,), (0,)),
            ]
            for _ in range(parallel.pipeline)
        ]
    count = min(config.num_microbatches, FILLED * parallel.pipeline)
    return _fullest(parallel.schedule, parallel.pipeline, count, config.chunks, splits_backward(config))


@lru_cache(maxsize=4096)
def _fullest(schedule: str, ranks: int, microbatches: int, chunks: int, split: bool) -> list[list[State]]:
    plan = generated(schedule, ranks, microbatches, chunks)
    return states_of(plan if split else unsplit(plan))


def states_of(plan: Plan) -> list[list[State]]:
    """For every rank the states of which no other of the same kind holds more, the first of equal ones."""
    found = []
    for stages, actions in zip(plan.placement, plan.actions, strict=True):
        divided = {(a.microbatch, a.chunk) for a in actions if a.op is Op.BACKWARD_INPUT}
        live, waiting, states = [0] * len(stages), [0] * len(stages), dict[tuple[object, ...], State]()
        for action in actions:
            c = action.chunk
            if action.op is Op.FORWARD:
                live[c] += 1
            elif action.op not in (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT):
                continue
            states.setdefault((action.op, c, *live, *waiting), State(action, tuple(live), tuple(waiting)))
            if action.op is Op.BACKWARD_INPUT:
                live[c], waiting[c] = live[c] - 1, waiting[c] + 1
            elif action.op is not Op.FORWARD:
                held = waiting if (action.microbatch, c) in divided else live
                held[c] -= 1
        found.append(_maximal(list(states.values())))
    return found


def _maximal(states: Sequence[State]) -> list[State]:
    """Those of different states of which no other of the same kind holds more, in their order."""
    kinds: dict[tuple[Op, int], dict[int, State]] = {}
    # who holds more of all comes first
    for at in sorted(range(len(states)), key=lambda at: -sum(states[at].live + states[at].waiting)):
        kept = kinds.setdefault(states[at].kind, {})
        if not any(states[at].holds_no_more_than(other) for other in kept.values()):
            kept[at] = states[at]
    return [states[at] for at in sorted(at for kept in kinds.values() for at in kept)]
