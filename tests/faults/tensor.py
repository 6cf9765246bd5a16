"""Mistakes of tensor and sequence parallelism."""

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megacore.distributed import collectives as comm
from megacore.distributed.communicator import SOLO
from megacore.distributed.shard import TensorSlice
from megacore.engine import choose, reduce
from megacore.model import context, head, heads_norm, norm, parametrization, stage
from megacore.tensor_parallel import cross_entropy, embedding, linear
from megacore.train import step, trainer
from tests.faults import both, fault
from tests.faults.collectives import not_started, twice

patch = mock.patch.object


class RANK:
    """What a fault remembers of the rank that it is planted in."""

    mesh: Any = None


def remembered_mesh() -> Any:
    """Keeps the trainer's mesh for a fault that needs another group of it."""
    init = trainer.Trainer.__init__

    def remember(self: Any, config: Any, mesh: Any, *more: Any, **options: Any) -> None:
        RANK.mesh = mesh
        init(self, config, mesh, *more, **options)

    return patch(trainer.Trainer, "__init__", remember)


@fault(
    "backward of a column-parallel layer does not sum its input's gradient",
    "tp2",
    "module norm, gradient of its output, microbatch 0, backward",
)
def column_gradient_unsummed() -> Any:
    return patch(linear, "all_reduce_start", not_started)


@fault(
    "backward of a column-parallel layer sums its input's gradient twice",
    "tp2",
    "module norm, gradient of its output, microbatch 0, backward",
)
def column_gradient_summed_twice() -> Any:
    return patch(linear, "all_reduce_start", twice(comm.all_reduce_start))


@fault(
    "backward of a column-parallel layer does not reduce-scatter its input's "
    "gradient under sequence parallelism",
    "tp2sp",
    "module norm, gradient of its output, microbatch 0, backward",
)
def column_gradient_unscattered() -> Any:
    return patch(
        linear, "reduce_scatter_start", lambda x, group: (comm.own_part(x, group).clone(), comm.Done())
    )


@fault(
    "a row-parallel layer does not sum its partial results",
    "tp2",
    "module blocks.0.attention.output, its output, microbatch 0, forward",
)
def row_output_unsummed() -> Any:
    return patch(linear, "leave_tensor_parallel", lambda x, group, sequence: x)


@fault(
    "a row-parallel layer sums its partial results twice",
    "tp2",
    "module blocks.0.attention.output, its output, microbatch 0, forward",
)
def row_output_summed_twice() -> Any:
    once = comm.leave_tensor_parallel
    return patch(
        linear,
        "leave_tensor_parallel",
        lambda x, group, sequence: once(once(x, group, sequence), group, sequence),
    )


@fault(
    "a row-parallel layer sums its partial results over the wrong group (the data ranks)",
    "tp2dp2",
    "module blocks.0.attention.output, its output, microbatch 0, forward",
)
def row_output_summed_over_data() -> Any:
    build = choose.Stage

    def wrong(config: Any, layers: Any, group: Any, *rest: Any) -> Any:
        built = build(config, layers, group, *rest)
        for layer in built.modules():
            if isinstance(layer, linear.RowLinear):
                layer.group = RANK.mesh.sample_group
        return built

    return both(remembered_mesh(), patch(choose, "Stage", wrong))


@fault(
    "the tokens that sequence-parallel ranks gather are in the wrong order",
    "tp2sp",
    "module blocks.0.attention.qkv, its output, microbatch 0, forward",
)
def tokens_gathered_in_wrong_order() -> Any:
    gather = comm.all_gather
    return patch(linear, "all_gather", lambda x, group: gather(x, group).roll(x.shape[0], 0))


@fault(
    "a row-parallel layer's bias is added on every rank, before the sum",
    "tp2",
    "module blocks.0.attention.output, its output, microbatch 0, forward",
)
def bias_added_on_every_rank() -> Any:
    def forward(self: linear.RowLinear, x: Tensor) -> Tensor:
        x = x if self.activation is None else self.activation(x)
        return comm.leave_tensor_parallel(
            linear.column_linear(x, self.weight, self.bias, SOLO, False), self.group, self.sequence
        )

    return patch(linear.RowLinear, "forward", forward)


@fault(
    "norm gradients of sequence-parallel ranks are not summed",
    "tp2sp",
    "every microbatch's gradients agree; their sum over microbatches and ranks does not: first "
    "blocks.0.norm1.weight",
)
def partial_gradients_unsummed() -> Any:
    return patch(reduce, "all_reduce", lambda x, group: x)


@fault(
    "the weight of a norm over each head's queries and keys, of which a rank has some, is not summed",
    "tp2",
    "module blocks.3.attention.key_norm, gradient of its weight, microbatch 0, backward",
    "model.qk_norm=true",
)
def head_norm_gradients_unsummed() -> Any:
    make = norm.replicated
    return patch(norm, "replicated", lambda group, *, partial: make(group))


@fault(
    "the embedding of split vocabulary is not summed",
    "tp2",
    "module embedding, its output, microbatch 0, forward",
)
def embedding_unsummed() -> Any:
    return patch(embedding, "leave_tensor_parallel", lambda x, group, sequence: x)


