"""Mistakes with experts, which see the ranks of a stage in a view of their own, and whose tokens travel."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.distributed import buffers
from megacore.distributed import collectives as comm
from megacore.distributed.communicator import SOLO
from megacore.distributed.shard import Shard
from megacore.distributed.topology import Topology
from megacore.engine import optimizers
from megacore.expert_parallel import dispatch, experts, router
from megacore.model import expert_block
from tests.faults import both, fault

patch = mock.patch.object
EXPERTS = ("model.bias=false", "model.num_experts=8", "model.expert_ffn_size=64", "model.first_dense=1")
SCARCE = (*EXPERTS, "model.experts_per_token=1", "train.seq_len=4", "train.micro_batch_size=1", "train.global_batch_size=1")
GROUPS = ("model.expert_groups=4", "model.groups_per_token=1", "model.router_balance=sequence")
BALANCED = (*EXPERTS, "model.router_balance=sequence")
UP = "blocks.1.feed_forward.experts.up"
SUMS = "every microbatch's gradients agree; their sum over microbatches and ranks does not: first"
NORM = "every gradient agrees; the gradient norm does not"


def is_of_experts(shard: Shard) -> bool:
    """Whether it is divided as experts are, if perhaps over one rank."""
    return any(along.axis == "ep" for along in shard.along)


@fault("gradients of experts are summed over ranks that hold others (pytorch issue 160285)", "ep2", f"{SUMS} {UP}", *EXPERTS)
def experts_summed_over_all() -> Any:
    gradient_sum = Topology.gradient_sum

    def wide(self: Topology, shard: Shard) -> Any:
        return gradient_sum(self, replace(shard, along=tuple(along for along in shard.along if along.axis != "ep")))

    return patch(Topology, "gradient_sum", wide)


@fault("… that hold other features of the same (Megatron-LM issue 1628)", "dp2etp2", f"{SUMS} {UP}", *EXPERTS)
def features_summed() -> Any:
    gradient_sum = Topology.gradient_sum

    def along_features(self: Topology, shard: Shard) -> Any:
        right = gradient_sum(self, shard)
        return replace(right, tokens=("etp",), levels=self.levels_along("etp")) if is_of_experts(shard) else right

    return patch(Topology, "gradient_sum", along_features)


@fault("… are as many times too large as ranks divide the experts (Megatron-LM PR 5956)", "ep2", f"{SUMS} {UP}", *EXPERTS)
def experts_by_their_ranks() -> Any:
    forward, outer = experts.Experts.forward, experts.grouped_outer
    ranks = 1

    def counted(self: experts.Experts, *rest: Any) -> Tensor:
        nonlocal ranks
        ranks = 8 // self.sizes[0]
        return forward(self, *rest)

    return both(
        patch(experts.Experts, "forward", counted),
        patch(experts, "grouped_outer", lambda *rest, **options: ranks * outer(*rest, **options)),
    )


def counted(weight: Any) -> Any:
    """Another number of copies for experts' gradients in the norm."""
    copies = Shard.copies

    def other(self: Shard, but: Any = ()) -> Any:
        return weight(copies(self, but)) if is_of_experts(self) else copies(self, but)

    return patch(Shard, "copies", other)


@fault("the gradient norm leaves experts out (Megatron-LM PR 5916)", "ep2", NORM, *EXPERTS)
def norm_without_experts() -> Any:
    return counted(lambda copies: 1e30)


@fault("the gradient norm counts copies of experts as others", "dp4ep2", NORM, *EXPERTS)
def norm_with_copies_of_experts() -> Any:
    return counted(lambda copies: 1)


@fault("tokens of a sequence are counted on each tensor rank by itself (Megatron-LM PR 5047)", "tp2sp",
       "module blocks.1.feed_forward, its output 1, microbatch 0, forward",
       *BALANCED, "train.micro_batch_size=3", "train.global_batch_size=24")  # fmt: skip
def balance_by_tensor_rank() -> Any:
    return patch(router, "all_reduce", lambda x, group: x)


@fault("the router's gradient is left partial over tensor ranks (torchtitan PR 2416)", "tp2sp",
       "module blocks.3.feed_forward.router, gradient of its weight, microbatch 0, backward", *EXPERTS)  # fmt: skip
def router_left_partial() -> Any:
    whole = router.replicated
    return patch(router, "replicated", lambda group, partial: whole(group))


@fault("the scores' gradient ends where ranks gather them (NeMo Automodel PR 2995)", "tp2sp",
       "module blocks.3.norm2, gradient of its output, microbatch 0, backward", *EXPERTS)  # fmt: skip
