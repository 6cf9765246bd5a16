"""Mistakes with plain modules: what tensor ranks hold and exchange, and what a part is told."""

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megacore.engine import native
from megacore.files import ROOT
from megacore.model.context import Context
from megacore.model.plain import attention, build, layers, outline, pieces
from tests.faults import both, fault

patch = mock.patch.object
PLAIN = (f"model.source={ROOT / 'configs/forks/plain_gpt.py'}", "model.num_layers=2")
DOCUMENTS = "data.document_mask=true"
UNTOUCHED = (
    "every layer computes as on one process; the model differs from the untouched module: first gradient of "
    "tokens.weight, step 1"
)


@fault(
    "the gradient of what enters a plain module's region is not summed",
    "tp2",
    "module blocks.1.norm2, gradient of its output, microbatch 0, backward",
    *PLAIN,
)
def region_gradient_unsummed() -> Any:
    return patch(pieces, "enter_tensor_parallel", lambda x, group, sequence: x)


@fault(
    "the output of a row of a plain module is not summed",
    "tp2",
    "module blocks.0.attention.output, its output, microbatch 0, forward",
    *PLAIN,
)
def plain_row_unsummed() -> Any:
    return patch(pieces, "leave_tensor_parallel", lambda x, group, sequence: x)


@fault(
    "queries, keys and values in one column are cut as one list of features",
    "tp2",
    "module blocks.0.attention.output, its input, microbatch 0, forward",
    *PLAIN,
)
def sections_cut_as_one() -> Any:
    make = pieces.Pieces._piece

    def wrong(self: Any, *arguments: Any, **options: Any) -> Any:
        place, path, parameter, dim, _ = arguments
        return make(self, place, path, parameter, dim, 1, **options)

    return patch(pieces.Pieces, "_piece", wrong)


@fault(
    "norms of a plain module's blocks do not know that each rank has its own tokens",
    "tp2sp",
    "module blocks.1.norm2, gradient of its weight, microbatch 0, backward",
    *PLAIN,
)
def plain_norms_unsummed() -> Any:
    take = pieces.Pieces._take_bare

    def wrong(self: Any, *arguments: Any) -> None:
        sequence, self.sequence = self.sequence, False
        take(self, *arguments)
        self.sequence = sequence

    return patch(pieces.Pieces, "_take_bare", wrong)


@fault(
    "the norm after a plain module's blocks does not know that each rank has its own tokens",
    "tp2sp",
    "module norm, gradient of its weight, microbatch 0, backward",
    *PLAIN,
)
def outer_norm_unsummed() -> Any:
    outer = pieces.Pieces.outer
    return patch(pieces.Pieces, "outer", lambda self, place, *, partial: outer(self, place, partial=False))


def from_start(context: Context) -> Tensor:
    """Positions that are counted from a rank's own first token, and across documents."""
    positions = torch.arange(context.seq_len, device=context.batch.tokens.device)
    return positions.expand(context.batch_size, -1)


def positions_from_start() -> Any:
    return both(patch(outline, "positions_in", from_start), patch(layers, "positions_in", from_start))


@fault(
    "a plain module is told positions that each context rank counts from 0",
    "cp2",
    "module places, its input, microbatch 0, forward",
    *PLAIN,
)
def plain_positions_by_rank() -> Any:
    return positions_from_start()


@fault(
    "a plain module's positions continue across a document's end",
    "one",
    UNTOUCHED,
    *PLAIN,
    DOCUMENTS,
)
def plain_positions_across_documents() -> Any:
    return positions_from_start()


@fault(
    "attention of a plain module does not see where documents end",
    "one",
    UNTOUCHED,
    *PLAIN,
    DOCUMENTS,
)
def plain_documents_ignored() -> Any:
    in_context = attention.ModuleAttention.in_context

    def wrong(self: Any, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        return in_context(self, q, k, v, replace(context, sequences=None))

    return patch(attention.ModuleAttention, "in_context", wrong)


@fault(
    "the gradient of a plain module's tied head stays on the last stage",
    "pp2",
    "every microbatch's gradients agree; their sum over microbatches and ranks does not: first tokens.weight",
    *PLAIN,
)
def plain_tie_forgotten() -> Any:
    return patch(native.NativeEngine, "reduce_tied", lambda self: None)


@fault(
    "each rank draws first weights of a plain module with a seed of its own",
    "tp2",
    "initialisation depends on the layout: first tokens.weight",
    *PLAIN,
)
def plain_weights_drawn_by_rank() -> Any:
    draw = build.FirstWeights.of

    def wrong(self: Any, place: str, name: str, seed: int) -> Tensor:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return draw(self, place, name, seed + rank)

    return patch(build.FirstWeights, "of", wrong)
