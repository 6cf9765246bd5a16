"""Pipeline schedules as data: the actions of every rank of the pipeline, in order.

The model is split into *stages*, numbered from the embedding to the loss. A plan says which stages a rank holds; they are its
*chunks*. A generator (`GENERATORS`) returns the compute actions of every rank. `lower` adds the transfers and reductions. The same
lowered plan is validated (`validate.py`), simulated (`simulate.py`), drawn (`plot.py`) and executed (`runtime.py`): nothing else
decides the order.

To add a schedule: write a generator, add it to `GENERATORS`; the tests validate and run every entry.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

IN_FLIGHT = 2  # sends to one rank that may be under way: the buffers of one that leaves, and of one that waits


class Op(Enum):
    """The kind of an action. The runtime has one method for each op, and the simulator one rule."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"  # the gradient of a chunk's input, and of its small parameters
    BACKWARD_WEIGHT = "backward_weight"  # the gradients of its weights, from what BACKWARD_INPUT left
    SEND_ACTIVATION = "send_activation"  # to the rank that holds the next stage
    RECV_ACTIVATION = "recv_activation"
    SEND_GRADIENT = "send_gradient"  # to the rank that holds the stage before
    RECV_GRADIENT = "recv_gradient"
    REDUCE_GRADIENTS = "reduce_gradients"  # over the data-parallel ranks
    REDUCE_TIED = "reduce_tied"  # between the ranks that share the embedding


TRANSFERS = frozenset({Op.SEND_ACTIVATION, Op.RECV_ACTIVATION, Op.SEND_GRADIENT, Op.RECV_GRADIENT})


@dataclass(frozen=True)
class Action:
    """One action of a rank.

    `microbatch` and `chunk` are -1 for reductions. `peer` is the other rank of a transfer. `last` marks
    the final backward of a chunk. Its gradients are then complete, so their reduction may start.
    """

    op: Op
    microbatch: int = -1
    chunk: int = -1
    peer: int = -1
    last: bool = False


Placement = tuple[tuple[int, ...], ...]  # for every rank, the stage of each of its chunks


@dataclass(frozen=True)
class Plan:
    """For every rank of the pipeline, its actions in order, and the stage of each of its chunks."""

    actions: tuple[tuple[Action, ...], ...]
    placement: Placement

    @cached_property
    def where(self) -> dict[int, tuple[int, int]]:
        """The rank and chunk of every stage, by stage."""
        return {stage: (rank, chunk) for rank, stages in enumerate(self.placement) for chunk, stage in enumerate(stages)}

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.where)


def looped(ranks: int, chunks: int = 1) -> Placement:
    """Deals stages to the ranks in turn: rank r holds stages r, r + ranks, r + 2·ranks, … for each of its chunks."""
    return tuple(tuple(range(rank, ranks * chunks, ranks)) for rank in range(ranks))


def gpipe(ranks: int, microbatches: int, chunks: int = 1) -> Plan:
    """All forwards, then all backwards in reverse (Huang et al. 2019, GPipe). A rank holds every microbatch's activations."""
    assert chunks == 1
    forward = [Action(Op.FORWARD, m, 0) for m in range(microbatches)]
    backward = [Action(Op.BACKWARD, m, 0) for m in reversed(range(microbatches))]
    return Plan(tuple(tuple(forward + backward) for _ in range(ranks)), looped(ranks))


def one_forward_one_backward(ranks: int, microbatches: int, chunks: int = 1) -> Plan:
    """1F1B (Narayanan et al. 2019, PipeDream-Flush): rank i holds at most min(ranks - i, microbatches) activations."""
    assert chunks == 1
    plan = []
    for rank in range(ranks):
        warmup = min(ranks - rank - 1, microbatches)
        actions = [Action(Op.FORWARD, m, 0) for m in range(warmup)]
        for m in range(microbatches - warmup):
            actions += [Action(Op.FORWARD, warmup + m, 0), Action(Op.BACKWARD, m, 0)]
        actions += [Action(Op.BACKWARD, m, 0) for m in range(microbatches - warmup, microbatches)]
        plan.append(tuple(actions))
    return Plan(tuple(plan), looped(ranks))


GENERATORS: dict[str, Callable[[int, int, int], Plan]] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def build(name: str, ranks: int, microbatches: int, chunks: int = 1, *, tied: bool = False) -> Plan:
    """The lowered plan of a named schedule, which the runtime executes.

    `tied`: the embedding is shared between the first and the last stage.
    """
    return lower(GENERATORS[name](ranks, microbatches, chunks), tied=tied)


def placement(name: str, ranks: int, chunks: int = 1) -> Placement:
    """The stages that each rank holds under a named schedule, for any number of microbatches."""
    return GENERATORS[name](ranks, 1, chunks).placement


def forward_only(placement: Placement, microbatches: int) -> Plan:
    """A lowered plan that only runs forward, for validation: at each tick every microbatch moves one stage on."""
    ranks = []
    for stages in placement:
        ticks = sorted((m + stage, -stage, m, chunk) for chunk, stage in enumerate(stages) for m in range(microbatches))
        ranks.append(tuple(Action(Op.FORWARD, m, chunk) for _, _, m, chunk in ticks))
    return lower(Plan(tuple(ranks), placement))


def lower(plan: Plan, *, tied: bool = False) -> Plan:
    """Adds receives before compute actions, sends after them, and reductions at the end.

    Between two compute actions all transfers are adjacent, and a maximal run of adjacent transfers is one batch. So a rank's sends to
    the next stage and receives from it are posted together, and 1F1B cannot deadlock. Chunks of one rank need no message.
    """
    ends = (plan.where[0][0], plan.where[plan.stages - 1][0])
    lowered = []
    for rank, actions in enumerate(plan.actions):
        out: list[Action] = []
        final = {a.chunk: i for i, a in enumerate(actions) if a.op is Op.BACKWARD}
        for i, action in enumerate(actions):
            before, after = neighbours(plan, rank, action.chunk)
            m, chunk = action.microbatch, action.chunk
            if action.op is Op.FORWARD:
                out += [Action(Op.RECV_ACTIVATION, m, chunk, before)] if before is not None else []
                out.append(action)
                out += [Action(Op.SEND_ACTIVATION, m, chunk, after)] if after is not None else []
            elif action.op is Op.BACKWARD:
                out += [Action(Op.RECV_GRADIENT, m, chunk, after)] if after is not None else []
                out.append(Action(Op.BACKWARD, m, chunk, last=final[chunk] == i))
                out += [Action(Op.SEND_GRADIENT, m, chunk, before)] if before is not None else []
        if final:
            out.append(Action(Op.REDUCE_GRADIENTS))
            if tied and ends[0] != ends[1] and rank in ends:
                out.append(Action(Op.REDUCE_TIED))
        lowered.append(tuple(out))
    return Plan(tuple(lowered), plan.placement)


def neighbours(plan: Plan, rank: int, chunk: int) -> tuple[int | None, int | None]:
    """The ranks with the stage before a chunk and with the one after it. None if there is no such stage, or the same rank holds it."""
    stage = plan.placement[rank][chunk]
    before, after = (plan.where[s][0] if s in plan.where else None for s in (stage - 1, stage + 1))
    return None if before == rank else before, None if after == rank else after