def router_detached_by_a_gather() -> Any:
    weights = router.Router.weights

    def gathered(self: router.Router, scores: Tensor, chosen: Tensor) -> Tensor:
        return weights(self, comm.own_part(comm.all_gather(scores, self.sequence_ranks), self.sequence_ranks), chosen)

    return patch(router.Router, "weights", gathered)


@fault("tensor ranks count their tokens for the first sequences, whichever they are of (counts over a batch in another order)", "tp2sp",
       "module blocks.1.feed_forward, its output 1, microbatch 0, forward", *BALANCED)  # fmt: skip
def balance_in_another_order() -> Any:
    losses = router.Router.losses
    return patch(router.Router, "losses", lambda self, scored, chosen, first, *rest: losses(self, scored, chosen, 0, *rest))


@fault("the loss of balance counts what the router would choose without its groups, which the dispatch heeds (Megatron-LM PR 5195)", "one",
       "the loss number 1", *GROUPS, check="formula")  # fmt: skip
def balance_of_another_routing() -> Any:
    losses = router.Router.losses

    def ungrouped(self: router.Router, scored: router.Scored, chosen: Tensor, *rest: int) -> list[Tensor]:
        return losses(self, scored, router.first_of(scored.scores, chosen.shape[1]), *rest)

    return patch(router.Router, "losses", ungrouped)


@fault("… has no gradient (NeMo Automodel issue 1408)", "one", "the gradient of x", *GROUPS, check="formula")
def balance_without_gradient() -> Any:
    losses = router.Router.losses
    return patch(router.Router, "losses", lambda *rest: [loss.detach() for loss in losses(*rest)])


@fault("what the way back needs is kept in the module, where the next microbatch writes over it (hyper-parallel issue 746)", "pp2ep2",
       "module blocks.3.norm2, gradient of its output, microbatch 0, backward", *EXPERTS)  # fmt: skip
