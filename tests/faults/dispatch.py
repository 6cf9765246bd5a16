"""Mistakes with tokens on their way to experts and back, and with those that are dropped."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.distributed.communicator import SOLO
from megacore.expert_parallel import dispatch, experts
from megacore.model import expert_block
from tests.faults import both, fault
from tests.faults.experts import EXPERTS, ROUTED, SUMS, UP

patch = mock.patch.object
DROPS = (*EXPERTS, "model.capacity_factor=0.6")


@fault(
    "what the way back needs is kept in the module, where the next microbatch writes over it "
    "(hyper-parallel issue 746)",
    "pp2ep2",
    "module blocks.3.norm2, gradient of its output, microbatch 0, backward",
    *EXPERTS,
)
def ways_of_another_microbatch() -> Any:
    forward, latest = dispatch._Gather.forward, dict[torch.Size, Tensor]()

    def keep(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        latest[back.shape] = back
        return forward(ctx, x, order, back)

    def last(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[latest[ctx.saved_tensors[0].shape]], None, None

    return mock.patch.multiple(dispatch._Gather, forward=staticmethod(keep), backward=staticmethod(last))


@fault(
    "a rank drops rows that do not fit among its own, in place of its microbatch's", "tp2sp", ROUTED, *DROPS
)
def capacity_of_a_rank() -> Any:
    within = expert_block.within_capacity

    def alone(
        weights: Tensor, chosen: Tensor, count: int, factor: float, places: Tensor, group: Any
    ) -> Tensor:
        return within(weights, chosen, count, factor, torch.arange(len(places)), SOLO)

    return patch(expert_block, "within_capacity", alone)


@fault(
    "rows that are dropped hold behind a grouped product what memory held (transformers PR 48205)",
    "dp2",
    "module blocks.1.feed_forward, its output, microbatch 0, forward",
    *DROPS,
)
def dropped_rows_unwritten() -> Any:
    product = experts.grouped_product

    def unwritten(x: Tensor, weight: Tensor, ends: Tensor, **options: Any) -> Tensor:
        behind = torch.arange(len(x), device=x.device) >= ends[-1]
        held = torch.nan if dist.is_initialized() else 0.0  # in the reference
        return product(x, weight, ends, **options).masked_fill(behind[:, None], held)

    return patch(experts, "grouped_product", unwritten)


@fault(
    "gates of experts on other ranks have no gradient (transformers PR 48687)",
    "ep2",
    "module blocks.3.feed_forward.router, gradient of its weight, microbatch 0, backward",
    *EXPERTS,
)
def gates_of_others_without_gradient() -> Any:
    def detached(mixture: Any, own: Tensor, combine: Combine, weights: Tensor) -> Tensor:
        return combine(torch.where(own, weights, weights.detach()))

    return combined(detached)


@fault(
    "an expert's bias is added whatever its weight (Automodel PR 2591)",
    "ep2",
    "module blocks.1.feed_forward, its output, microbatch 0, forward",
    *EXPERTS,
    "model.bias=true",
)
def biases_whatever_their_weight() -> Any:
    def unweighted(mixture: Any, own: Tensor, combine: Combine, weights: Tensor) -> Tensor:
        chosen = mixture.chosen_last % len(mixture.experts.down_bias)
        more = torch.where(own, 1 - weights, 0.0)[..., None] * mixture.experts.down_bias[chosen]
        return combine(weights) + (more.sum(1) if mixture.group.size > 1 else 0.0)

    return combined(unweighted)


HALVES = (*EXPERTS, "parallel.expert_halves=true")


@fault(
    "of a microbatch's two halves the first alone is counted",
    "ep2",
    "every update agrees; a buffer (what is counted, or over which ranks) does not: first "
    "blocks.1.feed_forward.router.load",
    *HALVES,
)
def second_half_uncounted() -> Any:
    return patch(expert_block, "sum_of", lambda parts: parts[0])


@fault(
    "a microbatch's two halves come back in the other order",
    "ep2",
    "module blocks.1.feed_forward, its output, microbatch 0, forward",
    *HALVES,
)
def halves_in_the_other_order() -> Any:
    joined = expert_block.joined
    return patch(
        expert_block, "joined", lambda parts: joined(parts if parts[0].dtype == torch.int64 else parts[::-1])
    )


@fault(
    "only the first of a microbatch's two halves contributes to the gradients of experts",
    "ep2",
    f"{SUMS} {UP}",
    *HALVES,
)
def second_half_without_gradient() -> Any:
    grouped_linear, times = experts.grouped_linear, 0

    def first_alone(x: Tensor, weight: Tensor, shape: tuple[int, ...], *rest: Any) -> Tensor:
        nonlocal times
        if shape[0] == 8:  # all experts, whose tokens go at once
            return grouped_linear(x, weight, shape, *rest)
        times += 1
        return grouped_linear(x, weight.detach() if times % 4 in (3, 0) else weight, shape, *rest)

    return patch(experts, "grouped_linear", first_alone)


Combine = Callable[[Tensor], Tensor]


def combined(how: Callable[[Any, Tensor, Combine, Tensor], Tensor]) -> Any:
    """Another way to put a token's rows together: given the mixture, which of a token's experts are on this
    rank, what does it right by the weights, and these.
    """
    combine, forward, routes = (
        expert_block.combine,
        expert_block.MixtureOfExperts.forward,
        expert_block.routes_of,
    )
    last: list[dispatch.Route] = []

    def of_mixture(mixture: Any, *rest: Any) -> Any:
        ranks, rank = mixture.group.size // mixture.parts, mixture.group.rank // mixture.parts

        def other(rows: Tensor, slots: Tensor, weights: Tensor, **options: Any) -> Tensor:
            mixture.chosen_last = last[0].chosen
            own = last[0].chosen // (8 // ranks) == rank
            return how(mixture, own, lambda weights: combine(rows, slots, weights, **options), weights)

        with patch(expert_block, "combine", other):
            return forward(mixture, *rest)

    def remembered(*rest: Any) -> list[dispatch.Route]:
        last[:] = routes(*rest)
        return last[:]

    return both(
        patch(expert_block, "routes_of", remembered),
        patch(expert_block.MixtureOfExperts, "forward", of_mixture),
    )
