"""Mistakes with routers: scores and their gradients, the choice, losses of balance, counts, and
the bias that follows from them.
"""

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megacore.distributed import buffers
from megacore.distributed import collectives as comm
from megacore.expert_parallel import dispatch, router
from megacore.model import expert_block
from megacore.train.step import TrainStep
from tests.faults import fault
from tests.faults.experts import EXPERTS, ROUTED

patch = mock.patch.object
GROUPS = ("model.expert_groups=4", "model.groups_per_token=1", "model.router_balance=sequence")
BALANCED = (*EXPERTS, "model.router_balance=sequence")
BIASED = (*EXPERTS, "model.router_bias_rate=0.02")


@fault(
    "tokens of a sequence are counted on each tensor rank by itself (Megatron-LM PR 5047)",
    "tp2sp",
    "module blocks.1.feed_forward, its output 1, microbatch 0, forward",
    *BALANCED,
    "train.micro_batch_size=3",
    "train.global_batch_size=24",
)
def balance_by_tensor_rank() -> Any:
    return patch(router, "all_reduce", lambda x, group: x)


@fault(
    "the router's gradient is left partial over tensor ranks (torchtitan PR 2416)",
    "tp2sp",
    "module blocks.3.feed_forward.router, gradient of its weight, microbatch 0, backward",
    *EXPERTS,
)
def router_left_partial() -> Any:
    whole = router.replicated
    return patch(router, "replicated", lambda group, partial: whole(group))


@fault(
    "the scores' gradient ends where ranks gather them (NeMo Automodel PR 2995)",
    "tp2sp",
    "module blocks.3.norm2, gradient of its output, microbatch 0, backward",
    *EXPERTS,
)
def router_detached_by_a_gather() -> Any:
    weights = router.Router.weights

    def gathered(self: router.Router, scores: Tensor, chosen: Tensor) -> Tensor:
        return weights(
            self, comm.own_part(comm.all_gather(scores, self.sequence_ranks), self.sequence_ranks), chosen
        )

    return patch(router.Router, "weights", gathered)


@fault(
    "tensor ranks count their tokens for the first sequences, whichever they are of (counts over a batch "
    "in another order)",
    "tp2sp",
    "module blocks.1.feed_forward, its output 1, microbatch 0, forward",
    *BALANCED,
)
def balance_in_another_order() -> Any:
    losses = router.Router.losses
    return patch(
        router.Router,
        "losses",
        lambda self, scored, chosen, first, *rest: losses(self, scored, chosen, 0, *rest),
    )


@fault(
    "the loss of balance counts what the router would choose without its groups, which the dispatch heeds "
    "(Megatron-LM PR 5195)",
    "one",
    "the loss number 1",
    *GROUPS,
    check="formula",
)
def balance_of_another_routing() -> Any:
    losses = router.Router.losses

    def ungrouped(self: router.Router, scored: router.Scored, chosen: Tensor, *rest: int) -> list[Tensor]:
        return losses(self, scored, router.first_of(scored.scores, chosen.shape[1]), *rest)

    return patch(router.Router, "losses", ungrouped)


@fault(
    "the balance loss has no gradient (NeMo Automodel issue 1408)",
    "one",
    "the gradient of x",
    *GROUPS,
    check="formula",
)
def balance_without_gradient() -> Any:
    losses = router.Router.losses
    return patch(router.Router, "losses", lambda *rest: [loss.detach() for loss in losses(*rest)])


@fault(
    "a router's bias moves by the counts of a rank's own tokens",
    "ep2",
    "every update agrees; a buffer (what is counted, or over which ranks) does not: first "
    "blocks.1.feed_forward.router.bias",
    *EXPERTS,
    "model.router_bias_rate=0.1",
)
def bias_by_own_counts() -> Any:
    return patch(buffers, "all_reduce", lambda x, group, op: x)