def ways_of_another_microbatch() -> Any:
    forward, latest = dispatch._Gather.forward, dict[torch.Size, Tensor]()

    def keep(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        latest[back.shape] = back
        return forward(ctx, x, order, back)

    def last(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[latest[ctx.saved_tensors[0].shape]], None, None

    return mock.patch.multiple(dispatch._Gather, forward=staticmethod(keep), backward=staticmethod(last))


@fault("a router's bias moves by the counts of a rank's own tokens", "ep2",
       "every update agrees; a buffer (what is counted, or over which ranks) does not: first blocks.1.feed_forward.router.bias",
       *EXPERTS, "model.router_bias_rate=0.1")  # fmt: skip
def bias_by_own_counts() -> Any:
    return patch(buffers, "all_reduce", lambda x, group, op: x)


@fault("a recomputed pass counts its microbatch again, where others wait with it (torchtitan PR 1593)", "pp2ep2",
       "every update agrees; a buffer (what is counted, or over which ranks) does not: first blocks.1.feed_forward.router.load",
       *EXPERTS, "train.recompute=full")  # fmt: skip
def counted_again() -> Any:
    route = expert_block.MixtureOfExperts._route

    def again(self: expert_block.MixtureOfExperts, scored: Any, context: Any, first: int) -> list[dispatch.Route]:
        recomputed, waiting = context.key in self.kept, len(self.kept) > 1
        found = route(self, scored, context, first)
        if recomputed and waiting:
            self.router.note(-context.key, found[0].counts)  # as of another microbatch
        return found

    return patch(expert_block.MixtureOfExperts, "_route", again)


@fault("an expert without a token is left out of the update, so its weights do not decay (NeMo Automodel PR 2995)", "ep2",
       f"every gradient and moment agrees; the update (rate, weight decay, bias correction) does not: first {UP}",
       *SCARCE, "optim.kind=sgd")  # fmt: skip
def experts_without_tokens_undecayed() -> Any:
    step = optimizers.RangeUpdate.step

    def some(self: optimizers.RangeUpdate, *rest: Any) -> None:
        before = [master.clone() for master in self.tensors.masters]
        step(self, *rest)
        for master, old, gradient in zip(self.tensors.masters, before, self.tensors.gradients, strict=True):
            master.copy_(torch.where(gradient == 0, old, master))

    return patch(optimizers.RangeUpdate, "step", some)


@fault("rows of a rank's last expert hold what memory held (uninitialised rows of a grouped product: transformers PR 48205)", "ep2",
       "module blocks.1.feed_forward, its output, microbatch 0, forward", *EXPERTS)  # fmt: skip
def rows_unwritten() -> Any:
    forward = experts.Experts.forward

    def short(self: experts.Experts, rows: Tensor, ends: Tensor) -> Tensor:
        y = forward(self, rows, ends)
        if self.sizes[0] == 8:  # all experts: their last is the last
            return y
        return torch.cat([y[: ends[-2]], torch.ones_like(y[ends[-2] :])])

    return patch(experts.Experts, "forward", short)


@fault("… so does the gradient of an expert without rows", "tp4etp1", f"{SUMS} {UP}", *EXPERTS, "model.experts_per_token=1")
def gradient_unwritten() -> Any:
    outer = experts.grouped_outer

    def unwritten(grad: Tensor, x: Tensor, ends: Tensor, dtype: torch.dtype, **options: Any) -> Tensor:
        total = outer(grad, x, ends, dtype, **options)
        total[ends.diff(prepend=ends.new_zeros(1)) == 0] = 1.0 if len(x) < 32 else 0.0  # fewer than one process has: other memory
        return total

    return patch(experts, "grouped_outer", unwritten)


BIASED = (*EXPERTS, "model.router_bias_rate=0.02")
ROUTED = "routers choose other experts than on one process: first blocks.1.feed_forward"


@fault("a router adds the bias of every tensor rank, which all hold it", "tp2", ROUTED, *BIASED)
def bias_by_its_copies() -> Any:
    def ranked(self: router.Router, scores: Tensor) -> Tensor:
        assert self.bias is not None
        return scores.detach() + self.sequence_ranks.size * self.bias.value

    return patch(router.Router, "ranked", ranked)


@fault("… in bf16, where experts may be chosen that are as good", "tp2", ROUTED, *BIASED, precision="bf16")
def bias_by_its_copies_in_bf16() -> Any:
    return bias_by_its_copies()


DROPS = (*EXPERTS, "model.capacity_factor=0.6")


@fault("a rank drops rows that do not fit among its own, in place of its microbatch's", "tp2sp", ROUTED, *DROPS)
def capacity_of_a_rank() -> Any:
    within = expert_block.within_capacity

    def alone(weights: Tensor, chosen: Tensor, count: int, factor: float, places: Tensor, group: Any) -> Tensor:
        return within(weights, chosen, count, factor, torch.arange(len(places)), SOLO)

    return patch(expert_block, "within_capacity", alone)


@fault("rows that are dropped hold behind a grouped product what memory held (transformers PR 48205)", "dp2",
       "module blocks.1.feed_forward, its output, microbatch 0, forward", *DROPS)  # fmt: skip
def dropped_rows_unwritten() -> Any:
    product = experts.grouped_product

    def unwritten(x: Tensor, weight: Tensor, ends: Tensor, **options: Any) -> Tensor:
        behind = torch.arange(len(x), device=x.device) >= ends[-1]
        held = torch.nan if dist.is_initialized() else 0.0  # in the reference
        return product(x, weight, ends, **options).masked_fill(behind[:, None], held)

    return patch(experts, "grouped_product", unwritten)


@fault("gates of experts on other ranks have no gradient (transformers PR 48687)", "ep2",
       "module blocks.3.feed_forward.router, gradient of its weight, microbatch 0, backward", *EXPERTS)  # fmt: skip
def gates_of_others_without_gradient() -> Any:
    def detached(mixture: Any, own: Tensor, combine: Combine, weights: Tensor) -> Tensor:
        return combine(torch.where(own, weights, weights.detach()))

    return combined(detached)


@fault("an expert's bias is added whatever its weight (Automodel PR 2591)", "ep2",
       "module blocks.1.feed_forward, its output, microbatch 0, forward", *EXPERTS, "model.bias=true")  # fmt: skip
def biases_whatever_their_weight() -> Any:
    def unweighted(mixture: Any, own: Tensor, combine: Combine, weights: Tensor) -> Tensor:
        chosen = mixture.chosen_last % len(mixture.experts.down_bias)
        more = torch.where(own, 1 - weights, 0.0)[..., None] * mixture.experts.down_bias[chosen]
        return combine(weights) + (more.sum(1) if mixture.group.size > 1 else 0.0)

    return combined(unweighted)


@fault("an expert's last bias is added by every rank that has a part of it", "dp2etp2",
       "module blocks.1.feed_forward, its output, microbatch 0, forward", *EXPERTS, "model.bias=true")  # fmt: skip
def biases_by_every_part() -> Any:
    forward = experts.Experts.forward

    def added(self: Any, rows: Tensor, ends: Tensor) -> Tensor:
        self.first = True
        return forward(self, rows, ends)

    return patch(experts.Experts, "forward", added)


Combine = Callable[[Tensor], Tensor]


def combined(how: Callable[[Any, Tensor, Combine, Tensor], Tensor]) -> Any:
    """Another way to put a token's rows together: given the mixture, which of a token's experts are on this rank, what does it right by
    the weights, and these."""
    combine, forward, routes = expert_block.combine, expert_block.MixtureOfExperts.forward, expert_block.routes_of
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

    return both(patch(expert_block, "routes_of", remembered), patch(expert_block.MixtureOfExperts, "forward", of_mixture))
