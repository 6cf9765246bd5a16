"""Mistakes with the weights of experts, which see the ranks of a stage in a view of their
own: sums, norm, update, rows.
"""

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megacore.distributed.shard import Shard
from megacore.distributed.topology import Topology
from megacore.engine import optimizers
from megacore.expert_parallel import experts
from tests.faults import both, fault

patch = mock.patch.object
EXPERTS = ("model.bias=false", "model.num_experts=8", "model.expert_ffn_size=64", "model.first_dense=1")
SCARCE = (
    *EXPERTS,
    "model.experts_per_token=1",
    "train.seq_len=4",
    "train.micro_batch_size=1",
    "train.global_batch_size=1",
)
ROUTED = "routers choose other experts than on one process: first blocks.1.feed_forward"
UP = "blocks.1.feed_forward.experts.up"
SUMS = "every microbatch's gradients agree; their sum over microbatches and ranks does not: first"
NORM = "every gradient agrees; the gradient norm does not"


def is_of_experts(shard: Shard) -> bool:
    """Whether it is divided as experts are, if perhaps over one rank."""
    return any(along.axis == "ep" for along in shard.along)


@fault(
    "gradients of experts are summed over ranks that hold others (pytorch issue 160285)",
    "ep2",
    f"{SUMS} {UP}",
    *EXPERTS,
)
def experts_summed_over_all() -> Any:
    gradient_sum = Topology.gradient_sum

    def wide(self: Topology, shard: Shard) -> Any:
        return gradient_sum(
            self, replace(shard, along=tuple(along for along in shard.along if along.axis != "ep"))
        )

    return patch(Topology, "gradient_sum", wide)


@fault(
    "gradients of experts are summed over ranks that hold other features of the same "
    "experts (Megatron-LM issue 1628)",
    "dp2etp2",
    f"{SUMS} {UP}",
    *EXPERTS,
)
def features_summed() -> Any:
    gradient_sum = Topology.gradient_sum

    def along_features(self: Topology, shard: Shard) -> Any:
        right = gradient_sum(self, shard)
        return (
            replace(right, tokens=("etp",), levels=self.levels_along("etp"))
            if is_of_experts(shard)
            else right
        )

    return patch(Topology, "gradient_sum", along_features)


@fault(
    "gradients of experts are too large by the number of ranks that divide the experts (Megatron-LM PR 5956)",
    "ep2",
    f"{SUMS} {UP}",
    *EXPERTS,
)
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


@fault(
    "an expert without a token is left out of the update, so its weights do not decay (NeMo Automodel PR "
    "2995)",
    "ep2",
    "every gradient and moment agrees; the update (rate, weight decay, bias correction) does not: first "
    f"{UP}",
    *SCARCE,
    "optim.kind=sgd",
)
def experts_without_tokens_undecayed() -> Any:
    step = optimizers.RangeUpdate.step

    def some(self: optimizers.RangeUpdate, *rest: Any) -> None:
        before = [master.clone() for master in self.tensors.masters]
        step(self, *rest)
        for master, old, gradient in zip(self.tensors.masters, before, self.tensors.gradients, strict=True):
            master.copy_(torch.where(gradient == 0, old, master))

    return patch(optimizers.RangeUpdate, "step", some)


@fault(
    "rows of a rank's last expert hold what memory held (uninitialised rows of a grouped product: "
    "transformers PR 48205)",
    "ep2",
    "module blocks.1.feed_forward, its output, microbatch 0, forward",
    *EXPERTS,
)
def rows_unwritten() -> Any:
    forward = experts.Experts.forward

    def short(self: experts.Experts, rows: Tensor, ends: Tensor) -> Tensor:
        y = forward(self, rows, ends)
        if self.sizes[0] == 8:  # all experts: their last is the last
            return y
        return torch.cat([y[: ends[-2]], torch.ones_like(y[ends[-2] :])])

    return patch(experts.Experts, "forward", short)


@fault(
    "the gradient of an expert without rows is uninitialised memory",
    "tp4etp1",
    f"{SUMS} {UP}",
    *EXPERTS,
    "model.experts_per_token=1",
)
def gradient_unwritten() -> Any:
    outer = experts.grouped_outer

    def unwritten(grad: Tensor, x: Tensor, ends: Tensor, dtype: torch.dtype, **options: Any) -> Tensor:
        total = outer(grad, x, ends, dtype, **options)
        # fewer than one process has: other memory
        total[ends.diff(prepend=ends.new_zeros(1)) == 0] = 1.0 if len(x) < 32 else 0.0
        return total

    return patch(experts, "grouped_outer", unwritten)


@fault(
    "an expert's last bias is added by every rank that has a part of it",
    "dp2etp2",
    "module blocks.1.feed_forward, its output, microbatch 0, forward",
    *EXPERTS,
    "model.bias=true",
)
def biases_by_every_part() -> Any:
    forward = experts.Experts.forward

    def added(self: Any, rows: Tensor, ends: Tensor) -> Tensor:
        self.first = True
        return forward(self, rows, ends)

    return patch(experts.Experts, "forward", added)
