"""Mistakes of data parallelism, of the loss and of going on after an interruption."""

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megacore import checkpoint
from megacore.data import shuffle as batches
from megacore.data.packing import document_bounds
from megacore.data.samples import EvalSamples, SampleStream
from megacore.distributed import collectives as comm
from megacore.distributed.communicator import SOLO, Staged
from megacore.distributed.hierarchical_reduce import Levels
from megacore.engine import native, reduce
from megacore.engine import param_all_gather as gather
from megacore.tensor_parallel import gradient
from megacore.tools.verify import coverage
from megacore.train import loader, trainer
from tests.faults import both, fault
from tests.faults.collectives import not_started, twice
from tests.faults.tensor import RANK, remembered_mesh

patch = mock.patch.object
SUM_APART = (
    "every microbatch's gradients agree; their sum over microbatches and ranks does not: first "
    "embedding.weight"
)


@fault(
    "gradients are not reduced over data ranks",
    "dp2",
    SUM_APART,
)
def data_reduction_dropped() -> Any:
    return patch(reduce, "all_reduce_start", not_started)


@fault(
    "gradients are reduced twice",
    "dp2",
    SUM_APART,
)
def data_reduction_doubled() -> Any:
    return patch(reduce, "all_reduce_start", twice(comm.all_reduce_start))


@fault(
    "gradients are reduced over the tensor ranks instead of the data ranks",
    "tp2dp2",
    SUM_APART,
)
def data_reduction_over_tensor_ranks() -> Any:
    build = native.GradientReducer

    def over_tensor_ranks(buffers: Any, *others: Any) -> Any:
        for buffer in buffers:
            buffer.sum = replace(buffer.sum, levels=Levels(SOLO, RANK.mesh.tp))
        return build(buffers, *others)

    return both(remembered_mesh(), patch(native, "GradientReducer", over_tensor_ranks))


@fault("a sum by recursive doubling leaves out the ranks beyond a power of two", "dp3", SUM_APART)
def odd_rank_left_out() -> Any:
    right = comm.all_reduce_start

    def doubling(x: Tensor, group: Any) -> Any:
        return right(x if group.rank < 1 << group.size.bit_length() - 1 else x.zero_(), group)

    return patch(reduce, "all_reduce_start", doubling)


@fault(
    "a bucket is reduced before its last gradient has arrived",
    "dp2",
    SUM_APART,
)
def bucket_reduced_too_early() -> Any:
    rearm = reduce.GradientReducer._rearm

    def hasty(self: Any) -> None:
        rearm(self)
        self.waiting_for = {bucket: max(1, gradients - 1) for bucket, gradients in self.waiting_for.items()}

    def at_once(x: Tensor, group: Any) -> comm.Done:  # else it would be a race, and missed at times
        comm.all_reduce(x, group)
        return comm.Done()

    return both(patch(reduce.GradientReducer, "_rearm", hasty), patch(reduce, "all_reduce_start", at_once))


@fault(
    "the parts of a bucket are gathered into one another's places, but for the rank's own",
    "dp3",
    "every rank draws and holds its first weights alike; what computes with them is not: first "
    "embedding.weight",
    "engine.shard_optimizer=true",
)
def parts_gathered_out_of_order() -> Any:
    right = gather.start_gather

    def swapped(x: Tensor, levels: Any) -> Any:
        one, other = (part for rank, part in enumerate(x.chunk(levels.size)) if rank != levels.owners.rank)

        def swap() -> None:
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)

        return Staged([lambda: right(x, levels)], swap)

    return patch(gather, "start_gather", swapped)


@fault(
    "the documents of a blend's samples are those of its first corpus",
    "one",
    "module blocks.0.attention.output, its input, microbatch 0, forward",
    "data.document_mask=true",
)
def documents_of_the_first_corpus() -> Any:
    def documents(self: Any, indices: Any) -> list[Any]:
        return [
            document_bounds(self.corpora[0], spans, self.seq_len + 1) for _, spans in self._spans(indices)
        ]

    return patch(SampleStream, "documents", documents)


@fault("data ranks read the same samples", "dp2", "module embedding, its input, microbatch 1, forward")
def data_ranks_read_the_same() -> Any:
    init = loader.Loader.__init__

    def first_only(self: Any, config: Any, mesh: Any, stream: Any) -> None:
        init(self, config, mesh, stream)
        self.mesh = mock.Mock(
            sample_group=mock.Mock(size=mesh.sample_group.size, rank=0), device=mesh.device, cp=mesh.cp
        )

    return patch(loader.Loader, "__init__", first_only)


@fault(
    "data ranks read the same samples (caught by the samples' own proof)",
    "dp4",
    "samples are left out and samples are read again",
    check="samples",
)
def data_ranks_dealt_the_same() -> Any:
    deal = batches.dealt

    def first_only(steps: range, data_size: int, train: Any) -> Any:
        indices = deal(steps, data_size, train)
        return indices[:, :1].repeat(data_size, 1)

    return patch(coverage, "dealt", first_only)


