"""Mistakes with experts, which see the ranks of a stage in a view of their own, and whose tokens travel."""

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megacore.distributed import buffers
from megacore.distributed.shard import Shard
from megacore.distributed.topology import Topology
from megacore.expert_parallel import dispatch, router
from megacore.model import expert_block
from tests.faults import both, fault

patch = mock.patch.object
EXPERTS = ("model.bias=false", "model.num_experts=8", "model.expert_ffn_size=64", "model.first_dense=1")
BALANCED = (*EXPERTS, "model.router_balance=sequence")
SUMS = "every microbatch's gradients agree; their sum over microbatches and ranks does not: first"
NORM = "every gradient agrees; the gradient norm does not"


def is_of_experts(shard: Shard) -> bool:
    """Whether it is divided as experts are, if perhaps over one rank."""
    return any(along.axis == "ep" for along in shard.along)


@fault("gradients of experts are summed over ranks that hold others (pytorch issue 160285)", "ep2",
       f"{SUMS} blocks.1.feed_forward.experts.up", *EXPERTS)  # fmt: skip
def experts_summed_over_all() -> Any:
    gradient_sum = Topology.gradient_sum

    def wide(self: Topology, shard: Shard) -> Any:
        return gradient_sum(self, replace(shard, along=tuple(along for along in shard.along if along.axis != "ep")))

    return patch(Topology, "gradient_sum", wide)


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
       "every update agrees; a buffer (what is counted, or over which ranks) does not: first blocks.1.feed_forward.router.load",
       *EXPERTS, "model.router_bias_rate=0.1")  # fmt: skip
def bias_by_own_counts() -> Any:
    return patch(buffers, "all_reduce", lambda x, group, op: x)


@fault("gates of experts on other ranks have no gradient (transformers PR 48687)", "ep2",
       "module blocks.3.feed_forward.router, gradient of its weight, microbatch 0, backward", *EXPERTS)  # fmt: skip
def gates_of_others_without_gradient() -> Any:
    combine = expert_block.combine

    def own_alone(mixture: Any, *rest: Any) -> Any:
        ranks, rank = mixture.group.size // mixture.parts, mixture.group.rank // mixture.parts

        def detached(rows: Tensor, slots: Tensor, weights: Tensor, **options: Any) -> Tensor:
            own = route_of_last[0].chosen // (8 // ranks) == rank
            return combine(rows, slots, torch.where(own, weights, weights.detach()), **options)

        with patch(expert_block, "combine", detached):
            return forward(mixture, *rest)

    forward, route = expert_block.MixtureOfExperts.forward, expert_block.route_of
    route_of_last: list[dispatch.Route] = []

    def remembered(*rest: Any) -> dispatch.Route:
        route_of_last[:] = [route(*rest)]
        return route_of_last[0]

    return both(patch(expert_block, "route_of", remembered), patch(expert_block.MixtureOfExperts, "forward", own_alone))
