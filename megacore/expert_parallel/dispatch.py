"""Which rows of tokens go to which rank, and the exchange there and back.

A row is a token on its way to one expert. This rank's rows are sorted by expert, and so by rank; what comes is sorted by rank, and is
sorted by expert again. With `etp` every rank that has a part of an expert gets its rows, and returns its part of their results. Rows that
are dropped stand behind all others, and stay; where results come back, they are zero.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megacore.distributed.collectives import Done, Work
from megacore.distributed.communicator import Group
from megacore.kernels.permute import slots_of


@dataclass(frozen=True)
class Route:
    """The ways of one microbatch's rows. Nothing of it is kept in a module: other microbatches are under way at the same time."""

    chosen: Tensor  # experts, [tokens, experts_per_token]
    slots: Tensor  # where each token's rows stand among this rank's rows by expert, as `chosen`
    counts: Tensor  # of this rank's rows, by expert, also of those that are dropped
    ends: Tensor  # where rows of each of this rank's experts end, behind the exchange
    group: Group  # the ranks that hold parts of all experts: ep × etp
    parts: int = 1  # etp
    sent: tuple[int, ...] = ()  # rows to each rank of the group, and from each
    received: tuple[int, ...] = ()
    arrangement: Tensor | None = None  # what comes, by expert
    back: Tensor | None = None  # its inverse


def route_of(chosen: Tensor, experts: int, group: Group, parts: int, fits: Tensor | None = None) -> Route:
    """The ways of rows whose experts are `chosen`; collective over the group. `fits`: which of them are not dropped; None: all.

    Ranks tell each other how many rows they send. Only where there are several must the host know: here alone a step waits for the
    device, because an exchange takes its sizes from the host.
    """
    order, counts = by_expert((chosen if fits is None else chosen.masked_fill(~fits, experts)).flatten(), experts)
    slots, of_all = slots_of(order, chosen.shape[1]), counts
    if fits is not None:
        of_all = torch.zeros_like(counts).index_add_(0, chosen.flatten(), torch.ones_like(order))
    if group.size == 1:
        return Route(chosen, slots, of_all, counts.cumsum(0), group)
    to = counts.view(group.size // parts, -1).repeat_interleave(parts, 0)  # [ranks, experts of a rank]
    come = torch.empty_like(to)
    assert group.communicator is not None
    group.communicator.start_all_to_all(to, come).wait()
    if chosen.is_meta:  # where nobody knows the choice: every expert has as many rows
        sent = received = [chosen.numel() * parts // group.size] * group.size
    else:
        sent, received = torch.stack([to.sum(1), come.sum(1)]).tolist()
    numbers = torch.arange(come.shape[1], device=chosen.device).repeat(group.size)
    numbers = numbers.repeat_interleave(come.flatten(), output_size=sum(received))
    arrangement = numbers.argsort(stable=True)
    ways = arrangement, slots_of(arrangement, 1).flatten()
    return Route(chosen, slots, of_all, come.sum(0).cumsum(0), group, parts, tuple(sent), tuple(received), *ways)


def by_expert(numbers: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The places of numbers below `experts`, sorted by them, equal ones in their order, then others; and how often there is
    each."""
    found, order = numbers.sort(stable=True)
    ends = torch.searchsorted(found, torch.arange(experts, device=numbers.device), right=True)
    return order, ends.diff(prepend=ends.new_zeros(1))


def send(rows: Tensor, route: Route) -> tuple[Tensor, Work]:
    """Begins to send rows ``[rows, hidden]``, sorted by expert, to the ranks of their experts; see `arrange` for what comes."""
    if route.group.size == 1:
        return rows, Done()
    if route.parts > 1:
        *chunks, _ = rows.split([*(own := route.sent[:: route.parts]), len(rows) - sum(own)])
        rows = torch.cat([chunk for chunk in chunks for _ in range(route.parts)])
    waiting: list[Work] = []
    return _Exchange.apply(rows, route.group, route.sent, route.received, sum(route.received), waiting), waiting[0]


def arrange(rows: Tensor, route: Route) -> Tensor:
    """Rows that have come, sorted by expert."""
    return rows if route.arrangement is None else _Gather.apply(rows, route.arrangement, route.back)


def give_back(rows: Tensor, route: Route) -> Tensor:
    """Results of rows sorted by expert → those of this rank's own rows, whole, in their order."""
    if route.arrangement is None:
        return rows
    waiting, dropped = list[Work](), route.slots.numel() - sum(route.sent) // route.parts
    rows = _Gather.apply(rows, route.back, route.arrangement)
    found = _Exchange.apply(rows, route.group, route.received, route.sent, sum(route.sent) + dropped, waiting)
    waiting[0].wait()
    if route.parts == 1:
        return found
    *chunks, rest = found.split([*route.sent, dropped])
    return torch.cat([*(sum_of(tuple(chunks[i : i + route.parts])) for i in range(0, len(chunks), route.parts)), rest])


def sum_of(parts: tuple[Tensor, ...]) -> Tensor:
    """The sum, in the order of ranks."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


class _Gather(torch.autograd.Function):
    """Rows in another order. It only gathers, in both directions.

    forward      y = x[order]
    grad of x      = dy[back]     `back` is the inverse of `order`
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (back,) = ctx.saved_tensors
        return grad[back], None, None


class _Exchange(torch.autograd.Function):
    """Rows to other ranks, `sent[i]` of them to rank i; see `exchange_rows`. Its gradient goes the same way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: Group, sent: tuple[int, ...], received: tuple[int, ...], length: int, waiting: list[Work]
    ) -> Tensor:
        ctx.group, ctx.sent, ctx.received, ctx.length = group, sent, received, len(rows)
        out, work = exchange_rows(rows, group, sent, received, length)
        waiting.append(work)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        out, work = exchange_rows(grad, ctx.group, ctx.received, ctx.sent, ctx.length)
        work.wait()
        return out, *([None] * 5)


def exchange_rows(rows: Tensor, group: Group, sent: tuple[int, ...], received: tuple[int, ...], length: int) -> tuple[Tensor, Work]:
    """Begins to send so many of the rows to each rank, and to receive so many from each. What comes has `length` rows: behind the last that
    comes are zeros."""
    assert group.communicator is not None
    width, come, out = rows.shape[1], sum(received), rows.new_empty(length, rows.shape[1])
    out[come:] = 0
    sizes = [n * width for n in sent], [n * width for n in received]
    return out, group.communicator.start_exchange(rows[: sum(sent)].contiguous().view(-1), out[:come].view(-1), *sizes)
