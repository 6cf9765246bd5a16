"""Pipeline schedules as data: the actions of every rank of the pipeline, in order.

The model is split into *stages*, numbered from the embedding to the loss. A plan says which stages a rank
holds; they are its *chunks*. A generator (`generators.py`) returns the compute actions of every rank. `lower`
adds the transfers and reductions. `runtime.py` executes the lowered plan, and tools validate, simulate and
draw the same one: nothing else decides the order.

What a rank does at each action, in the order of its list:

- FORWARD, BACKWARD, BACKWARD_INPUT: it waits for what the action takes from another rank, computes, and
  leaves the result to the send behind it, or to the next chunk of the same rank. For each microbatch and
  chunk a plan has either one BACKWARD, or BACKWARD_INPUT (the gradient of the chunk's input, for which others
  wait) and somewhere behind it BACKWARD_WEIGHT (the gradients of its weights, for which nobody waits). A
  rank's backwards may be of both kinds.
- RECV_…: it posts the receive into a buffer of its own, and goes on. The compute action that takes the
  message waits for it.
- SEND_…: it posts the send, and goes on. It keeps the buffer until the send is complete. For that it waits
  when it posts the send `IN_FLIGHT` places later to the same rank, and at the end of the plan. So at most
  `IN_FLIGHT` buffers wait for a rank that is late.
- REDUCE_…: it waits for the sums over other ranks, which it begins earlier: those of a chunk's buckets after
  its action with `last`.

The messages from one rank to another are a *channel*: they arrive in the order in which they are sent, and
both ranks post them in that order. Channels do not wait for each other, in either direction. On NCCL this
takes a communicator (so a stream) for each
ordered pair of ranks: operations of one communicator run one after the other, so a receive that was posted
ahead would hold up every send behind it, and two ranks that send to each other would hang unless both post
send and receive as one batch. gloo matches messages by the pair of ranks, in order, in both directions at
once.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

# sends of one channel that may be under way: the buffers of one that leaves, and of one that waits
IN_FLIGHT = 2


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
    REDUCE_TIED = "reduce_tied"  # between the ranks whose stages share parameters, such as tied embeddings


BACKWARDS = frozenset({Op.BACKWARD, Op.BACKWARD_INPUT})  # give the gradient of a chunk's input
COMPLETING = frozenset({Op.BACKWARD, Op.BACKWARD_WEIGHT})  # add to the gradients of its weights
COMPUTE = frozenset({Op.FORWARD, *BACKWARDS, *COMPLETING})
SENDS = frozenset({Op.SEND_ACTIVATION, Op.SEND_GRADIENT})
RECEIVES = frozenset({Op.RECV_ACTIVATION, Op.RECV_GRADIENT})
TRANSFERS = SENDS | RECEIVES
REDUCTIONS = frozenset({Op.REDUCE_GRADIENTS, Op.REDUCE_TIED})


@dataclass(frozen=True)
class Action:
    """One action of a rank.

    `microbatch` and `chunk` are -1 for reductions. `peer` is the other rank of a transfer. `last` marks the
    final BACKWARD or BACKWARD_WEIGHT of a chunk. Its gradients are then complete, so their reduction may
    start.
    """

    op: Op
    microbatch: int = -1
    chunk: int = -1
    peer: int = -1
    last: bool = False


Placement = tuple[tuple[int, ...], ...]  # for every rank, the stage of each of its chunks


@dataclass(frozen=True)
class Plan:
    """For every rank of the pipeline, its actions in order, and the stage of each of its chunks; and for
    every parameter that several stages use, those stages.
    """

    actions: tuple[tuple[Action, ...], ...]
    placement: Placement
    shared: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def where(self) -> dict[int, tuple[int, int]]:
        """The rank and chunk of every stage, by stage."""
        return {
            stage: (rank, chunk)
            for rank, stages in enumerate(self.placement)
            for chunk, stage in enumerate(stages)
        }

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.where)

    def shares(self, rank: int) -> bool:
        """Whether a rank holds a parameter that other ranks hold too."""
        holders = ({self.where[stage][0] for stage in stages} for stages in self.shared)
        return any(rank in ranks and len(ranks) > 1 for ranks in holders)

    @property
    def splits(self) -> bool:
        """Whether any backward is split."""
        return any(action.op is Op.BACKWARD_INPUT for actions in self.actions for action in actions)


def looped(ranks: int, chunks: int = 1) -> Placement:
    """Deals stages to the ranks in turn: rank r holds stages r, r + ranks, r +
    2·ranks, … for each of its chunks.
    """
    return tuple(tuple(range(rank, ranks * chunks, ranks)) for rank in range(ranks))


def v_shaped(ranks: int) -> Placement:
    """Deals stages there and back: rank r holds stages r and 2·ranks - 1 - r, so the first
    rank has both ends of the model.
    """
    return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))


def neighbours(plan: Plan, rank: int, chunk: int) -> tuple[int | None, int | None]:
    """The ranks with the stage before a chunk and with the one after it.

    None if there is no such stage, or the same rank holds it.
    """
    stage = plan.placement[rank][chunk]
    before, after = (plan.where[s][0] if s in plan.where else None for s in (stage - 1, stage + 1))
    return None if before == rank else before, None if after == rank else after


def message(plan: Plan, rank: int, action: Action) -> tuple[str, int, int]:
    """A name for a transfer's content, the same for sender and receiver: kind, boundary (the
    stage below it) and microbatch.
    """
    stage = plan.placement[rank][action.chunk]
    kind = "activation" if action.op in (Op.SEND_ACTIVATION, Op.RECV_ACTIVATION) else "gradient"
    boundary = stage if action.op in (Op.SEND_ACTIVATION, Op.RECV_GRADIENT) else stage - 1
    return kind, boundary, action.microbatch


def forward_only(placement: Placement, microbatches: int) -> Plan:
    """A lowered plan that only runs forward, for validation: at each tick every
    microbatch moves one stage on.
    """
    ranks = []
    for stages in placement:
        ticks = sorted(
            (m + stage, -stage, m, chunk) for chunk, stage in enumerate(stages) for m in range(microbatches)
        )
        ranks.append(tuple(Action(Op.FORWARD, m, chunk) for _, _, m, chunk in ticks))
    return lower(Plan(tuple(ranks), placement))


def unsplit(plan: Plan) -> Plan:
    """The plan of compute actions with every backward whole, where its BACKWARD_INPUT was: for
    layers that cannot split theirs.
    """
    whole = {Op.BACKWARD_INPUT: Op.BACKWARD}
    rows = (
        (Action(whole.get(a.op, a.op), a.microbatch, a.chunk) for a in own if a.op is not Op.BACKWARD_WEIGHT)
        for own in plan.actions
    )
    return Plan(tuple(tuple(row) for row in rows), plan.placement)


def lower(plan: Plan, shared: Sequence[tuple[int, ...]] = ()) -> Plan:
    """Adds transfers to a plan of compute actions, and reductions at the end.

    `shared`: for every parameter that stages use together, these stages; the ranks that hold it sum its
    gradient last.

    A send follows the action that computes its message. A receive is posted one compute action ahead of the
    action that takes its message, so that the message travels while the rank computes; and earlier where the
    other rank sends this message before one that is taken earlier. Chunks of one rank need no message.
    """
    plan = replace(plan, shared=tuple(shared))
    sent: dict[tuple[int, int], list[Hashable]] = defaultdict(list)  # by channel, in order
    sends: list[list[list[Action]]] = []  # of every rank, behind each compute action
    for rank, actions in enumerate(plan.actions):
        sends.append([_transfers(plan, rank, action, sending=True) for action in actions])
        for send in (send for behind in sends[-1] for send in behind):
            sent[rank, send.peer].append(message(plan, rank, send))
    lowered = []
    for rank, actions in enumerate(plan.actions):
        receives = _posted(plan, rank, sent)
        final = {action.chunk: i for i, action in enumerate(actions) if action.op in COMPLETING}
        out: list[Action] = []
        for i, action in enumerate(actions):
            completes = action.op in COMPLETING and final[action.chunk] == i
            out += [
                *receives[i],
                Action(action.op, action.microbatch, action.chunk, last=completes),
                *sends[rank][i],
            ]
        reductions = [Action(Op.REDUCE_GRADIENTS), *([Action(Op.REDUCE_TIED)] if plan.shares(rank) else [])]
        lowered.append((*out, *(reductions if final else [])))
    return replace(plan, actions=tuple(lowered))


def _transfers(plan: Plan, rank: int, action: Action, *, sending: bool) -> list[Action]:
    """The message that a compute action gives to another rank, or takes from one, if there is one."""
    before, after = neighbours(plan, rank, action.chunk)
    forward = action.op is Op.FORWARD
    if not forward and action.op not in BACKWARDS:
        return []
    peer = after if forward == sending else before
    op = (
        (Op.SEND_ACTIVATION if sending else Op.RECV_ACTIVATION)
        if forward
        else (Op.SEND_GRADIENT if sending else Op.RECV_GRADIENT)
    )
    return [] if peer is None else [Action(op, action.microbatch, action.chunk, peer)]


def _posted(plan: Plan, rank: int, sent: dict[tuple[int, int], list[Hashable]]) -> list[list[Action]]:
    """The receives that a rank posts before each of its compute actions."""
    actions = plan.actions[rank]
    posts: list[list[Action]] = [[] for _ in actions]
    # by sender, with the place where each is due
    channels: dict[int, list[tuple[int, Action]]] = defaultdict(list)
    for i, action in enumerate(actions):
        for receive in _transfers(plan, rank, action, sending=False):
            channels[receive.peer].append((max(0, i - 1), receive))
    for sender, receives in channels.items():
        place = {content: at for at, content in enumerate(sent[sender, rank])}
        receives.sort(key=lambda due: place.get(message(plan, rank, due[1]), len(place)))
        due = len(actions)
        for at, receive in reversed(receives):
            due = min(due, at)
            posts[due].insert(0, receive)
    return posts