@fault(
    "vocabulary rows are counted by the rounded-down size of a piece",
    "tp2",
    "the loss, microbatch 0, forward",
    "model.vocab_size=65",
)
def vocabulary_offset_rounded_down() -> Any:
    loss = cross_entropy.vocab_parallel_cross_entropy

    def wrong(logits: Tensor, targets: Tensor, group: Any, first_row: int, *rest: Any) -> Tensor:
        return loss(logits, targets, group, group.rank * (65 // group.size), *rest)

    return patch(head, "vocab_parallel_cross_entropy", wrong)


@fault(
    "the softmax of the loss runs over a rank's own vocabulary only", "tp2", "the loss, microbatch 0, forward"
)
def softmax_over_own_vocabulary() -> Any:
    gather = comm.all_gather

    def own_sum(x: Tensor, group: Any) -> Tensor:
        # [ranks, statistics, tokens], the first of the statistics a rank's logarithm of its sum
        every = gather(x, group)
        every[:, 0] = torch.where(torch.arange(group.size)[:, None] == group.rank, every[:, 0], -torch.inf)
        return every

    return patch(cross_entropy, "all_gather", own_sum)


@fault(
    "a gated layer is cut as one list of features, so that a rank has only gates",
    "tp2",
    "module blocks.0.feed_forward.down, its output, microbatch 0, forward",
    "model.activation=swiglu",
)
def gate_and_up_cut_as_one() -> Any:
    init = linear.ColumnLinear.__init__

    def wrong(self: Any, in_size: int, out_shape: tuple[int, ...], *, dim: int = 0, **rest: Any) -> None:
        init(self, in_size, out_shape, dim=0, **rest)

    return patch(linear.ColumnLinear, "__init__", wrong)


@fault(
    "grouped queries are paired with key/value heads by the wrong stride",
    "tp2",
    "module blocks.0.attention.output, its input, microbatch 0, forward",
    "model.num_kv_heads=2",
    "model.attention=eager",
)
def grouped_heads_by_wrong_stride() -> Any:
    return patch(
        Tensor,
        "repeat_interleave",
        lambda self, n, dim: self.repeat(*(n if d == dim else 1 for d in range(self.dim()))),
    )


@fault(
    "rotary positions are counted from a rank's own first token",
    "tp2sp",
    "module blocks.0.attention.output, its input, microbatch 0, forward",
    "model.position=rope",
)
def rope_offset_by_rank() -> Any:
    compute_on = stage.Stage.compute_on

    def rolled(self: Any, device: torch.device) -> None:
        compute_on(self, device)
        rank, ranks = self.group.rank, self.group.size
        self.rope = tuple(
            tuple(table.roll(-rank * len(table) // ranks, 0) for table in pair) for pair in self.rope
        )

    return patch(stage.Stage, "compute_on", rolled)


@fault(
    "muP takes the fan-in from a rank's shard, not from the logical matrix",
    "tp2",
    "initialisation depends on the layout: first blocks.0.attention.output.weight",
    "model.parametrization=mup",
    "model.base_width=64",
)
def fan_in_of_the_shard() -> Any:
    return patch(
        parametrization,
        "fan_ins",
        lambda shard: [matrix.sizes(shard.local_shape)[2] for matrix in shard.logical_matrices],
    )


@fault(
    "weights are drawn from the rank's own generator",
    "tp2",
    "initialisation depends on the layout: first embedding.weight",
)
def weights_drawn_by_rank() -> Any:
    initialise = step.initialise

    def wrong(held: Any, *rest: Any) -> None:
        initialise(
            {
                key: (tensor, TensorSlice(box.local_shape, (0,) * tensor.dim(), box.local_shape))
                for key, (tensor, box) in held.items()
            },
            *rest,
        )

    return patch(step, "initialise", wrong)


@fault(
    "tensor ranks drop out different elements of the same activation",
    "tp2",
    "module blocks.0, its input, microbatch 0, forward",
    "model.dropout=0.1",
)
def dropout_differs_by_tensor_rank() -> Any:
    dropped = context.Context._dropped
    return patch(
        context.Context,
        "_dropped",
        lambda self, *rest: dropped(self, *rest[:-1], (*rest[-1], self.group.rank)),
    )


OVER_HEADS = "model.qk_norm=true", "model.qk_norm_heads=all"


@fault(
    "the norm of queries and keys over all heads is one of a rank's own heads",
    "tp2",
    "module blocks.0.attention.heads_norm, its output, microbatch 0, forward",
    *OVER_HEADS,
)
def norm_of_local_heads() -> Any:
    return patch(heads_norm, "all_reduced", lambda x, group: x.clone())


@fault(
    "the gradients of the sums in the norm of queries and keys stay on their ranks",
    "tp2",
    "module blocks.3.attention.heads_norm, gradient of its input 1, microbatch 0, backward",
    *OVER_HEADS,
)
def sums_of_heads_unsummed_in_backward() -> Any:
    return patch(heads_norm._Summed, "backward", staticmethod(lambda ctx, grad: (grad, None)))
