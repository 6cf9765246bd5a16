"""Finds in the flight recorders of all ranks which rank holds up the others, and says it in one sentence."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megacore.distributed.processes import ENDED, STOPPED
from megacore.tools.diagnosis.beats import QUIET
from megacore.tools.diagnosis.flight_recorder import FOR_DEVICE, ranks_of

SHOWN = 4  # ranks named one by one


@dataclass(frozen=True)
class RankProcess:
    """Where a rank runs."""

    rank: int
    host: str
    pid: int  # 0: nobody has come
    place: str  # its coordinates in the mesh

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, {self.place})"


@dataclass(frozen=True)
class Snapshot:
    """A rank's flight recorder as the rank published it; plain JSON values."""

    rank: int
    step: int
    phase: str
    line: str  # the line of code that its main thread is in
    idle: float  # seconds in which it noted nothing
    waiting: tuple[str, int] | None = None  # channel, number of the operation that it waits for
    # By channel (`flight_recorder.ranks_of`): how many operations this rank has begun, and the last of them
    # in words, the newest last (`operation_text`). One string each: thousands of ranks have hundreds of
    # thousands, and they are read within seconds.
    channels: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    processes: dict[str, str] = field(default_factory=dict)  # state of every rank's process on this host
    # how many forwards and backwards its GPU has done, and what that is at
    device: tuple[int, str] | None = None
    failed: str = ""  # what ended this rank's training, if it only lost its peer
    compiling: float | None = None  # seconds since a compilation began that is still under way


@dataclass(frozen=True)
class Diagnosis:
    """The cause of a hang, and whether waiting is of no use."""

    # dead, stopped, absent, silent, unreachable, order, shapes, python, compiling, slow, deadlock, transport
    cause: str
    ranks: list[int]  # those that the others wait for
    text: str
    fatal: bool = True


def judge(
    seats: Mapping[int, RankProcess],
    snapshots: Mapping[int, Snapshot],
    patience: float,
    reported: Mapping[int, str] | None = None,
) -> Diagnosis:
    """Judges the ranks in `seats`, of which those in `snapshots` have answered.

    More than `patience` idle seconds are a hang. `reported`: states of other ranks' processes, as the
    heartbeats of their hosts report them.
    """
    verdict = (
        _silent(seats, snapshots, reported or {})
        or _disagreement(seats, snapshots)
        or _laggards(seats, snapshots, patience)
    )
    failed = [snapshot for snapshot in snapshots.values() if snapshot.failed]
    if not failed or verdict.fatal:
        return verdict
    text = f"{seats[failed[0].rank]} lost its connection, though every rank is there: {failed[0].failed}"
    return Diagnosis("transport", [failed[0].rank], text)


def _silent(
    seats: Mapping[int, RankProcess], snapshots: Mapping[int, Snapshot], reported: Mapping[int, str]
) -> Diagnosis | None:
    """The verdict on ranks that did not answer. Dead ranks come before those that may be dead."""
    silent = [seat for rank, seat in seats.items() if rank not in snapshots]
    if not silent:
        return None
    seen = [(rank, state) for rank, state in reported.items() if state != QUIET]
    seen += [
        (int(rank), state) for snapshot in snapshots.values() for rank, state in snapshot.processes.items()
    ]
    # Ranks looked at different times: a rank that saw it dead looked last.
    states = dict(sorted(seen, key=lambda one: (one[1] in ENDED, one[1] in STOPPED)))
    heard = {seats[rank].host for rank in snapshots}
    found: dict[str, list[RankProcess]] = {}
    for seat in silent:
        state = states.get(seat.rank, "")
        kind = (
            "dead"
            if state in ENDED
            else "stopped"
            if state in STOPPED
            else "silent"
            if state or seat.host in heard
            else "unreachable"
        )
        found.setdefault(kind if seat.pid else "absent", []).append(seat)
    kind = next(kind for kind in ("dead", "stopped", "absent", "unreachable", "silent") if kind in found)
    those = found[kind]
    if kind == "unreachable" and len(heard) == 1 and len({seat.host for seat in silent}) > 1:
        text = f"no rank of another host answers: the network of host {min(heard)} is cut"
        return Diagnosis(kind, sorted(snapshots), text + _who_waits(snapshots))
    text = silence_text(kind, those)
    return Diagnosis(kind, [seat.rank for seat in those], text + _who_waits(snapshots))


def silence_text(kind: str, seats: Sequence[RankProcess]) -> str:
    """Why some ranks do not answer, in words; `kind` is one of `Diagnosis.cause`."""
    is_are, has_have, does_do = ("are", "have", "do") if len(seats) > 1 else ("is", "has", "does")
    hosts = ", ".join(sorted({seat.host for seat in seats}))
    text = {
        "dead": f"{is_are} dead: no such process any more (killed, or out of memory?)",
        "stopped": f"{is_are} stopped (by SIGSTOP or a debugger)",
        "absent": f"{has_have} not come to where the ranks meet: not started, dead, or held up on the way",
        "unreachable": f"{does_do} not answer, nor does any rank of host {hosts}: down, or its network is "
        "cut",
        "silent": f"{does_do} not answer, though the process runs: something in it holds the interpreter",
    }[kind]
    return f"{_list(seats)} {text}"


