"""Mistakes that happened in public trainers, or what they would be here; each names where it happened.

Other modules hold some more.
"""

from typing import Any
from unittest import mock

import numpy as np
import torch

from megacore.context_parallel import attention
from megacore.data import packing, samples
from megacore.distributed import collectives as comm
from megacore.engine import fsdp, reduce, stepper
from megacore.model import context
from megacore.train import step
from tests.faults import MASKED, fault
from tests.faults.collectives import twice
from tests.faults.context import DOCUMENTS, FIRST, LOSS, QKV, ULYSSES
from tests.faults.data import SUM_APART

patch = mock.patch.object
PACKED = "data.packing=best_fit"


@fault(
    "a rank without a learned target divides by their number, 0 (Megatron-LM issue 1764)",
    "dp2",
    LOSS,
    MASKED,
)
def division_by_no_targets() -> Any:
    def own(self: Any, batch: Any, field: str) -> Any:
        count = torch.stack([(microbatch[field] != step.IGNORED).sum() for microbatch in batch]).sum()
        return 1.0 / (count.double() * self.mesh.sample_group.size)

    return patch(step.TrainStep, "one_over_count", own)


@fault("a corpus's mask of learned tokens is not read", "one", "the loss, microbatch 0, forward", MASKED)
def mask_not_read() -> Any:
    return patch(packing.IndexedTokens, "learned", lambda self, start, length: np.ones(length, np.bool_))


@fault("padding behind packed documents is learned", "one", "the loss, microbatch 1, forward", PACKED)
def padding_learned() -> Any:
    right = samples.learned

    def all_behind(corpus: Any, spans: Any, row: int) -> Any:
        found = right(corpus, spans, row)
        found[sum(length for _, length in spans) :] = True
        return found

    return patch(samples, "learned", all_behind)


@fault(
    "only where tensor and context ranks meet, tensor ranks drop out with one another's masks (broken in "
    "combination alone: torchtitan "
    "issue 2446, Megatron-LM issue 7452)",
    "cp2tp2sp",
    FIRST,
    "model.dropout=0.1",
)
def masks_wrong_in_combination() -> Any:
    right = context.Context.runs

    def forgotten(self: Any, offset: int, tokens: int) -> Any:
        divided = self.sequences is not None and self.sequences.group.size > 1
        return right(self, 0 if divided else offset, tokens)

    return patch(context.Context, "runs", forgotten)


@fault(
    "the gradients of a key/value head that several ranks use are not summed (multi-query attention: "
    "bigcode Megatron-LM issue 35)",
    "cp4",
    QKV,
    ULYSSES,
    "model.num_kv_heads=2",
)
def shared_head_unsummed() -> Any:
    right = attention.UlyssesAttention.backward

    def of_the_first(ctx: Any, grad: Any) -> Any:
        ranks, ctx.short = ctx.short, 1
        grad_q, grad_k, grad_v, *rest = right(ctx, grad)
        return grad_q, grad_k[:, ::ranks].clone(), grad_v[:, ::ranks].clone(), *rest

    return patch(attention.UlyssesAttention, "backward", staticmethod(of_the_first))


@fault(
    "the gradient of what every tensor rank holds whole, and uses for its own heads, is summed twice "
    "(AReno PR 496; Megatron-LM PR 6839)",
    "tp2",
    SUM_APART.replace("embedding.weight", "blocks.0.attention.query_norm.weight"),
    "model.qk_norm=true",
)
def replicated_gradient_summed_twice() -> Any:
    return patch(reduce, "all_reduce", twice(comm.all_reduce))


@fault(
    "the norm counts every copy of a gradient that fsdp holds in copies (torchtitan issue 2318: 8 × "
    "between HSDP and FSDP)",
    "dp4",
    "every gradient agrees; the gradient norm does not",
    "engine.kind=fsdp",
    "engine.shard_size=2",
)
def norm_counts_copies() -> Any:
    right = fsdp.ShardRows.norm_weights
    return patch(fsdp.ShardRows, "norm_weights", lambda self: right(self) * self.replicate.size)


@fault(
    "a step whose gradient is not a number is taken, and saved over the weights before it (torchtitan "
    "issue 865; marin issue 7271)",
    "one",
    "another count of updates is saved after step 2",
    check="trained",
)
def not_a_number_taken() -> Any:
    right = stepper.OptimizerStep.step

    def taken(self: Any, *arguments: Any) -> Any:
        update = self.optimizer.step
        with patch(self.optimizer, "step", lambda lr, scale, skip: update(lr, scale, torch.zeros_like(skip))):
            return right(self, *arguments)

    return patch(stepper.OptimizerStep, "step", taken)


@fault(
    "a document that is cut into pieces loses a target at each cut",
    "one",
    "module embedding, its input, microbatch 0, forward",
    PACKED,
    DOCUMENTS,
)
def targets_lost_at_cuts() -> Any:
    right = packing.WholeDocuments.spans

    def apart(self: Any, sample: int) -> Any:
        begins = [self.corpus.document_and_offset(start)[1] == 0 for start, _ in right(self, sample)]
        return [
            (s, n) if b or n < 2 else (s + 1, n - 1)
            for (s, n), b in zip(right(self, sample), begins, strict=True)
        ]

    return patch(packing.WholeDocuments, "spans", apart)


def not_learned_at_cuts() -> Any:
    """The second token of a piece that goes on with a document is no target, as if the
    piece were a document of its own.
    """
    right = samples.learned

    def as_begun(corpus: Any, spans: Any, row: int) -> Any:
        found, at = right(corpus, spans, row), 0
        for start, length in spans:
            if length > 1 and corpus.document_and_offset(start)[1]:
                found[at + 1] = False
            at += length
        return found

    return patch(samples, "learned", as_begun)


@fault(
    "a cut document's second piece loses its first target, in packed samples",
    "one",
    "the loss, microbatch 1, forward",
    PACKED,
    MASKED,
)
def target_behind_a_cut_lost() -> Any:
    return not_learned_at_cuts()


@fault(
    "a cut document's second piece loses its first target, in samples of consecutive tokens",
    "one",
    "the loss, microbatch 0, forward",
    DOCUMENTS,
    MASKED,
)
def target_behind_a_sample_s_edge_lost() -> Any:
    return not_learned_at_cuts()
