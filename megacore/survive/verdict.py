"""Finds in the ledgers of all ranks which rank holds up the others, and says it in one sentence."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megacore.distributed.processes import ENDED, STOPPED
from megacore.survive.ledger import FOR_DEVICE

SHOWN = 4  # ranks named one by one


@dataclass(frozen=True)
class Seat:
    """Where a rank runs."""

    rank: int
    host: str
    pid: int
    place: str  # its coordinates in the mesh

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, {self.place})"


@dataclass(frozen=True)
class Snapshot:
    """A rank's ledger as it published it; plain JSON values."""

    rank: int
    step: int
    phase: str
    line: str  # the line of code that its main thread is in
    idle: float  # seconds in which it noted nothing
    waiting: tuple[str, int] | None = None  # channel, number of the operation that it waits for
    # By channel: the ranks, how many operations this one has begun, and the last of them as [number, group, operation, shape, dtype].
    channels: dict[str, tuple[list[int], int, list[list[Any]]]] = field(default_factory=dict)
    processes: dict[str, str] = field(default_factory=dict)  # state of every rank's process on this host
    failed: str = ""  # what ended this rank's training, if it only lost its peer


@dataclass(frozen=True)
class Verdict:
    """The cause of a hang, and whether waiting is of no use."""

    cause: str  # dead, stopped, silent, unreachable, order, shapes, python, slow, deadlock, transport
    ranks: list[int]  # those that the others wait for
    text: str
    fatal: bool = True


def judge(seats: Mapping[int, Seat], snapshots: Mapping[int, Snapshot], patience: float) -> Verdict:
    """Judges the ranks in `seats`, of which those in `snapshots` have answered. More than `patience` idle seconds are a hang."""
    verdict = _silent(seats, snapshots) or _disagreement(seats, snapshots) or _laggards(seats, snapshots, patience)
    failed = [snapshot for snapshot in snapshots.values() if snapshot.failed]
    if not failed or verdict.fatal:
        return verdict
    text = f"{seats[failed[0].rank]} lost its connection, though every rank is there: {failed[0].failed}"
    return Verdict("transport", [failed[0].rank], text)


def _silent(seats: Mapping[int, Seat], snapshots: Mapping[int, Snapshot]) -> Verdict | None:
    """The verdict on ranks that did not answer. Dead ranks come before those that may be dead."""
    silent = [seat for rank, seat in seats.items() if rank not in snapshots]
    if not silent:
        return None
    seen = [(int(rank), state) for snapshot in snapshots.values() for rank, state in snapshot.processes.items()]
    # Ranks looked at different times: a rank that saw it dead looked last.
    states = dict(sorted(seen, key=lambda one: (one[1] in ENDED, one[1] in STOPPED)))
    heard = {seats[rank].host for rank in snapshots}
    found: dict[str, list[Seat]] = {}
    for seat in silent:
        state = states.get(seat.rank, "")
        kind = "dead" if state in ENDED else "stopped" if state in STOPPED else "silent" if seat.host in heard else "unreachable"
        found.setdefault(kind, []).append(seat)
    kind = next(kind for kind in ("dead", "stopped", "unreachable", "silent") if kind in found)
    those = found[kind]
    who = _list(those)
    several = len(those) > 1
    hosts = ", ".join(sorted({seat.host for seat in those}))
    text = {
        "dead": f"{who} {'are' if several else 'is'} dead: no such process any more (killed, or out of memory?)",
        "stopped": f"{who} {'are' if several else 'is'} stopped (by SIGSTOP or a debugger)",
        "unreachable": f"{who} {'do' if several else 'does'} not answer, nor does any rank of host {hosts}: down, or its network is cut",
        "silent": f"{who} {'do' if several else 'does'} not answer, though the process runs: something in it holds the interpreter",
    }[kind]
    return Verdict(kind, [seat.rank for seat in those], text + _who_waits(snapshots))


def _who_waits(snapshots: Mapping[int, Snapshot]) -> str:
    waiting = [snapshot for snapshot in snapshots.values() if snapshot.waiting]
    if not waiting:
        return ""
    return f"; {_list(sorted(s.rank for s in waiting))} wait{'s' if len(waiting) == 1 else ''} in {_awaited(waiting[0])}"


def _disagreement(seats: Mapping[int, Seat], snapshots: Mapping[int, Snapshot]) -> Verdict | None:
    """Finds two ranks that have different operations under one number of a channel."""
    first: dict[tuple[str, int], tuple[Snapshot, list[Any]]] = {}
    for snapshot in snapshots.values():
        for channel, (_, _, recent) in snapshot.channels.items():
            for note in recent:
                other, theirs = first.setdefault((channel, note[0]), (snapshot, note))
                if note[2:] == theirs[2:]:
                    continue
                order = note[2] != theirs[2]
                what = "are in different order" if order else "have different shapes"
                text = (
                    f"operations over {note[1]} {what}: #{note[0]} is {_operation(theirs)} on {seats[other.rank]}, at {other.line},"
                    f" and {_operation(note)} on {seats[snapshot.rank]}, at {snapshot.line}"
                )
                return Verdict("order" if order else "shapes", [other.rank, snapshot.rank], text)
    return None


