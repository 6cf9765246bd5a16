"""Where an engine sums a parameter's gradient: a layer's backward adds its product there, and makes no gradient of its own.

Megatron calls this gradient accumulation fusion. In 16 bits it saves writing the product rounded, reading it again and a pass over the
sum; and the product is never rounded, where the device can add it in fp32.
"""

from functools import cache

import torch
from torch import Tensor

from megacore.distributed.cpu import is_widened


class MainGradient:
    """The sum of a parameter's gradient over a step's microbatches.

    `total` has the parameter's shape, in fp32 at least, and belongs to an engine. While it is `empty`, what stands there is of no use:
    the first part is written and not added, so that nobody has to clear it.
    """

    def __init__(self, total: Tensor) -> None:
        self.total, self.empty = total, True

    def add_product(self, grad: Tensor, x: Tensor) -> None:
        """Adds ``gradᵀ · x``, the gradient of a linear layer's weight; `grad` ``[tokens, outputs]``, `x` ``[tokens, inputs]``.

        It needs nothing else from the backward pass: a schedule may call it later than the rest.
        """
        wide, total, beta = self.total.dtype, self.total.flatten(0, -2), 0.0 if self.empty else 1.0
        if is_widened(x):
            grad, x = grad.to(wide), x.to(wide)
        if x.dtype == wide:
            torch.addmm(total, grad.t(), x, beta=beta, out=total)
        elif adds_in_fp32(x.device.type):
            torch.addmm(total, grad.t(), x, beta=beta, out_dtype=wide, out=total)
        else:
            self._add((grad.t() @ x).view_as(self.total))
        self.empty = False

    def is_exact(self, x: Tensor) -> bool:
        """Whether a product with `x` is added without being rounded to x's dtype."""
        return x.dtype == self.total.dtype or is_widened(x) or adds_in_fp32(x.device.type)

    def add(self, part: Tensor) -> None:
        """Adds a gradient that a layer has computed, in the shape of its parameter."""
        self._add(part)

    def take(self, parameter: Tensor) -> None:
        """Adds what autograd has left in ``parameter.grad``, if anything. `total` then holds a sum, be it zero."""
        if parameter.grad is not None:
            self._add(parameter.grad)
            parameter.grad = None
        elif self.empty:
            self.total.zero_()
            self.empty = False

    def _add(self, part: Tensor) -> None:
        if self.empty:
            self.total.copy_(part)
        else:
            self.total.add_(part)
        self.empty = False


def main_gradient_of(parameter: Tensor) -> MainGradient | None:
    """Where the engine sums a parameter's gradient; None where it is left to autograd.

    It is in a compiled graph, which must not change what is outside it: there the engine takes what autograd gives.
    """
    return None if torch.compiler.is_compiling() else getattr(parameter, "main_gradient", None)


@cache
def adds_in_fp32(device: str) -> bool:
    """Whether a device can add a product of bf16 matrices to an fp32 one. PyTorch can on CUDA, and cannot on a CPU.

    There a product in fp32 would take twice as long, which is more than rounding it to bf16 and adding that: see docs/performance.md.
    """
    a, total = torch.zeros(16, 16, dtype=torch.bfloat16, device=device), torch.zeros(16, 16, device=device)
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except (NotImplementedError, RuntimeError):  # the device has no such product, or refuses the two dtypes together
        return False
    return True
