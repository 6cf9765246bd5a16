"""Which rows of tokens go to which rank, and the exchange there and back.

A row is a token on its way to one expert. This rank's rows are sorted by expert, and so by rank; what comes
is sorted by rank, and is sorted by expert again. With `etp` every rank that has a part of an expert gets its
rows, and returns its part of their results. Rows that are dropped stand behind all others, and stay; where
results come back, they are zero.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megacore.distributed.collectives import Done, Work
from megacore.distributed.communicator import Group
from megacore.kernels.permute import slots_of

# of so many rows, how many go to each of so many ranks with other experts
Expected = Callable[[int, int], Sequence[int]]


@dataclass(frozen=True)
class Route:
    """The ways of the rows of a microbatch, or of half of one.

    No module keeps anything of it: other microbatches are under way too.
    """

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
    fits: Tensor | None = None  # which rows are not dropped, as `chosen`; None: all

    @property
    def dropped(self) -> int:
        """How many of this rank's rows do not travel, where it has told others how many do."""
        return self.slots.numel() - sum(self.sent) // self.parts


def evenly(rows: int, ranks: int) -> Sequence[int]:
    """Every expert has as many rows."""
    return [rows // ranks] * ranks


def routes_of(
    chosen: Tensor,
    experts: int,
    group: Group,
    parts: int,
    fits: Tensor | None = None,
    halves: bool = False,
    expected: Expected = evenly,
) -> list[Route]:
    """The ways of rows whose experts are `chosen`, for all tokens, or for each half of them; collective over
    the group. `fits`: which of the rows are not dropped; None: all. `expected`: of a choice without content,
    which all ranks then make alike.

    Ranks tell each other how many rows they send. Only where there are several must the host know: here alone
    a step waits for the device, because an exchange takes its sizes from the host.
    """
    numbers = chosen if fits is None else chosen.masked_fill(~fits, experts)
    parts_of = zip(*(t.tensor_split(2 if halves else 1) for t in (chosen, numbers)), strict=True)
    own = [(each, *by_expert(own.flatten(), experts)) for each, own in parts_of]
    known = [
        (each, slots_of(order, chosen.shape[1]), n if fits is None else times(each, n))
        for each, order, n in own
    ]
    kept = [None] * len(own) if fits is None else fits.tensor_split(len(own))
    if group.size == 1:
        return [
            Route(*of, n.cumsum(0), group, fits=part)
            for of, (*_, n), part in zip(known, own, kept, strict=True)
        ]
    to = torch.stack([counts.view(group.size // parts, -1) for *_, counts in own], 1).repeat_interleave(
        parts, 0
    )
    come = torch.empty_like(to)  # [ranks, halves, experts of a rank]
    assert group.communicator is not None
    group.communicator.start_all_to_all(to, come).wait()
    if chosen.is_meta:
        sent = [
            [n for n in expected(each.numel(), group.size // parts) for _ in range(parts)] for each, *_ in own
        ]
        received = [[to[group.rank]] * group.size for to in sent]
    else:
        sent, received = torch.stack([to.sum(2), come.sum(2)]).mT.tolist()
    routes = []
    for i, (of, part) in enumerate(zip(known, kept, strict=True)):
        of_experts = torch.arange(come.shape[2], device=chosen.device).repeat(group.size)
        of_experts = of_experts.repeat_interleave(come[:, i].flatten(), output_size=sum(received[i]))
        arrangement = of_experts.argsort(stable=True)
        ways = arrangement, slots_of(arrangement, 1).flatten()
        routes.append(
            Route(
                *of,
                come[:, i].sum(0).cumsum(0),
                group,
                parts,
                tuple(sent[i]),
                tuple(received[i]),
                *ways,
                part,
            )
        )
    return routes


def by_expert(numbers: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The places of numbers below `experts`, sorted by them, equal ones in their order, then
    others; and how often there is each.
    """
    found, order = numbers.sort(stable=True)
    ends = torch.searchsorted(found, torch.arange(experts, device=numbers.device), right=True)
    return order, ends.diff(prepend=ends.new_zeros(1))


def times(chosen: Tensor, counts: Tensor) -> Tensor:
    """How often each expert was chosen, as `counts` are."""
    return torch.zeros_like(counts).index_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten()))


def send(rows: Tensor, route: Route) -> "Underway":
    """Begins to send rows ``[rows, hidden]``, sorted by expert, to the ranks of their
    experts; see `arrange` for what comes.
    """
    if route.group.size == 1:
        return Underway(rows)
    if route.parts > 1:
        *chunks, _ = rows.split([*(own := route.sent[:: route.parts]), len(rows) - sum(own)])
        rows = torch.cat([chunk for chunk in chunks for _ in range(route.parts)])
    return depart(rows, Exchange(route.group, route.sent, route.received, len(rows), sum(route.received)))


def arrange(rows: Tensor, route: Route) -> Tensor:
    """Rows that have come, sorted by expert."""
    return rows if route.arrangement is None else _Gather.apply(rows, route.arrangement, route.back)


def give_back(rows: Tensor, route: Route) -> "Underway":
    """Begins to send results of rows sorted by expert to the ranks whose rows they are of;
    see `own_rows` for what comes.
    """
    if route.arrangement is None:
        return Underway(rows)
    rows = _Gather.apply(rows, route.back, route.arrangement)
    return depart(
        rows, Exchange(route.group, route.received, route.sent, len(rows), sum(route.sent) + route.dropped)
    )


def own_rows(rows: Tensor, route: Route) -> Tensor:
    """What has come back → results of this rank's own rows, whole, in their order."""
    if route.parts == 1:
        return rows
    *chunks, rest = rows.split([*route.sent, route.dropped])
    return torch.cat(
        [*(sum_of(chunks[i : i + route.parts]) for i in range(0, len(chunks), route.parts)), rest]
    )


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    """The sum, in the order given, in fp32 at least."""
    if len(parts) == 1:
        return parts[0]
    total = (
        parts[0].to(torch.promote_types(parts[0].dtype, torch.float32))
        if parts[0].is_floating_point()
        else parts[0]
    )
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


class _Gather(torch.autograd.Function):
    """Rows in another order. It only gathers, in both directions.

    forward      y = x[order]
    grad of x      = dy[back]     `back` is the inverse of `order`
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)  # on a CPU several times as fast as x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (back,) = ctx.saved_tensors
        return grad.index_select(0, back), None, None


class Exchange:
    """An exchange of unequal parts: `sent[i]` rows to rank i of the group and `received[i]` from it.

    Gradients go the same way back.

    Where it begins in forward, backward waits, and where forward waits, backward begins: so what is computed
    between the two hides it in both directions. autograd keeps to this by itself: of what it can do next, it
    does first what forward did last.
    """

    def __init__(
        self, group: Group, sent: tuple[int, ...], received: tuple[int, ...], rows: int, comes: int
    ) -> None:
        """`rows`: how many there are, of which those behind the last that is sent stay.

        `comes`: rows of the result: behind the last that is received are zeros.
        """
        self.group, self.sent, self.received, self.rows, self.comes = group, sent, received, rows, comes
        self.work: Work = Done()
        self.out: Tensor | None = None  # in backward: what comes

    def begin(self, x: Tensor) -> Tensor:
        """Begins to send rows; what it returns is filled once `work` has been waited for."""
        out, self.work = exchange_rows(x, self.group, self.sent, self.received, self.comes)
        return out

    def begin_back(self, grad: Tensor) -> None:
        """Begins to send gradients back."""
        self.out, self.work = exchange_rows(grad, self.group, self.received, self.sent, self.rows)

    def ended_back(self) -> Tensor | None:
        """Waits for the gradients."""
        self.wait()
        out, self.out = self.out, None
        return out

    def wait(self) -> None:
        """Waits for what is under way, and holds on to none of its memory."""
        self.work.wait()
        self.work = Done()


class Underway(NamedTuple):
    """Rows that are on their way, if any: on one rank they are there."""

    rows: Tensor
    exchange: Exchange | None = None

    def arrive(self) -> Tensor:
        """Waits for them."""
        return self.rows if self.exchange is None else _Arrive.apply(self.rows, self.exchange)


def depart(rows: Tensor, exchange: Exchange) -> Underway:
    """Begins an exchange of rows."""
    return Underway(_Depart.apply(rows, exchange), exchange)


class _Depart(torch.autograd.Function):
    """Forward: begins to send x. Backward: waits for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.begin(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:  # type: ignore[override]
        return ctx.exchange.ended_back(), None


class _Arrive(torch.autograd.Function):
    """Forward: waits for x.

    Backward: begins to send its gradient, for `_Depart` to wait for; autograd is handed what stays here.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.wait()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.exchange.begin_back(grad)
        return grad, None


def exchange_rows(
    rows: Tensor, group: Group, sent: tuple[int, ...], received: tuple[int, ...], length: int
) -> tuple[Tensor, Work]:
    """Begins to send so many of the rows to each rank, and to receive so many from each.

    What comes has `length` rows: behind the last that comes are zeros.
    """
    assert group.communicator is not None
    width, come, out = rows.shape[1], sum(received), rows.new_empty(length, rows.shape[1])
    out[come:] = 0
    sizes = [n * width for n in sent], [n * width for n in received]
    return out, group.communicator.start_exchange(
        rows[: sum(sent)].contiguous().view(-1), out[:come].view(-1), *sizes
    )
