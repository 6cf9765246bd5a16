"""Mistakes of pipelines, recomputation, gradient norm and optimizer."""

from itertools import chain
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megacore.distributed import collectives as comm
from megacore.engine import native, stepper
from megacore.kernels.adamw import AdamW
from megacore.model import context, norm
from megacore.pipeline import runtime
from tests.faults import fault

patch = mock.patch.object


@fault(
    "the two copies of tied embeddings keep their own gradients",
    "pp2",
    "every microbatch's gradients agree; their sum over microbatches and ranks does not: first "
    "embedding.weight",
)
def tied_gradients_unsummed() -> Any:
    return patch(native.NativeEngine, "reduce_tied", lambda self: None)


@fault(
    "the two copies of tied embeddings sum their gradients twice",
    "pp2",
    "every microbatch's gradients agree; their sum over microbatches and ranks does not: first "
    "embedding.weight",
)
def tied_gradients_summed_twice() -> Any:
    once = native.NativeEngine.reduce_tied

    def again(self: Any) -> None:
        once(self)
        once(self)

    return patch(native.NativeEngine, "reduce_tied", again)


@fault(
    "all microbatches are received into one buffer",
    "pp4",
    "module blocks.1, gradient of its output, microbatch 0, backward",
    "model.num_layers=4",
)
def stale_activation() -> Any:
    shared: dict[Any, Tensor] = {}
    receive = runtime.Runtime._receive

    def into_one(self: Any, action: Any, held: Any) -> None:
        receive(self, action, held)
        key = action.microbatch, action.chunk
        came = held[key]["hidden"]
        one = shared.setdefault(action.op, torch.empty_like(came))
        (work,), held[key]["hidden"] = self.arriving[action.op, key], one.data

        def wait() -> None:  # in the schedule's order, so that it is wrong in the same way every time
            work.wait()
            one.copy_(came)

        self.arriving[action.op, key] = [mock.Mock(wait=wait)]

    return patch(runtime.Runtime, "_receive", into_one)


@fault(
    "backward takes the oldest graph where the schedule goes back from the newest",
    "pp2",
    "module blocks.2, gradient of its output, microbatch 0, backward",
    "parallel.schedule=gpipe",
)
def graph_of_another_microbatch() -> Any:
    backward = runtime.Runtime._backward

    def oldest_first(self: Any, action: Any) -> None:
        if not self.stages[action.chunk].last:
            oldest, newest, roots = min(self.roots), (action.microbatch, action.chunk), self.roots
            roots[oldest], roots[newest] = roots[newest], roots[oldest]
        backward(self, action)

    return patch(runtime.Runtime, "_backward", oldest_first)


@fault(
    "recomputation draws another dropout mask",
    "one",
    "module blocks.0.norm2, its input, computed again for backward, microbatch 0, forward",
    "model.dropout=0.1",
    "train.recompute=full",
)
def recompute_draws_another_mask() -> Any:
    dropped, seen = context.Context._dropped, set()

    def again(self: Any, x: Tensor, residual: Any, scale: float, site: tuple[object, ...]) -> Tensor:
        visit = (self.key, *site)
        site = (*site, "again") if visit in seen else site
        seen.add(visit)
        return dropped(self, x, residual, scale, site)

    return patch(context.Context, "_dropped", again)


@fault(
    "the gradient norm counts what every tensor rank holds once a rank (ROCm TransformerEngine PR 715; "
    "NeMo-RL PR 3788; transformers "
    "PR 36132)",
    "tp2",
    "every gradient agrees; the gradient norm does not",
)
def norm_counts_replicas() -> Any:
    weights = native.NativeEngine.row_weights
    return patch(
        native.NativeEngine,
        "row_weights",
        lambda self, buffer: [torch.ones_like(rows) for rows in weights(self, buffer)],
    )


@fault("each stage clips by its own norm", "pp2", "every gradient agrees; the gradient norm does not")
def clip_per_stage() -> Any:
    return patch(
        stepper, "all_reduce", lambda x, group: x if group.name == "world" else comm.all_reduce(x, group)
    )


@fault(
    "clipping divides by the square of the norm", "one", "every gradient agrees; the gradient norm does not"
)
def clip_by_squared_norm() -> Any:
    norm = native.NativeEngine.grad_norm
    return patch(native.NativeEngine, "grad_norm", lambda self: norm(self).square())


@fault(
    "weight decay on norms",
    "one",
    "every gradient and moment agrees; the update (rate, weight decay, bias correction) does not: first "
    "blocks.0.norm1.weight",
)
def weight_decay_on_norms() -> Any:
    make = norm.Shard
    return patch(norm, "Shard", lambda *args, **options: make(*args, **(options | {"decay": True})))


@fault(
    "Adam without bias correction",
    "one",
    "every gradient and moment agrees; the update (rate, weight decay, bias correction) does not: first "
    "embedding.weight",
)
def no_bias_correction() -> Any:
    step = AdamW.step

    def late(self: Any, *rest: Any) -> None:
        self.updates.fill_(1e6)
        step(self, *rest)

    return patch(AdamW, "step", late)


@fault(
    "moments kept in fp32 under fp64 master weights",
    "one",
    "every gradient and the norm agree; the first moments (clipping, decay rates) do not: first "
    "embedding.weight",
)
def moments_in_low_precision() -> Any:
    step = AdamW.step

    def rounded(self: Any, *rest: Any) -> None:
        step(self, *rest)
        for moment in chain(self.first_moments, self.second_moments):
            moment.copy_(moment.float())

    return patch(AdamW, "step", rounded)