def _who_waits(snapshots: Mapping[int, Snapshot]) -> str:
    waiting = [snapshot for snapshot in snapshots.values() if snapshot.waiting]
    if not waiting:
        return ""
    return (
        f"; {_list(sorted(s.rank for s in waiting))} wait{'s' if len(waiting) == 1 else ''} in "
        f"{_awaited(waiting[0])}"
    )


def _disagreement(seats: Mapping[int, RankProcess], snapshots: Mapping[int, Snapshot]) -> Diagnosis | None:
    """Finds two ranks that have different operations under one number of a channel."""
    first: dict[tuple[str, int], tuple[Snapshot, str]] = {}
    for snapshot in snapshots.values():
        for channel, (begun, recent) in snapshot.channels.items():
            for number, note in enumerate(recent, begun - len(recent) + 1):
                other, theirs = first.setdefault((channel, number), (snapshot, note))
                if (
                    note == theirs
                    or (mine := note.split(" ", 1))[1] == (other_one := theirs.split(" ", 1))[1]
                ):
                    continue
                order = mine[1].split(" ")[0] != other_one[1].split(" ")[0]
                what = "are in different order" if order else "have different shapes"
                text = (
                    f"operations over {mine[0]} {what}: #{number} is {other_one[1]} on "
                    f"{seats[other.rank]}, at {other.line},"
                    f" and {mine[1]} on {seats[snapshot.rank]}, at {snapshot.line}"
                )
                return Diagnosis("order" if order else "shapes", [other.rank, snapshot.rank], text)
    return None


def _laggards(
    seats: Mapping[int, RankProcess], snapshots: Mapping[int, Snapshot], patience: float
) -> Diagnosis:
    """Follows the ranks that wait to the ranks they wait for, until one waits for nobody."""
    edges = _edges(snapshots)
    # Thousands may wait for one operation, and share its list.
    lists = {id(behind): (operation, behind) for operation, behind in edges.values()}.values()
    targets = {rank for _, behind in lists for rank in behind}
    roots = sorted(targets - edges.keys())
    if targets and not roots:
        cycle = _cycle(edges)
        links = [
            f"{seats[rank]} waits in {edges[rank][0]} for rank {cycle[(i + 1) % len(cycle)]}"
            for i, rank in enumerate(cycle)
        ]
        return Diagnosis("deadlock", cycle, "ranks wait for each other in a circle: " + "; ".join(links))
    stuck = [snapshots[rank] for rank in roots if snapshots[rank].waiting] or [
        s for s in snapshots.values() if s.waiting and not targets
    ]
    if stuck:  # all ranks of that operation have entered it
        ranks = ranks_of(stuck[0].waiting[0]) if stuck[0].waiting else []
        hosts = sorted({seats[rank].host for rank in ranks})
        where = (
            f"the network between {' and '.join(hosts)} is cut"
            if len(hosts) > 1
            else f"a link within {hosts[0]} hangs"
        )
        idle = min(snapshots[rank].idle for rank in ranks)  # who came last may have come just now
        fatal = idle >= patience
        what = _awaited(stuck[0])
        text = (
            f"{_list(ranks)} have all entered {what}, which does not end for {idle:.0f} s: {where}, or "
            "a device hangs"
        )
        return Diagnosis("transport" if fatal else "slow", list(ranks), text, fatal)
    if not roots and all(snapshot.phase == FOR_DEVICE for snapshot in snapshots.values()):
        idle = min(snapshot.idle for snapshot in snapshots.values())
        text = (
            f"all ranks have begun the same operations and wait for their devices, for {idle:.0f} s: a "
            "cut in the network, or a hung device" + _last_devices(snapshots)
        )
        return Diagnosis(
            "transport" if idle >= patience else "slow", sorted(snapshots), text, idle >= patience
        )
    # A rank that compiles is no hang, but must not hide one: it is the cause only if no other rank is.
    compiling = sorted(rank for rank, s in snapshots.items() if s.compiling is not None)
    roots = [rank for rank in roots if rank not in compiling] or roots or compiling
    # who waits holds up none
    roots = roots or _odd_ones({rank: s for rank, s in snapshots.items() if s.phase != FOR_DEVICE})
    root = snapshots[roots[0]]
    if root.compiling is None:
        text = f"is in {root.line} for {root.idle:.0f} s (step {root.step}, {root.phase})"
    else:
        text = f"compiles for {root.compiling:.0f} s (step {root.step})"
    # Of several operations that it holds up the one that most of all waits for it alone.
    held = min((edge for edge in lists if root.rank in edge[1]), key=lambda edge: len(edge[1]), default=None)
    if held is not None:
        awaited = held[0]
        waiting = sorted(
            rank
            for rank, (operation, behind) in edges.items()
            if operation == awaited and root.rank in behind
        )
        waits = f"{_list(waiting)} wait{'s' if len(waiting) == 1 else ''}"
        if root.compiling is None:
            text = f"never entered {awaited}; it {text}; {waits} there"
        else:
            text += f"; {waits} in {awaited}"
    text = f"{seats[root.rank]} {text}"
    if len(roots) > 1:
        text += f". The same holds for {_list(roots[1:])}"
    if root.compiling is not None:
        return Diagnosis("compiling", roots, text, fatal=False)
    if root.idle < patience:
        return Diagnosis("slow", roots, f"slow, but moving: {text}", fatal=False)
    return Diagnosis("python", roots, text)


