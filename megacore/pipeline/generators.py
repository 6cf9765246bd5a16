"""The known schedules: for every rank of a pipeline, the order of its forwards and backwards.

A generator takes the number of ranks, of microbatches and of chunks a rank, and returns a plan of compute
actions; `lower` adds the rest. CONTRIBUTING.md says how to add one.

Below, p is the number of ranks and m that of microbatches.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from megacore.config.parallel import CHUNKS, V_SHAPED
from megacore.pipeline.schedule import Action, Op, Placement, Plan, looped, lower, unsplit, v_shaped

Generator = Callable[..., Plan]  # (ranks, microbatches, chunks), of which the last has a default
Work = tuple[int, int]  # microbatch, chunk


def gpipe(ranks: int, microbatches: int, chunks: int = 1) -> Plan:
    """All forwards, then all backwards in reverse (Huang et al. 2019, GPipe).

    A rank holds every microbatch's activations.
    """
    assert chunks == 1
    forward = [Action(Op.FORWARD, m, 0) for m in range(microbatches)]
    backward = [Action(Op.BACKWARD, m, 0) for m in reversed(range(microbatches))]
    return Plan(tuple(tuple(forward + backward) for _ in range(ranks)), looped(ranks))


def one_forward_one_backward(ranks: int, microbatches: int, chunks: int = 1) -> Plan:
    """1F1B (Narayanan et al. 2019, PipeDream-Flush): rank i holds at most
    min(ranks - i, microbatches) activations.
    """
    assert chunks == 1
    plan = []
    for rank in range(ranks):
        order = [(m, 0) for m in range(microbatches)]
        plan.append(tuple(alternate(order, order, ranks - rank - 1)))
    return Plan(tuple(plan), looped(ranks))


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Plan:
    """Interleaved 1F1B (Narayanan et al. 2021): the bubble is divided by the number of chunks,
    which pass each tensor that often.

    A rank takes p microbatches through its first chunk, then the same ones through its second, and so on;
    then the next p. It holds as many forwards as let the first microbatch reach the loss and come back: rank
    i at most 2(p - i - 1) + (chunks - 1)·p + 1. If p does not divide m, the order is that of the next
    multiple, and what is not there is left out.
    """
    groups = [range(first, first + ranks) for first in range(0, microbatches, ranks)]
    forward = [(m, chunk) for group in groups for chunk in range(chunks) for m in group]
    backward = [(m, chunk) for group in groups for chunk in reversed(range(chunks)) for m in group]
    plan = []
    for rank in range(ranks):
        ahead = (ranks - rank - 1) * (2 if chunks > 1 else 1) + (chunks - 1) * ranks
        plan.append(tuple(a for a in alternate(forward, backward, ahead) if a.microbatch < microbatches))
    return Plan(tuple(plan), looped(ranks, chunks))


def alternate(forward: list[Work], backward: list[Work], ahead: int) -> Iterator[Action]:
    """`ahead` forwards, then a forward and a backward in turn, then the backwards that are left."""
    yield from (Action(Op.FORWARD, *work) for work in forward[:ahead])
    for i, work in enumerate(backward):
        if ahead + i < len(forward):
            yield Action(Op.FORWARD, *forward[ahead + i])
        yield Action(Op.BACKWARD, *work)


def zb_h1(ranks: int, microbatches: int, chunks: int = 1) -> Plan:
    """ZB-H1 (Qi et al. 2023): 1F1B with split backwards, whose weights' half fills
    what was the end of the bubble.

    Rank i leaves the first i of the weights' gradients for later, so every rank holds as much as the first:
    min(p, m) forwards. The bubble is (p - 1)(F + B - W), with the times of forward, input's and weights'
    backward, in place of (p - 1)(F + B + W).
    """
    assert chunks == 1
    plan = []
    for rank in range(ranks):
        late, actions = list[int](), list[Action]()
        for action in one_forward_one_backward(ranks, microbatches).actions[rank]:
            if action.op is Op.FORWARD:
                actions.append(action)
            else:
                actions.append(Action(Op.BACKWARD_INPUT, action.microbatch, 0))
                late.append(action.microbatch)
                if len(late) > rank:
                    actions.append(Action(Op.BACKWARD_WEIGHT, late.pop(0), 0))
        actions += [Action(Op.BACKWARD_WEIGHT, m, 0) for m in late]
        plan.append(tuple(actions))
    return Plan(tuple(plan), looped(ranks))


def zb_v(ranks: int, microbatches: int, chunks: int = 2) -> Plan:
    """ZB-V (Qi et al. 2024): no bubble if the three parts of a chunk's work take equally long and
    2p ≤ m, with the memory of 1F1B.

    A microbatch passes two chunks in a V, so the last loss comes from the first rank. A rank holds at most 2p
    halves of it.
    """
    assert chunks == 2
    return in_v(ranks, microbatches, there=4, back=2, most=2 * ranks, eager=True)


def v_half(ranks: int, microbatches: int, chunks: int = 2) -> Plan:
    """V-Half (Qi et al. 2024): half the bubble of 1F1B with half its memory: a rank
    holds at most 2⌊(p + 2)/2⌋ halves.
    """
    assert chunks == 2
    return in_v(ranks, microbatches, there=2, back=1, most=2 * ((ranks + 2) // 2), eager=False)


def v_min(ranks: int, microbatches: int, chunks: int = 2) -> Plan:
    """V-Min (Qi et al. 2024): two thirds of the bubble of 1F1B with a third of its memory: a rank
    holds at most 2⌊(p + 4)/3⌋ halves.

    If 3 divides p, a pattern's forwards and the next one's backwards would fall on the same times. A pause
    between the two parts them.
    """
    assert chunks == 2
    return in_v(
        ranks,
        microbatches,
        there=1,
        back=1,
        most=2 * ((ranks + 4) // 3),
        eager=False,
        pause=int(ranks % 3 == 0),
    )


def in_v(
    ranks: int, microbatches: int, there: int, back: int, most: int, eager: bool, pause: int = 0
) -> Plan:
    """A plan of two chunks in a V, with split backwards, made from a repeated pattern (Qi
    et al. 2024, "building block").

    In units of one part of a chunk's work, the pattern of a microbatch moves from rank to rank `there` units
    later towards the last rank, and `back` units later towards the first, forward and backward alike, with
    `pause` units between forward and backward; the next pattern begins 6 units later. That gives a rank's
    order of forwards and inputs' backwards, which begin as soon as they can; weights' backwards go where a
    rank would wait otherwise. A rank holds at most `most` forwards. If `eager`, it begins the first chunk of
    later microbatches where it would wait.
    """
    turn = there * (ranks - 1) + 1  # when the last rank begins the second chunk
    loss = turn + back * (ranks - 1) + 1 + pause  # when the first rank begins to go backward
    end = loss + there * (ranks - 1) + 1
    todo = []
    for i in range(ranks):
        j = ranks - 1 - i
        pattern = [(there * i, Op.FORWARD, 0), (turn + back * j, Op.FORWARD, 1)]
        pattern += [(loss + there * i, Op.BACKWARD_INPUT, 1), (end + back * j, Op.BACKWARD_INPUT, 0)]
        repeated = sorted(
            (6 * m + at, k, m) for m in range(microbatches) for k, (at, _, _) in enumerate(pattern)
        )
        todo.append(deque(Action(pattern[k][1], m, pattern[k][2]) for _, k, m in repeated))
    placement, where = v_shaped(ranks), [*range(ranks), *reversed(range(ranks))]
    done: dict[tuple[bool, int, int], int] = {}  # when each stage's forward or backward of a microbatch ends
    late: list[deque[Action]] = [deque() for _ in range(ranks)]  # weights' backwards
    held, plan, now = [0] * ranks, [list[Action]() for _ in range(ranks)], 0
    begun = [0] * ranks  # forwards of the first chunk
    looking = set(range(ranks))  # who may begin something now: others wait for a rank's result

    def can_begin(rank: int, action: Action) -> bool:
        stage, m = placement[rank][action.chunk], action.microbatch
        if action.op is Op.FORWARD:
            room = held[rank] < most - (eager and action.chunk == 0)  # the second chunk always has room
            return room and (stage == 0 or done.get((True, stage - 1, m), now + 1) <= now)
        after = stage == 2 * ranks - 1 or done.get((False, stage + 1, m), now + 1) <= now
        return after and done.get((True, stage, m), now + 1) <= now

    while looking:
        later = set[int]()
        for rank in looking:
            while (
                todo[rank]
                and (head := todo[rank][0]).op is Op.FORWARD
                and head.chunk == 0
                and head.microbatch < begun[rank]
            ):
                todo[rank].popleft()  # it was begun further ahead
            if todo[rank] and can_begin(rank, todo[rank][0]):
                action = todo[rank].popleft()
            elif late[rank]:
                action = late[rank].popleft()
            elif (
                eager
                and begun[rank] < microbatches
                and can_begin(rank, further := Action(Op.FORWARD, begun[rank], 0))
            ):
                action = further
            else:
                continue
            plan[rank].append(action)
            later.add(rank)
            if action.op is Op.BACKWARD_WEIGHT:
                held[rank] -= 1
                continue
            stage, forward = placement[rank][action.chunk], action.op is Op.FORWARD
            done[forward, stage, action.microbatch] = now + 1
            if 0 <= (behind := stage + (1 if forward else -1)) < 2 * ranks:
                later.add(where[behind])
            begun[rank] += forward and action.chunk == 0
            if forward:
                held[rank] += 1
            else:
                late[rank].append(Action(Op.BACKWARD_WEIGHT, action.microbatch, action.chunk))
        looking, now = later, now + 1
    return Plan(tuple(map(tuple, plan)), placement)


GENERATORS: dict[str, Generator] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb_h1": zb_h1,
    "zb_v": zb_v,
    "v_half": v_half,
    "v_min": v_min,
}


def build(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    *,
    shared: Sequence[tuple[int, ...]] = (),
    split: bool = True,
) -> Plan:
    """The lowered plan of a named schedule, which the runtime executes.

    `chunks`: of a rank, by default the schedule's own number. `shared`: see `lower`. Without `split` every
    backward is whole.
    """
    plan = generated(name, ranks, microbatches, chunks)
    return lower(plan if split else unsplit(plan), shared)


@lru_cache(maxsize=256)
def placement(name: str, ranks: int, chunks: int | None = None) -> Placement:
    """The stages that each rank holds under a named schedule, for any number of microbatches."""
    return v_shaped(ranks) if name in V_SHAPED else looped(ranks, CHUNKS[name] if chunks is None else chunks)


def generated(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Plan:
    """The compute actions of a named schedule."""
    generator = GENERATORS[name]
    return generator(ranks, microbatches) if chunks is None else generator(ranks, microbatches, chunks)
