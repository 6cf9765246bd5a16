"""Mistakes of context parallelism, and of attention within documents."""

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from megacore.context_parallel import attention, scored
from megacore.context_parallel import ring_blocks as blocks
from megacore.context_parallel import sharding as pieces
from megacore.distributed import collectives as comm
from megacore.kernels import cross_entropy
from megacore.model import context, stage
from megacore.train import loader, step
from tests.faults import both, fault

patch = mock.patch.object
DOCUMENTS = "data.document_mask=true"
QKV = "module blocks.3.attention.qkv, gradient of its output, microbatch 0, backward"
ATTENTION = "module blocks.0.attention.output, its input, microbatch 0, forward"
FIRST = "module blocks.0, its input, microbatch 0, forward"
LOSS = "gradient of the loss, microbatch 0, backward"
RING, GATHER, ULYSSES = (f"parallel.context_method={method}" for method in ("ring", "gather", "ulysses"))


@fault(
    "ring attention's gradients of keys and values do not come home: each rank keeps its neighbour's (a "
    "wrong backward alone: "
    "Megatron-LM issue 1464)",
    "cp2",
    QKV,
    RING,
)
def ring_gradients_not_home() -> Any:
    take, right = attention.Coming.take, attention.RingAttention.backward
    taken = 0

    def kept(coming: Any) -> Any:
        nonlocal taken
        taken += 1
        received = take(coming)
        # keys and values, sums, and last the sums that come home
        return coming.sent if taken == 3 else received

    def backward(ctx: Any, grad: Any) -> Any:
        nonlocal taken
        taken = 0
        with patch(attention.Coming, "take", kept):
            return right(ctx, grad)

    return patch(attention.RingAttention, "backward", staticmethod(backward))


@fault("the gathered keys' gradients are not summed over the ranks that used them", "cp2", QKV, GATHER)
def gathered_gradients_unsummed() -> Any:
    return patch(attention, "reduce_scatter", lambda x, group: comm.own_part(x, group).clone())


@fault("a gather whose backward sums what is the same on all ranks (slime PR 1748)", "cp2", QKV, GATHER)
def gathered_gradients_summed_twice() -> Any:
    return patch(attention, "reduce_scatter", lambda x, group: comm.reduce_scatter(x, group) * group.size)


@fault("sequences are put together in the order of the ranks, not of their pieces", "cp2", ATTENTION, ULYSSES)
def pieces_out_of_order() -> Any:
    return patch(attention, "in_order", lambda gathered, sequences: torch.cat(tuple(gathered), 1))


@fault("a context rank counts its positions from 0", "cp2", ATTENTION, RING)
def positions_of_the_rank() -> Any:
    return patch(stage, "positions_of", lambda runs: np.arange(sum(run.stop - run.start for run in runs)))


@fault(
    "targets are shifted within a rank's piece, and lost at its edge",
    "cp2",
    "gradient of the logits, microbatch 0, backward",
    RING,
)
def targets_shifted_in_pieces() -> Any:
    def shifted(*args: Any, **options: Any) -> Any:
        batch = right(*args, **options)
        return replace(batch, targets=batch.tokens.roll(-1, 1))

    right = loader.microbatch_on
    return patch(loader, "microbatch_on", shifted)


@fault(
    "the loss is multiplied by the context ranks (Megatron-LM issues 673, 906; transformers issue 48167)",
    "cp2",
    LOSS,
    RING,
)
def loss_times_context() -> Any:
    right = step.TrainStep.one_over_count
    return patch(
        step.TrainStep, "one_over_count", lambda self, *arguments: right(self, *arguments) * self.mesh.cp.size
    )


@fault("context ranks drop out with one another's masks", "cp2", FIRST, RING, "model.dropout=0.1")
def masks_of_the_first_rank() -> Any:
    return patch(context.Context, "runs", lambda self, offset, tokens: iter([(slice(0, tokens), offset)]))