def _edges(snapshots: Mapping[int, Snapshot]) -> dict[int, tuple[str, list[int]]]:
    """For each rank that waits, the operation and the ranks that have not begun it.

    Under NCCL devices wait and not hosts: there a rank waits if it has begun more operations over a channel
    than others.
    """
    edges, behind = {}, _Behind(snapshots)
    for rank, snapshot in snapshots.items():
        if snapshot.waiting and (late := behind(*snapshot.waiting)):
            edges[rank] = (_awaited(snapshot), late)
    if edges or any(snapshot.waiting for snapshot in snapshots.values()):
        return edges
    for rank, snapshot in snapshots.items():
        for channel, (begun, recent) in snapshot.channels.items():
            if begun and (late := behind(channel, begun)):
                edges[rank] = (_named(begun, recent, begun), late)
    return edges


class _Behind:
    """Which of a channel's ranks have not begun an operation; all who ask about the
    same get the same list.
    """

    def __init__(self, snapshots: Mapping[int, Snapshot]) -> None:
        self.snapshots, self.found = snapshots, dict[tuple[str, int], list[int]]()
        self.ranks: dict[str, list[int]] = {}  # of a channel, as far as they have answered

    def __call__(self, channel: str, number: int) -> list[int]:
        if channel not in self.ranks:
            self.ranks[channel] = [rank for rank in ranks_of(channel) if rank in self.snapshots]
        if (channel, number) not in self.found:
            begun = (
                (rank, self.snapshots[rank].channels.get(channel, (0, []))[0]) for rank in self.ranks[channel]
            )
            self.found[channel, number] = [rank for rank, count in begun if count < number]
        return self.found[channel, number]


def _last_devices(snapshots: Mapping[int, Snapshot]) -> str:
    """The ranks whose devices have done least, where that tells them from others."""
    done = {rank: snapshot.device[0] for rank, snapshot in snapshots.items() if snapshot.device}
    least = min(done.values(), default=0)
    last = [rank for rank, count in done.items() if count == least]
    if len(last) == len(done):
        return ""
    at = snapshots[last[0]].device
    assert at is not None
    return (
        f"; furthest behind {'are the devices' if len(last) > 1 else 'is the device'} of "
        f"{_list(last)}, in {at[1] or 'no work'}"
    )


def _cycle(edges: Mapping[int, tuple[str, list[int]]]) -> list[int]:
    path = [min(edges)]
    while (following := next(rank for rank in edges[path[-1]][1] if rank in edges)) not in path:
        path.append(following)
    return path[path.index(following) :]


def _odd_ones(snapshots: Mapping[int, Snapshot]) -> list[int]:
    """The ranks that are in another line of code than most, if none is known to wait (an engine
    may have its own collectives).
    """
    common, count = Counter((s.step, s.phase) for s in snapshots.values()).most_common(1)[0]
    odd = [rank for rank, s in snapshots.items() if (s.step, s.phase) != common]
    return (
        sorted(odd) if odd and count > len(odd) else sorted(snapshots, key=lambda rank: -snapshots[rank].idle)
    )


def _awaited(snapshot: Snapshot) -> str:
    assert snapshot.waiting is not None
    channel, number = snapshot.waiting
    return _named(*snapshot.channels[channel], number)


def _named(begun: int, recent: list[str], number: int) -> str:
    """An operation in words: tp all_reduce #1204 of [16, 32] float32."""
    if not begun - len(recent) < number <= begun:
        return f"operation #{number}"
    name, operation, *of = recent[number - begun - 1].split(" ", 2)
    return " ".join([name, operation, f"#{number}", *of])


def operation_text(name: str, operation: str, shape: Sequence[int], dtype: object) -> str:
    """An operation over the group `name` without its number: tp all_reduce of [16, 32] float32."""
    return f"{name} {operation}" + ("" if operation == "barrier" else f" of {list(shape)} {str(dtype)[6:]}")


def _list(those: Iterable[RankProcess | int]) -> str:
    """Names a few, and says how many more there are."""
    named = [str(each) for each in those]
    numbers = all(name.isdigit() for name in named)
    shown = named if len(named) <= SHOWN else [*named[:SHOWN], f"{len(named) - SHOWN} more"]
    listed = " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
    return f"rank{'s' if len(named) > 1 else ''} {listed}" if numbers else listed
