"""Mistakes that show in 16 bits only, where one process makes them too: rounding must
not explain them away.
"""

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megacore.engine import native
from megacore.engine.optimizers import RangeUpdate
from megacore.kernels import adamw
from megacore.tensor_parallel import gradient
from tests.faults import fault

patch = mock.patch.object
NOT_THE_SUM = (
    "the gradients are not the sum of what backward gave, microbatch by microbatch: first embedding.weight"
)


@fault("in bf16 each microbatch's gradient replaces the one before", "one", NOT_THE_SUM, precision="bf16")
def gradients_overwritten_in_16_bits() -> Any:
    backward = native.NativeEngine.backward

    def alone(self: Any, *args: Any, **options: Any) -> None:
        if self.buffers[0].rounds:
            self.reducer.clear()
        backward(self, *args, **options)

    return patch(native.NativeEngine, "backward", alone)


@fault("in bf16 gradients are accumulated in bf16", "one", NOT_THE_SUM, precision="bf16")
def gradients_accumulated_in_16_bits() -> Any:
    backward = native.NativeEngine.backward

    def rounded(self: Any, *args: Any, **options: Any) -> None:
        backward(self, *args, **options)
        for buffer in self.buffers:
            if buffer.rounds:
                buffer.gradients.copy_(buffer.gradients.bfloat16())

    return patch(native.NativeEngine, "backward", rounded)


@fault(
    "in bf16 the first microbatch's weight gradients are lost",
    "one",
    NOT_THE_SUM,
    precision="bf16",
)
def first_product_lost_in_16_bits() -> Any:
    add = gradient.MainGradient.add_product

    def lost(self: Any, grad: Tensor, x: Tensor) -> None:
        add(self, torch.zeros_like(grad) if self.empty else grad, x)

    return patch(gradient.MainGradient, "add_product", lost)


@fault(
    "in bf16 weight decay is missing on the path of fp32 masters",
    "one",
    "the update does not follow from the moments (rate, weight decay, bias correction): first "
    "embedding.weight",
    precision="bf16",
)
def weight_decay_missing_in_fp32() -> Any:
    step = adamw.AdamW._step_by_pytorch

    def without(self: Any, *rest: Any) -> None:
        with patch(self, "decays", [0.0] * len(self.decays)):
            step(self, *rest)

    return patch(adamw.AdamW, "_step_by_pytorch", without)


@fault(
    "in bf16 SGD's momentum takes the gradient before it is clipped",
    "one",
    "the momentum does not follow from the gradients (clipping, momentum): first embedding.weight",
    "optim.kind=sgd",
    precision="bf16",
)
def momentum_not_clipped() -> Any:
    step = RangeUpdate.step
    return patch(
        RangeUpdate, "step", lambda self, lr, scale, skip: step(self, lr, torch.ones_like(scale), skip)
    )


@fault(
    "in bf16 SGD accumulates gradients in bf16",
    "one",
    NOT_THE_SUM,
    "optim.kind=sgd",
    precision="bf16",
)
def sums_of_sgd_in_16_bits() -> Any:
    return gradients_accumulated_in_16_bits()


@fault(
    "in bf16 the last stage's copy of tied embeddings is one step older than its masters",
    "pp2",
    "what computes is not the master weights, rounded: first embedding.weight",
    precision="bf16",
)
def tied_copy_behind() -> Any:
    step = native.NativeEngine.step

    def stale(self: Any, *rest: Any) -> Any:
        (stage,) = self.modules
        behind = stage.last and not stage.first and self.buffers[0].rounds
        before = stage.behind[0].head.weight.detach().clone() if behind else None
        statistics = step(self, *rest)
        if before is not None:
            stage.behind[0].head.weight.data.copy_(before)
        return statistics

    return patch(native.NativeEngine, "step", stale)
