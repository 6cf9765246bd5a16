"""Mistakes of an optimizer of whole matrices."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.distributed.shard import LogicalMatrix, Shard, TensorSlice, boxes_of_range
from megacore.engine import optimizers, whole_matrices
from megacore.engine.owners import Part
from megacore.optimizers import muon
from tests.faults import both, fault

patch = mock.patch.object
MUON = "optim.kind=muon"
APART = "every gradient and moment agrees; the update (rate, weight decay, bias correction) does not: first"


def matrices_where_sharded(wrong: Callable[[Shard, list[LogicalMatrix]], list[LogicalMatrix]]) -> Any:
    """Other matrices for weights that several ranks hold parts of."""
    right = whole_matrices.matrices_of

    def found(rule: Any, shard: Shard) -> list[LogicalMatrix]:
        return wrong(shard, right(rule, shard)) if shard.split_over else right(rule, shard)

    return both(patch(optimizers, "matrices_of", found), patch(whole_matrices, "matrices_of", found))


def as_one(shard: Shard, matrices: list[LogicalMatrix]) -> list[LogicalMatrix]:
    """All matrices of a weight as the rows of one."""
    last = len(shard.global_shape) - 1
    return [LogicalMatrix("", rows=tuple(range(last)), columns=(last,))] if len(matrices) > 1 else matrices


@fault(
    "queries, keys and values are made orthogonal as one matrix where tensor ranks divide them, and apart "
    "elsewhere (Megatron-LM PR 7117)",
    "tp2",
    f"{APART} blocks.0.attention.qkv.weight",
    MUON,
)
def qkv_as_one_where_sharded() -> Any:
    return matrices_where_sharded(as_one)


@fault(
    "gate and up are made orthogonal as one matrix (Megatron-LM issue 7077)",
    "tp2",
    f"{APART} blocks.0.feed_forward.up.weight",
    MUON,
    "model.activation=swiglu",
)
def gate_and_up_as_one() -> Any:
    return matrices_where_sharded(
        lambda shard, matrices: as_one(shard, matrices) if len(matrices) == 2 else matrices
    )


@fault(
    "of a whole weight, as many heads are updated as a tensor rank has (DeepSpeed PR 8384)",
    "tp2",
    f"{APART} blocks.0.attention.qkv.weight",
    MUON,
)
def heads_of_a_shard() -> Any:
    def of_a_shard(shard: Shard, matrices: list[LogicalMatrix]) -> list[LogicalMatrix]:
        heads = slice(0, shard.local_shape[0])
        return [replace(m, index=(heads, *m.index[1:])) for m in matrices] if len(matrices) == 3 else matrices

    return matrices_where_sharded(of_a_shard)


@fault(
    "the norm of a matrix is summed over its copies too (marin issue 8073)",
    "dp2",
    f"{APART} blocks.0.attention.qkv.weight",
    MUON,
)
def norm_of_all_copies() -> Any:
    right = muon.orthogonalised

    def counted_twice(x: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
        copies = dist.get_world_size() if dist.is_initialized() else 1
        return (
            right(torch.cat([x] * copies, 2), steps, dtype)[..., : x.shape[2]]
            if copies > 1
            else right(x, steps, dtype)
        )

    return patch(muon, "orthogonalised", counted_twice)


@fault(
    "a part's offset in its matrix is taken along the wrong dim (dion PR 114)",
    "tp2",
    f"{APART} blocks.0.attention.output.weight",
    MUON,
)
def offset_of_the_wrong_dim() -> Any:
    def turned(box: TensorSlice) -> TensorSlice:
        square = len(box.global_shape) == 2 and box.global_shape[0] == box.global_shape[1]
        return replace(box, offset=box.offset[::-1], local_shape=box.local_shape[::-1]) if square else box

    boxes = property(
        lambda part: [turned(box) for _, box in boxes_of_range(part.shard, part.start, part.stop)]
    )
    return patch(Part, "boxes", boxes)