@fault(
    "a recomputed pass counts its microbatch again, where others wait with it (torchtitan PR 1593)",
    "pp2ep2",
    "every update agrees; a buffer (what is counted, or over which ranks) does not: first "
    "blocks.1.feed_forward.router.load",
    *EXPERTS,
    "train.recompute=full",
)
def counted_again() -> Any:
    route = expert_block.MixtureOfExperts._route

    def again(
        self: expert_block.MixtureOfExperts, scored: Any, context: Any, first: int
    ) -> list[dispatch.Route]:
        recomputed, waiting = context.key in self.kept, len(self.kept) > 1
        found = route(self, scored, context, first)
        if recomputed and waiting:
            self.router.note(-context.key, found[0].counts)  # as of another microbatch
        return found

    return patch(expert_block.MixtureOfExperts, "_route", again)


@fault("a router adds the bias of every tensor rank, which all hold it", "tp2", ROUTED, *BIASED)
def bias_by_its_copies() -> Any:
    def ranked(self: router.Router, scores: Tensor) -> Tensor:
        assert self.bias is not None
        return scores.detach() + self.sequence_ranks.size * self.bias.value

    return patch(router.Router, "ranked", ranked)


@fault(
    "a router adds the bias of every tensor rank, in bf16, where equally good experts may be chosen",
    "tp2",
    ROUTED,
    *BIASED,
    precision="bf16",
)
def bias_by_its_copies_in_bf16() -> Any:
    return bias_by_its_copies()


SIGMOIDS = ("model.router_scores=sigmoid", "model.router_bias_rate=0.1")


@fault(
    "the bias by which experts are chosen also weighs them (transformers PR 41647, vLLM PR 12002)",
    "one",
    "the result",
    *SIGMOIDS,
    check="formula",
)
def bias_that_weighs() -> Any:
    weights = router.Router.weights

    def biased(self: router.Router, scores: Tensor, chosen: Tensor) -> Tensor:
        assert self.bias is not None
        return weights(self, scores + self.bias.value, chosen)

    return patch(router.Router, "weights", biased)


@fault(
    "groups of experts are chosen by their best alone, where scores are sigmoids (vLLM PR 13474)",
    "one",
    "the result",
    *SIGMOIDS,
    "model.expert_groups=4",
    "model.groups_per_token=2",
    check="formula",
)
def groups_by_their_best() -> Any:
    return patch(router, "NARROWEST", 1)


@fault(
    "an expert of another group is taken before one whose score plus bias is negative",
    "one",
    "the result",
    "model.router_bias_rate=0.1",
    "model.expert_groups=4",
    "model.groups_per_token=1",
    check="formula",
)
def other_groups_before_negative_scores() -> Any:
    masked_fill = Tensor.masked_fill

    def with_zero(self: Tensor, mask: Tensor, value: float) -> Tensor:
        return masked_fill(self, mask, 0.0 if value == -torch.inf else value)

    def choose(self: router.Router, ranked: Tensor) -> Tensor:
        with patch(Tensor, "masked_fill", with_zero):
            return right(self, ranked)

    right = router.Router.choose
    return patch(router.Router, "choose", choose)


@fault(
    "a router's bias moves after every microbatch, by a rank's own counts (torchtitan PR 1304)",
    "dp2",
    ROUTED,
    *BIASED,
)
def bias_by_microbatches() -> Any:
    note = router.Router.note

    def moved(self: router.Router, key: int, counts: Tensor) -> None:
        note(self, key, counts)
        assert self.bias is not None
        self.bias.value = router.towards_mean(0.1)(self.bias.value, counts.double())

    return patch(router.Router, "note", moved)


@fault(
    "losses of balance are not divided by the microbatches that a rank adds up (NeMo Automodel PR 3359)",
    "dp2",
    "module blocks.3.feed_forward, gradient of its output 1, microbatch 0, backward",
    *BALANCED,
)
def balance_by_microbatches() -> Any:
    loss_weights = TrainStep.loss_weights

    def undivided(self: TrainStep, batch: Any) -> dict[str, float | Tensor]:
        found = loss_weights(self, batch)
        return found | {router.BALANCE: len(batch) * found[router.BALANCE]}

    return patch(TrainStep, "loss_weights", undivided)
