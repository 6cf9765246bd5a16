"""Mistakes that show only in some structures: an uneven split, an odd micro batch, several
chunks, another rate in every step.
"""

from typing import Any
from unittest import mock

import torch.nn.functional as F
from torch import Tensor

from megacore.data import samples
from megacore.kernels import linear_cross_entropy
from megacore.model import embedding, head, stage
from megacore.train import step
from tests.faults import both, fault

patch = mock.patch.object


@fault(
    "a stage runs the rounded-down mean of layers, though it holds more",
    "pp2",
    "module blocks.2, its output, microbatch 0, forward",
    "model.num_layers=5",
)
def even_share_of_layers_run() -> Any:
    forward = stage.Stage.forward

    def short(self: Any, *rest: Any, **options: Any) -> Any:
        mean = self.config.model.num_layers // self.config.parallel.pipeline
        for block in list(self.blocks.values())[mean:]:
            block.forward = lambda x, context: x
        return forward(self, *rest, **options)

    return patch(stage.Stage, "forward", short)


@fault(
    "a tensor rank's positions are those of whole sequences, which an odd number of sequences is not cut "
    "into",
    "tp2sp",
    "module blocks.0, its input, microbatch 0, forward",
    "model.position=learned",
    "train.micro_batch_size=3",
    "train.global_batch_size=24",
)
def positions_of_whole_sequences() -> Any:
    return patch(embedding, "own_part", lambda positions, group: positions[: len(positions) // group.size])


@fault(
    "a chunked loss keeps its last chunk's gradient of the head only",
    "one",
    "module embedding, gradient of its weight, microbatch 0, backward",
    "model.chunked_loss=true",
)
def last_chunk_kept() -> Any:
    add = linear_cross_entropy._add_product

    def replace(total: Tensor, a: Tensor, b: Tensor) -> None:
        add(total.zero_(), a, b)

    return patch(linear_cross_entropy, "_add_product", replace)


@fault(
    "a step, as the proof takes it, has the learning rate of the step before",
    "one",
    "every gradient and moment agrees; the update (rate, weight decay, bias correction) does not: first "
    "embedding.weight",
)
def rate_a_step_behind() -> Any:
    rate = step.learning_rate
    return patch(step, "learning_rate", lambda optim, number, steps: rate(optim, max(1, number - 1), steps))


@fault(
    "learned positions are recorded as what does not decay",
    "one",
    "every gradient and moment agrees; the update (rate, weight decay, bias correction) does not: first "
    "position",
    "model.position=learned",
)
def positions_without_decay() -> Any:
    make = embedding.Shard
    return patch(embedding, "Shard", lambda *rest, **options: make(*rest, **(options | {"decay": False})))


@fault("samples begin one token late", "one", "module embedding, its input, microbatch 0, forward")
def samples_one_token_late() -> Any:
    read = samples.IndexedTokens.read
    return patch(
        samples.IndexedTokens,
        "read",
        lambda self, start, count: read(self, min(start + 1, self.num_tokens - count), count),
    )


def rows_apart() -> Any:
    """No mistake: the logits' rows are apart as in 16 bits on a GPU."""
    return patch(head, "row_stride", lambda x, outputs: outputs + 64 - outputs % 64)


@fault(
    "the padding between the rows of logits counts as vocabulary",
    "tp2",
    "the loss, microbatch 0, forward",
    "model.vocab_size=4097",
)
def gaps_between_logits_counted() -> Any:
    once = head.vocab_parallel_cross_entropy

    def counted(logits: Tensor, *rest: Any) -> Tensor:
        return once(F.pad(logits, (0, logits.stride(0) - logits.shape[1])), *rest)

    return both(rows_apart(), patch(head, "vocab_parallel_cross_entropy", counted))