def _laggards(seats: Mapping[int, Seat], snapshots: Mapping[int, Snapshot], patience: float) -> Verdict:
    """Follows the ranks that wait to the ranks they wait for, until one waits for nobody."""
    edges = _edges(snapshots)
    targets = {rank for _, behind in edges.values() for rank in behind}
    roots = sorted(targets - edges.keys())
    if targets and not roots:
        cycle = _cycle(edges)
        links = [f"{seats[rank]} waits in {edges[rank][0]} for rank {cycle[(i + 1) % len(cycle)]}" for i, rank in enumerate(cycle)]
        return Verdict("deadlock", cycle, "ranks wait for each other in a circle: " + "; ".join(links))
    stuck = [snapshots[rank] for rank in roots if snapshots[rank].waiting] or [s for s in snapshots.values() if s.waiting and not targets]
    if stuck:  # all ranks of that operation have entered it
        ranks = snapshots[stuck[0].rank].channels[stuck[0].waiting[0]][0] if stuck[0].waiting else []
        hosts = sorted({seats[rank].host for rank in ranks})
        where = f"the network between {' and '.join(hosts)} is cut" if len(hosts) > 1 else f"a link within {hosts[0]} hangs"
        idle = min(snapshots[rank].idle for rank in ranks)  # who came last may have come just now
        fatal = idle >= patience
        what = _awaited(stuck[0])
        text = f"{_list(ranks)} have all entered {what}, which does not end for {idle:.0f} s: {where}, or a device hangs"
        return Verdict("transport" if fatal else "slow", list(ranks), text, fatal)
    if not roots and all(snapshot.phase == FOR_DEVICE for snapshot in snapshots.values()):
        idle = min(snapshot.idle for snapshot in snapshots.values())
        text = (
            f"all ranks have begun the same operations and wait for their devices, for {idle:.0f} s: a cut in the network, or a hung device"
        )
        return Verdict("transport" if idle >= patience else "slow", sorted(snapshots), text, idle >= patience)
    roots = roots or _odd_ones({rank: s for rank, s in snapshots.items() if s.phase != FOR_DEVICE})  # who waits holds up none
    root = snapshots[roots[0]]
    text = f"is in {root.line} for {root.idle:.0f} s (step {root.step}, {root.phase})"
    # Of several operations that it holds up the one that most of all waits for it alone.
    held = min((edge for edge in edges.values() if root.rank in edge[1]), key=lambda edge: len(edge[1]), default=None)
    if held is not None:
        awaited = held[0]
        waiting = sorted(rank for rank, (operation, behind) in edges.items() if root.rank in behind and operation == awaited)
        text = f"never entered {awaited}; it {text}; {_list(waiting)} wait{'s' if len(waiting) == 1 else ''} there"
    text = f"{seats[root.rank]} {text}"
    if len(roots) > 1:
        text += f". The same holds for {_list(roots[1:])}"
    if root.idle < patience:
        return Verdict("slow", roots, f"slow, but moving: {text}", fatal=False)
    return Verdict("python", roots, text)


def _edges(snapshots: Mapping[int, Snapshot]) -> dict[int, tuple[str, list[int]]]:
    """For each rank that waits, the operation and the ranks that have not begun it. Under NCCL devices wait and not hosts: there a
    rank waits if it has begun more operations over a channel than others."""
    edges = {}
    for rank, snapshot in snapshots.items():
        if snapshot.waiting:
            channel, number = snapshot.waiting
            if behind := _behind(snapshots, channel, number):
                edges[rank] = (_awaited(snapshot), behind)
    if edges or any(snapshot.waiting for snapshot in snapshots.values()):
        return edges
    for rank, snapshot in snapshots.items():
        for channel, (_, begun, recent) in snapshot.channels.items():
            if begun and (behind := _behind(snapshots, channel, begun)):
                edges[rank] = (_named(recent, begun), behind)
    return edges


def _behind(snapshots: Mapping[int, Snapshot], channel: str, number: int) -> list[int]:
    ranks = next(s.channels[channel][0] for s in snapshots.values() if channel in s.channels)
    return [r for r in ranks if r in snapshots and snapshots[r].channels.get(channel, (ranks, 0, []))[1] < number]


def _cycle(edges: Mapping[int, tuple[str, list[int]]]) -> list[int]:
    path = [min(edges)]
    while (following := next(rank for rank in edges[path[-1]][1] if rank in edges)) not in path:
        path.append(following)
    return path[path.index(following) :]


def _odd_ones(snapshots: Mapping[int, Snapshot]) -> list[int]:
    """The ranks that are in another line of code than most, if none is known to wait (an engine may have its own collectives)."""
    common, count = Counter((s.step, s.phase) for s in snapshots.values()).most_common(1)[0]
    odd = [rank for rank, s in snapshots.items() if (s.step, s.phase) != common]
    return sorted(odd) if odd and count > len(odd) else sorted(snapshots, key=lambda rank: -snapshots[rank].idle)


def _awaited(snapshot: Snapshot) -> str:
    assert snapshot.waiting is not None
    channel, number = snapshot.waiting
    return _named(snapshot.channels[channel][2], number)


def _named(recent: list[list[Any]], number: int) -> str:
    """An operation in words: tp all_reduce #1204 of [16, 32] float32."""
    note = next((note for note in recent if note[0] == number), None)
    return f"operation #{number}" if note is None else f"{note[1]} {note[2]} #{number}{_of(note)}"


def _operation(note: list[Any]) -> str:
    return f"{note[2]}{_of(note)}"


def _of(note: list[Any]) -> str:
    return "" if note[2] == "barrier" else f" of {note[3]} {note[4]}"


def _list(those: Iterable[Seat | int]) -> str:
    """Names a few, and says how many more there are."""
    named = [str(each) for each in those]
    numbers = all(name.isdigit() for name in named)
    shown = named if len(named) <= SHOWN else [*named[:SHOWN], f"{len(named) - SHOWN} more"]
    listed = " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
    return f"rank{'s' if len(named) > 1 else ''} {listed}" if numbers else listed
