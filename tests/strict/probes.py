"""Small programs of two ranks, each with a property of the strict wire: what a program
may rely on, and what it may not.
"""

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.distributed.communicator import all_gather_single, reduce_scatter_single
from megacore.distributed.rendezvous import meet
from megacore.tools.launchers import place_from_environment
from tests.strict import NAME, Rules, strict


def number(value: float = 1.0) -> Tensor:
    """A tensor that is this rank's: 1 on rank 0, 10 on rank 1."""
    return torch.full((4,), value * 10.0 ** dist.get_rank())


def right() -> list[float]:
    """Every operation, used as it should be."""
    rank, x, found = dist.get_rank(), number(), torch.zeros(8)
    dist.all_reduce(x)
    all_gather_single(found, number(), async_op=True).wait()
    part = torch.zeros(2)
    reduce_scatter_single(part, number(), async_op=True).wait()
    exchanged = torch.zeros(4)
    dist.all_to_all_single(exchanged, number())
    uneven = torch.zeros(3 if rank else 5)
    dist.all_to_all_single(uneven, number(), [2, 1] if rank else [2, 3], [2, 2] if not rank else [3, 1])
    given = number()
    dist.broadcast(given, 1)
    message = torch.zeros(4)
    (dist.irecv(message, 0) if rank else dist.isend(number(2.0), 1)).wait()
    batch = torch.zeros(4)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, number(3.0), 1 - rank), dist.P2POp(dist.irecv, batch, 1 - rank)]
    ):
        work.wait()
    dist.barrier()
    return torch.cat([x, found, part, exchanged, uneven, given, message, batch]).tolist()


def poisoned() -> tuple[bool, float, bool, int]:
    """A result before its wait and behind it, of floats and of whole numbers."""
    x, whole = number(), number().long()
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(whole, async_op=True)]
    before = bool(x.isnan().all()), bool((whole != 11).all())
    for work in works:
        work.wait()
    return before[0], x[0].item(), before[1], int(whole[0])


def changed() -> float:
    """An input that is changed while it is under way, and what the other rank then gets."""
    x, found = number(), torch.zeros(8)
    work = all_gather_single(found, x, async_op=True)
    x.zero_()
    work.wait()
    return found.sum().item()


def other_sizes() -> None:
    """Ranks that disagree about a size."""
    dist.all_reduce(torch.zeros(4 + dist.get_rank()))


def other_dtypes() -> None:
    """Ranks that disagree about a dtype; in bytes they agree."""
    dist.all_reduce(torch.zeros(4, dtype=torch.int32 if dist.get_rank() else torch.float32))


def other_lines() -> None:
    """Two sums of one size, in another order on one rank."""
    for first in (not dist.get_rank(), bool(dist.get_rank())):
        if first:
            dist.all_reduce(torch.zeros(4))
        else:
            dist.all_reduce(torch.zeros(4))


def alone() -> None:
    """A rank that sums by itself."""
    if dist.get_rank():
        dist.all_reduce(torch.zeros(4))


def ahead() -> float:
    """Two receives that are posted ahead, and in front of the second's message one that goes
    back through another communicator.
    """
    rank, back = dist.get_rank(), dist.new_group([0, 1], backend=NAME, use_local_synchronization=True)
    message, second = torch.zeros(4), torch.zeros(4)
    for group in (dist.group.WORLD, back):  # NCCL sets both up before the plan
        (dist.isend(message, 0, group=group) if rank else dist.irecv(message, 1, group=group)).wait()
    if rank:
        work = dist.irecv(message, 0, group=back)
        work.wait()
        for _ in range(2):
            dist.isend(number(), 0).wait()
    else:
        receives = [dist.irecv(x, 1) for x in (message, second)]
        dist.isend(number(), 1, group=back).wait()
        for receive in receives:
            receive.wait()
    return message.sum().item()


def probe(program: Callable[[], Any], rules: Rules | None) -> Any:
    """What a program returns, or the error that it ends with, in a world of its
    own; without `rules` over gloo.
    """
    place, timeout = place_from_environment(), timedelta(seconds=20)
    with strict(rules) if rules else nullcontext():
        store = meet(place, timeout)
        dist.init_process_group(
            NAME if rules else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
        )
        try:
            return program()
        except RuntimeError as error:
            return str(error)
