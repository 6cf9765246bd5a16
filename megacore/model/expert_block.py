"""A GPT block whose feed-forward layer is a mixture of experts (Shazeer et al. 2017): each
token goes through a few of them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megacore.config import Config
from megacore.config.implied import compiles
from megacore.config.schema import resolved
from megacore.distributed.collectives import gather_tokens, leave_tensor_parallel, scatter_tokens
from megacore.distributed.topology import Topology
from megacore.expert_parallel.capacity import within_capacity
from megacore.expert_parallel.dispatch import (
    Expected,
    Route,
    arrange,
    evenly,
    give_back,
    own_rows,
    routes_of,
    send,
    sum_of,
)
from megacore.expert_parallel.experts import Experts
from megacore.expert_parallel.router import Router, Scored, losses_of
from megacore.kernels.permute import combine, spread
from megacore.model.block import ACTIVATIONS, Block, FeedForward
from megacore.model.context import Context


class MixtureOfExperts(nn.Module):
    """Router, experts, and those that all tokens share.

    With a capacity a token may lose some of its experts while the model is trained.

    Tensor ranks that hold the same tokens divide them here, so that each rank has tokens of its own.
    """

    def __init__(
        self, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device, output_std: float
    ) -> None:
        super().__init__()
        model = config.model
        # the graph ends around it: how many tokens an expert has differs from step to step
        if compiles(config):
            self.forward = torch.compiler.disable(self.forward)  # type: ignore[method-assign]
        self.tp, self.group, self.parts = mesh.tp, mesh.group("ep", "etp"), mesh.group("etp").size
        self.divides = mesh.tp.size > 1 and not config.parallel.sequence
        activation = partial(ACTIVATIONS[model.activation], implementation=model.kernels)
        self.kernels = model.kernels
        self.router = Router(config, mesh, dtype, device)
        self.experts = Experts(config, mesh, dtype, device, output_std, activation)
        ffn = model.shared_experts * (model.expert_ffn_size or 0)
        self.shared = FeedForward(config, mesh.tp, dtype, device, output_std, ffn) if ffn else None
        # else no row travels
        self.capacity, self.halves = (
            model.capacity_factor,
            config.parallel.expert_halves and self.group.size > 1,
        )
        # Who proves a layout replaces choices by others, and which rows are dropped.
        self.decide: Callable[[Context, int, Tensor, Tensor], Tensor] | None = None
        self.decide_drops: Callable[[Context, int, Tensor, Tensor, Tensor], Tensor] | None = None
        self.expected: Expected = evenly  # on meta
        self.keeps = config.train.recompute == "full"
        self.kept: dict[int, list[Route]] = {}  # by microbatch, for the backward that runs the layer again

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, ...]:
        """``[tokens, hidden]`` → the same (with sequence parallelism this rank's
        tokens), and the sums of `losses_of`.
        """
        own = scatter_tokens(x, self.tp) if self.divides else x
        scored = self.router.score(own)
        first = self.tp.rank * len(own)  # of this rank's tokens, among those of its context rank
        routes = self._route(scored, context, first)
        chosen, how = joined([route.chosen for route in routes]), self.kernels
        there = [
            send(spread(part, route.slots, implementation=how), route) for part, route in divided(own, routes)
        ]
        shared = None if self.shared is None else self.shared(x)  # while rows travel
        # Of two halves one travels while the experts compute the other.
        back = [
            give_back(self.experts(arrange(rows.arrive(), route), route.ends), route)
            for rows, route in zip(there, routes, strict=True)
        ]
        weights = divided(self.router.weights(scored.scores, chosen), routes)
        parts = [
            combine(own_rows(rows.arrive(), route), route.slots, of_kept(part, route), implementation=how)
            for rows, (part, route) in zip(back, weights, strict=True)
        ]
        y = joined(parts)
        if self.divides:
            y = gather_tokens(y, self.tp)[: len(x)]
        y = y if shared is None else y + shared
        if not y.requires_grad:  # all before it is frozen too: no backward comes for the routes
            self.kept.pop(context.key, None)
        return y, *self._losses(scored, chosen, context, first)

    def _losses(self, scored: Scored, chosen: Tensor, context: Context, first: int) -> list[Tensor]:
        """The sums of `losses_of`; of a text that is written none is asked for."""
        if context.batch.targets is None:
            return [scored.scores.new_zeros(()) for _ in losses_of(self.router.model)]
        losses = self.router.losses(scored, chosen, first, context.seq_len, context.batch_size)
        if self.divides:  # each rank then gives the sum over all their tokens
            losses = [leave_tensor_parallel(loss, self.tp, False) for loss in losses]
        return losses

    def _route(self, scored: Scored, context: Context, first: int) -> list[Route]:
        """The ways of a microbatch's tokens; of a recomputed pass those of the first."""
        key = context.key
        if key in self.kept:
            return self.kept.pop(key)
        ranked = self.router.ranked(scored.scores)
        chosen = self.router.choose(ranked)
        if self.decide is not None and self.training:
            chosen = self.decide(context, first, ranked, chosen)
        fits = self._fits(scored, chosen, context, first) if self.capacity and self.training else None
        routes = routes_of(
            chosen, self.router.experts, self.group, self.parts, fits, self.halves, self.expected
        )
        self.router.note(key, sum_of([route.counts for route in routes]))
        if fits is not None:
            self.router.note_drops(fits)
        if self.keeps and self.training:
            self.kept[key] = routes
        return routes

    def _fits(self, scored: Scored, chosen: Tensor, context: Context, first: int) -> Tensor:
        """Which rows are not dropped.

        The weights of a token's others stay as they are (as in Switch and Megatron).
        """
        weights, places = (
            self.router.weights(scored.scores.detach(), chosen),
            context.places(first, len(chosen), chosen.device),
        )
        experts, ranks = self.router.experts, self.router.sequence_ranks
        fits = within_capacity(weights, chosen, experts, resolved(self.capacity), places, ranks)
        return fits if self.decide_drops is None else self.decide_drops(context, first, weights, chosen, fits)


def divided(x: Tensor, routes: Sequence[Route]) -> list[tuple[Tensor, Route]]:
    """What the tokens of each route have of ``[tokens, …]``."""
    parts = [x] if len(routes) == 1 else x.split([len(route.chosen) for route in routes])
    return list(zip(parts, routes, strict=True))


def of_kept(weights: Tensor, route: Route) -> Tensor:
    """Weights of rows, zero for those that are dropped, of which experts with biases may make something."""
    return weights if route.fits is None else weights.masked_fill(~route.fits, 0)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts one behind the other, without a copy of one alone."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class ExpertBlock(Block):
    """A `Block` with a `MixtureOfExperts`."""

    def make_feed_forward(
        self, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device, output_std: float
    ) -> nn.Module:
        """See `Block`."""
        return MixtureOfExperts(config, mesh, dtype, device, output_std)

    def forward(self, x: Tensor, context: Context) -> Any:
        """``[tokens, hidden]`` → the same, and the sums of its losses."""
        x, h = self.behind_attention(x, self.attention(self.norm1(x), context), context)
        y, *losses = self.feed_forward(h, context)
        return context.add(x, y, self.scale, self.index, "feed_forward"), *losses


def expert_block(config: Config) -> type[ExpertBlock]:
    """The class of a config's blocks with experts, which declares their losses."""
    return type("ExpertBlock", (ExpertBlock,), {"losses": losses_of(config.model)})