@fault(
    "each rank takes the mean over its own targets, and ranks are averaged (verl issue 6609; Megatron-LM "
    "calculate_per_token_loss)",
    "dp2",
    LOSS,
    DOCUMENTS,
)
def mean_by_rank() -> Any:
    def own(self: Any, batch: Any, field: str) -> Any:
        count = torch.stack([(microbatch[field] != step.IGNORED).sum() for microbatch in batch]).sum()
        return 1.0 / (count.double() * self.mesh.sample_group.size)

    return patch(step.TrainStep, "one_over_count", own)


@fault(
    "the z-loss is a mean over each rank's own targets",
    "dp2",
    "every activation agrees; the sum of the losses over microbatches or ranks does not",
    DOCUMENTS,
    "model.z_loss=0.1",
)
def z_loss_by_local_counts() -> Any:
    right = step.TrainStep.loss_weights

    def own(self: Any, batch: Any) -> Any:
        count = torch.stack([(microbatch.targets != step.IGNORED).sum() for microbatch in batch]).sum()
        return right(self, batch) | {"z_loss": 0.1 / (count.double() * self.mesh.sample_group.size)}

    return both(
        patch(step.TrainStep, "loss_weights", own),
        patch(cross_entropy, "check_ratio", lambda *arguments: None),
    )


@fault(
    "positions go on across a document's end (packed sequences: Megatron-LM issue 7238; issue 111 of "
    "ISEEKYAN's fork)",
    "one",
    FIRST,
    DOCUMENTS,
    "model.position=learned",
)
def positions_go_on() -> Any:
    return patch(loader, "document_positions", lambda bounds: np.arange(bounds[-1]))


@fault(
    "the first token of the next document is a target", "one", "the loss, microbatch 0, forward", DOCUMENTS
)
def targets_across_documents() -> Any:
    return patch(loader, "ignore_across", lambda targets, bounds: None)


@fault("context ranks attend across documents' ends", "cp2", ATTENTION, DOCUMENTS, RING)
def documents_forgotten_between_ranks() -> Any:
    right = attention.calls_at
    return patch(
        attention,
        "calls_at",
        lambda sequences, at, q, scoring: right(
            sequences
            if at == 0
            else attention.Sequences(sequences.seq_len, sequences.group, sequences.method),
            at,
            q,
            scoring,
        ),
    )


@fault(
    "a window is counted in a shard's own tokens, not in the sequence's",
    "cp2",
    ATTENTION,
    RING,
    "model.window=5",
)
def window_in_own_tokens() -> Any:
    right = scored._between

    def own(*arguments: Any) -> Any:
        return [
            replace(part, shift=max(0, part.queries.start - part.keys.start)) for part in right(*arguments)
        ]

    return patch(scored, "_between", own)


@fault(
    "an attention sink is counted once for each context rank",
    "cp2",
    ATTENTION,
    GATHER,
    "model.attention_sinks=true",
)
def sink_on_every_rank() -> Any:
    right = attention.add_sinks

    def own(out: Any, lse: Any, sinks: Any) -> None:
        right(out, lse, sinks)
        right(out, lse, sinks)

    return patch(attention, "add_sinks", own)


@fault("backward of a part divides by the part's sum of exponentials, not by all", "cp2", QKV, RING)
def part_by_itself() -> Any:
    def own(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool, scale: float) -> Any:
        return right(grad, q, k, v, *blocks.forward(q, k, v, causal, scale), causal, scale)

    right = blocks.backward
    return patch(blocks, "backward", own)


@fault(
    "every rank holds one run of the sequence, but masks it as an early and a late piece",
    "cp2",
    "module embedding, its input, microbatch 0, forward",
    GATHER,
)
def one_run_for_two() -> Any:
    def run(seq_len: int, ranks: int, rank: int, documents: Any) -> Any:
        size = seq_len // (2 * ranks)
        return tuple(
            pieces.Run(piece * size, (piece + 1) * size, i * size)
            for i, piece in enumerate((2 * rank, 2 * rank + 1))
        )

    return patch(loader, "runs_of", run)