@fault(
    "a run that goes on with fewer data ranks begins a step too late (other samples than it says: "
    "torchtitan issue 816; Automodel issue "
    "533; VeOmni PR 853)",
    "dp4",
    "samples are left out",
    check="samples",
)
def step_lost_between_layouts() -> Any:
    deal = batches.dealt

    def later(steps: range, data_size: int, train: Any) -> Any:
        shift = int(data_size == 2)
        return deal(range(steps.start + shift, steps.stop + shift), data_size, train)

    return patch(coverage, "dealt", later)


@fault("the loss is the mean over a rank's own tokens", "dp2", "gradient of the loss, microbatch 0, backward")
def loss_mean_per_rank() -> Any:
    gradient = native.NativeEngine.loss_gradient
    return patch(
        native.NativeEngine,
        "loss_gradient",
        lambda self, scale: gradient(self, scale * self.mesh.gradient_group.size),
    )


@fault(
    "the loss is summed over microbatches, not averaged",
    "one",
    "gradient of the loss, microbatch 0, backward",
)
def loss_summed_over_microbatches() -> Any:
    gradient = native.NativeEngine.loss_gradient
    return patch(native.NativeEngine, "loss_gradient", lambda self, scale: gradient(self, scale * 8))


@fault(
    "each microbatch's gradient replaces the one before",
    "one",
    SUM_APART,
)
def gradients_overwritten() -> Any:
    backward = native.NativeEngine.backward

    def alone(self: Any, *args: Any, **options: Any) -> None:
        self.reducer.clear()
        backward(self, *args, **options)

    return patch(native.NativeEngine, "backward", alone)


@fault(
    "the first microbatch's gradients of weights, which are written and not added, are lost",
    "one",
    SUM_APART,
)
def first_product_lost() -> Any:
    add = gradient.MainGradient.add_product

    def lost(self: Any, grad: Tensor, x: Tensor) -> None:
        add(self, torch.zeros_like(grad) if self.empty else grad, x)

    return patch(gradient.MainGradient, "add_product", lost)


@fault(
    "the first microbatch's weight gradients are added once more",
    "one",
    SUM_APART,
)
def first_product_doubled() -> Any:
    add = gradient.MainGradient.add_product

    def doubled(self: Any, grad: Tensor, x: Tensor) -> None:
        if self.empty:
            add(self, grad, x)
        add(self, grad, x)

    return patch(gradient.MainGradient, "add_product", doubled)


@fault(
    "a step's gradients are added to those of the step before",
    "one",
    SUM_APART,
)
def sums_not_begun_anew() -> Any:
    return patch(reduce.GradientReducer, "clear", lambda self: None)


@fault(
    "the last, uneven batch of a validation is left out",
    "one",
    "training agrees; the validation loss does not",
)
def uneven_last_batch_dropped() -> Any:
    length = EvalSamples.__len__
    return patch(EvalSamples, "__len__", lambda self: (length(self) - 1) // 8 * 8)


@fault(
    "padding behind the end of a validation counts as targets",
    "one",
    "training agrees; the validation loss does not",
)
def padding_counted() -> Any:
    samples = EvalSamples.samples

    def counted(self: Any, indices: Any) -> Any:
        inputs, targets = samples(self, indices)
        return inputs, targets.clip(min=0)

    return patch(EvalSamples, "samples", counted)


@fault(
    "a resumed run repeats the step that it was saved after",
    "one",
    "steps 2, 3, 4 in place of 3, 4",
    check="resume",
)
def resume_repeats_a_step() -> Any:
    restore = trainer.Trainer.restore

    def repeated(self: Any) -> Any:
        origin = restore(self)
        return replace(origin, step=max(0, origin.step - 1))

    return patch(trainer.Trainer, "restore", repeated)


@fault("a resumed run begins one sample early", "one", "another loss in step 3", check="resume")
def resume_repeats_a_sample() -> Any:
    init = trainer.Trainer.__init__

    def early(self: Any, *rest: Any, **options: Any) -> None:
        init(self, *rest, **options)
        if self.step:
            samples = self.loader.stream.samples
            self.loader.stream.samples = lambda indices: samples(indices - 1)

    return patch(trainer.Trainer, "__init__", early)


@fault("a resumed run starts with moments of zero", "one", "another loss in step 4", check="resume")
def moments_not_restored() -> Any:
    read = checkpoint.Reader.read_into
    skip = ("adam_m", "adam_v")
    return patch(
        checkpoint.Reader,
        "read_into",
        lambda self, name, *rest: None if name.startswith(skip) else read(self, name, *rest),
    )


@fault(
    "a resumed run counts the optimizer's steps from zero, so bias correction starts again",
    "one",
    "another loss in step 4",
    check="resume",
)
def updates_not_restored() -> Any:
    load = native.NativeEngine.load_state
    return patch(
        native.NativeEngine,
        "load_state",
        lambda self, state, tensors: load(self, state | {"updates": 0.0}, tensors),
    )
