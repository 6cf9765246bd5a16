"""Compares what ranks post to the communicators that they share.

A difference would make a run hang, or mix up its data.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from megacore.tools.choices.meta_watch import Call

Stream = Sequence[Call]  # what a rank posts, in order


def mismatches(streams: Mapping[int, Stream]) -> list[str]:
    """One line for each communicator whose members disagree, and one if the ranks
    wait for each other in a circle.

    `streams` are the calls of some ranks. Of a communicator only these are compared: each of them must post
    the same collectives in the same order, and of two neighbours one must send, in order, what the other
    receives.
    """
    found = [*_collectives(streams), *_transfers(streams)]
    return found or _deadlocks(streams)


def _collectives(streams: Mapping[int, Stream]) -> list[str]:
    posted: dict[tuple[int, ...], dict[int, list[Call]]] = defaultdict(dict)
    for rank, calls in streams.items():
        own: dict[tuple[int, ...], list[Call]] = defaultdict(list)
        for call in calls:
            if call.peer < 0:
                own[call.ranks].append(call)
        for ranks, sequence in own.items():
            posted[ranks][rank] = sequence
    found = []
    for ranks, by_rank in posted.items():
        members = [rank for rank in ranks if rank in streams]
        first = members[0]
        for other in members[1:]:
            pair = by_rank.get(first, []), by_rank.get(other, [])
            if line := _difference(first, other, *pair, named(ranks)):
                found.append(line)
    return found


def _difference(first: int, other: int, a: Sequence[Call], b: Sequence[Call], where: str) -> str | None:
    """The first place where two ranks' collectives differ, in words."""

    def same(x: Call, y: Call) -> bool:
        # parts of an exchange are unequal
        alike = x.operation == y.operation == "exchange" or x.elements == y.elements
        return (x.operation, x.dtype) == (y.operation, y.dtype) and alike

    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if not same(x, y)), None)
    if at is not None:
        return (
            f"{where}: its collective number {at + 1} is {a[at]} on rank {first} ({a[at].moment}), "
            f"and {b[at]} on rank {other} ({b[at].moment})"
        )
    if len(a) == len(b):
        return None
    (longer, calls), (shorter, count) = (
        ((first, a), (other, len(b))) if len(a) > len(b) else ((other, b), (first, len(a)))
    )
    call = calls[count]
    return (
        f"{where}: rank {shorter} posts {count} collectives, and rank {longer} waits for it in one "
        f"more, {call} ({call.moment})"
    )


def _transfers(streams: Mapping[int, Stream]) -> list[str]:
    """Checks that the k-th send from one rank to another fits the other's k-th receive."""
    sent: dict[tuple[int, int], list[Call]] = defaultdict(list)
    awaited: dict[tuple[int, int], list[Call]] = defaultdict(list)
    for rank, calls in streams.items():
        for call in calls:
            if call.peer in streams:
                (sent[rank, call.peer] if call.operation == "send" else awaited[call.peer, rank]).append(call)
    found = []
    for sender, receiver in sorted(sent.keys() | awaited.keys()):
        sends, receives = sent[sender, receiver], awaited[sender, receiver]
        for number, (send, receive) in enumerate(zip(sends, receives, strict=False), 1):
            if (send.elements, send.dtype) != (receive.elements, receive.dtype):
                pair = f"{send} ({send.moment}), and {receive} ({receive.moment})"
                found.append(f"transfer number {number} from rank {sender} to rank {receiver}: {pair}")
                break
        else:
            if len(sends) != len(receives):
                more, call = (
                    ("sends", sends[len(receives)])
                    if len(sends) > len(receives)
                    else ("awaits", receives[len(sends)])
                )
                rank, peer = (sender, receiver) if more == "sends" else (receiver, sender)
                found.append(
                    f"rank {rank} {more} one transfer more than rank {peer} knows of: {call} ({call.moment})"
                )
    return found


def _deadlocks(streams: Mapping[int, Stream]) -> list[str]:
    """Lets every rank wait in each collective for all of its communicator's ranks, and says where they
    stand if they come no further.

    Transfers are left out: they are posted and waited for by the plan, which `tools.schedules.validate`
    proves to end.
    """
    runs = {rank: [call for call in calls if call.peer < 0] for rank, calls in streams.items()}
    at = dict.fromkeys(runs, 0)
    # collectives that a rank has come to, by communicator
    come: dict[tuple[int, tuple[int, ...]], int] = defaultdict(int)
    ended: dict[tuple[int, tuple[int, ...]], int] = defaultdict(int)
    waiting = sorted(runs)
    while waiting:
        moved = False
        for rank in waiting:
            while at[rank] < len(runs[rank]):
                ranks = runs[rank][at[rank]].ranks
                number = come[rank, ranks] = ended[rank, ranks] + 1
                if any(come[other, ranks] < number for other in ranks if other in streams):
                    break
                ended[rank, ranks] = number
                at[rank] += 1
                moved = True
        waiting = [rank for rank in waiting if at[rank] < len(runs[rank])]
        if not moved and waiting:
            heads = ((rank, runs[rank][at[rank]]) for rank in waiting)
            return [
                "deadlock: "
                + "; ".join(
                    f"rank {rank} waits in {call} over {named(call.ranks)} ({call.moment})"
                    for rank, call in heads
                )
            ]
    return []


def named(ranks: Sequence[int]) -> str:
    """A communicator in words."""
    if len(ranks) <= 4:
        return f"ranks {', '.join(map(str, ranks))}"
    return f"{len(ranks)} ranks {ranks[0]}, {ranks[1]}, … {ranks[-1]}"
