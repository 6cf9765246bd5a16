"""What only shows together: a small collective in every group of the mesh, and the bandwidth
of the links between machines.

Every rank is here, started by the run's own launcher. Links are tried in rounds: in the first every machine
sends to the next one, then to the second next, the fourth, … N machines take log2(N) rounds and not N², and
all links are busy at once, as in training.
"""

import socket
import time
from collections.abc import Callable
from statistics import median_high
from typing import Any

import torch
import torch.distributed as dist

from megacore.distributed.axes import ranks_along
from megacore.distributed.collectives import all_gather, all_reduce
from megacore.distributed.communicator import Group
from megacore.distributed.mesh import Mesh, Unconnected

SENT_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}  # by each rank, over each link
REDUCED = 1 << 18  # elements of fp32: 1 MiB
TRIES = 3
NAME_BYTES = 64


def together(mesh: Mesh, mark: Callable[[str], object] = lambda done: None) -> dict[str, Any]:
    """Everything that ranks find out together.

    Collective; every rank gets it. `mark` is called with each thing that was done.
    """
    mark(f"the groups are made: {mesh.describe()}")
    machines = machines_of(mesh)
    mark(f"{mesh.place.world_size} ranks on {len(machines)} machines hear each other")
    return {
        "machines": machines,
        "groups": groups(mesh, mark),
        "links": links(mesh, machines, mark),
        "mesh": mesh.describe(),
    }


def machines_of(mesh: Mesh) -> list[list[int]]:
    """The ranks of each machine, in the order of their first ranks."""
    name = torch.zeros(1, NAME_BYTES, dtype=torch.uint8)
    text = socket.gethostname().encode()[:NAME_BYTES]
    name[0, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    found: dict[bytes, list[int]] = {}
    for rank, row in enumerate(all_gather(name.to(mesh.device), mesh.world).cpu().numpy()):
        found.setdefault(row.tobytes(), []).append(rank)
    return list(found.values())


def groups(mesh: Mesh, mark: Callable[[str], object]) -> list[dict[str, Any]]:
    """Every group along an axis: its ranks, the median seconds of an all-reduce of 1 MiB,
    and whether the sum was right.
    """
    found: list[dict[str, Any]] = []
    for axis in (axis.name for axis in mesh.axes):
        group = mesh.group(axis)
        if mesh.sizes[axis] == 1 or isinstance(group.communicator, Unconnected):
            continue
        of_all = all_gather(
            torch.tensor([timed_sum(group, mesh)], dtype=torch.float64, device=mesh.device), mesh.world
        ).tolist()
        for ranks in dict.fromkeys(
            ranks_along((axis,), rank, mesh.sizes) for rank in range(mesh.place.world_size)
        ):
            seconds, right = max(of_all[rank][0] for rank in ranks), all(of_all[rank][1] for rank in ranks)
            found.append({"axis": axis, "ranks": list(ranks), "seconds": seconds, "right": right})
        mark(f"the {axis} groups have summed")
    return found


def timed_sum(group: Group, mesh: Mesh) -> tuple[float, bool]:
    """Median seconds of an all-reduce, and whether it gave the sum of what the ranks had:
    whole numbers, so it is exact.
    """
    times, right = [], True
    for _ in range(1 + TRIES):  # the first sets up connections
        x = torch.full((REDUCED,), float(group.rank + 1), device=mesh.device)
        mesh.barrier()
        started = now(mesh)
        x = all_reduce(x, group)
        times.append(now(mesh) - started)
        right = right and bool((x == group.size * (group.size + 1) // 2).all())
    return median_high(times[1:]), right


def links(mesh: Mesh, machines: list[list[int]], mark: Callable[[str], object]) -> list[dict[str, Any]]:
    """Bytes a second over each link that was tried, by the numbers of its machines: those of
    all ranks of a machine together.
    """
    rank, count, found = mesh.place.rank, len(machines), []
    mine = next(number for number, ranks in enumerate(machines) if rank in ranks)
    at, step = machines[mine].index(rank), 1
    while step < count:
        ahead, behind = (machines[(mine + way) % count] for way in (step, -step))
        to, source = (other[at] if at < len(other) else None for other in (ahead, behind))
        took = torch.tensor([exchange(mesh, to, source)], dtype=torch.float64, device=mesh.device)
        of_all = all_gather(took, mesh.world).tolist()
        for number, ranks in enumerate(machines):
            other = (number + step) % count
            pairs = list(zip(ranks, machines[other], strict=False))
            seconds = max(link_seconds(of_all[a], of_all[b], mesh) for a, b in pairs)
            found.append(
                {
                    "from": number,
                    "to": other,
                    "bytes_per_second": len(pairs) * SENT_BYTES[mesh.device.type] / seconds,
                }
            )
        mark(f"every machine has sent to the one {step} further")
        step *= 2
    return found


def exchange(mesh: Mesh, to: int | None, source: int | None) -> tuple[float, float]:
    """Sends to one rank while it receives from another; the seconds until each was done, at best."""
    out = torch.ones(SENT_BYTES[mesh.device.type], dtype=torch.uint8, device=mesh.device)
    into = torch.empty_like(out)
    best = [float("inf")] * 2
    for _ in range(1 + TRIES):
        mesh.barrier()
        started = now(mesh)
        # In one batch: on NCCL two ranks that both send first would wait for each other.
        sends = [dist.P2POp(dist.isend, out, to)] if to is not None else []
        receives = [dist.P2POp(dist.irecv, into, source)] if source is not None else []
        works = dist.batch_isend_irecv([*receives, *sends]) if sends or receives else []
        ends = []
        for work in works:
            work.wait()
            ends.append(now(mesh) - started)
        if ends:
            best = [min(best[0], ends[-1]), min(best[1], ends[0])]
    return best[0], best[1]


def link_seconds(sender: list[float], receiver: list[float], mesh: Mesh) -> float:
    """The seconds that a link took, by what its two ends have measured.

    NCCL tells only when a rank's whole batch is done, so the end whose other link is faster is right. gloo's
    sender is done when the kernel has the bytes, so the receiver is right.
    """
    return receiver[1] if mesh.device.type == "cpu" else min(sender[0], receiver[1])


def now(mesh: Mesh) -> float:
    """The time when the device has done what it was given."""
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
    return time.perf_counter()
