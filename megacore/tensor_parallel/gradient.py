"""Where an engine sums a parameter's gradient: a layer's backward adds its product there,
and makes no gradient of its own.

Megatron calls this gradient accumulation fusion. In 16 bits it saves writing the product rounded, reading it
again and a pass over the sum; and the product is never rounded, where the device can add it in fp32.

A schedule may want weights' gradients later than inputs' (Qi et al. 2023, zero bubble). Then the layers leave
what they are made of in a `WeightGradQueue`, with a function that makes them, and nothing else of the
backward pass is kept.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.distributed.collectives import all_gather_start
from megacore.distributed.communicator import SOLO, Group, Work
from megacore.distributed.cpu import is_widened
from megacore.kernels.dispatch import Implementation
from megacore.kernels.embedding_grad import add_embedding_grad
from megacore.kernels.linear_cross_entropy import adds_in_fp32


@dataclass(eq=False)
class WeightGradPart:
    """A part of gradients that is added to their sums, `totals`, later: `add` is called with
    the tensors that it is made of.

    The last of them has this rank's tokens, if it is to be gathered over `group`: in between it takes no more
    memory than before.
    """

    totals: tuple[Tensor, ...]
    add: Callable[..., None]
    tensors: list[Tensor]
    group: Group = SOLO
    gathering: Work | None = None

    def start(self) -> None:
        """Begins to gather the last tensor."""
        self.tensors[-1], self.gathering = all_gather_start(self.tensors[-1], self.group)

    def finish(self) -> None:
        """Adds the part to the sums."""
        if self.gathering is not None:
            self.gathering.wait()
        self.add(*self.tensors)


class WeightGradQueue:
    """Whether the layers of an engine leave parts of weights' gradients for later, and where."""

    def __init__(self) -> None:
        self.parts: list[WeightGradPart] | None = None

    @contextmanager
    def collect(self) -> Iterator[list[WeightGradPart]]:
        """A context for a backward pass, whose parts the list gets in their order."""
        parts: list[WeightGradPart] = []
        self.parts = parts
        try:
            yield parts
        finally:
            self.parts = None


def finish_in_turn(parts: list[WeightGradPart]) -> Iterator[WeightGradPart]:
    """Adds each part to its sum, and yields it then.

    The next one's tokens are gathered meanwhile. The list is empty in the end.
    """
    parts.reverse()
    if parts:
        parts[-1].start()
    while parts:
        part = parts.pop()
        if parts:
            parts[-1].start()
        part.finish()
        yield part


class MainGradient:
    """The sum of a parameter's gradient over a step's microbatches.

    `total` has the parameter's shape, in fp32 at least, and belongs to an engine. While it is `empty`, what
    stands there is of no use: the first part is written and not added, so that nobody has to clear it.
    """

    def __init__(self, total: Tensor, deferral: WeightGradQueue | None = None) -> None:
        self.total, self.empty = total, True
        self.deferral = deferral or WeightGradQueue()

    @property
    def waits(self) -> bool:
        """Whether parts that can be added later are left to `defer`."""
        return self.deferral.parts is not None

    def defer(
        self,
        add: Callable[..., None],
        *tensors: Tensor,
        group: Group = SOLO,
        others: "Sequence[MainGradient]" = (),
    ) -> None:
        """Leaves ``add(*tensors)`` for later, with the last tensor gathered over `group`.

        It adds to this sum, and to `others`.
        """
        assert self.deferral.parts is not None
        totals = tuple(dict.fromkeys(main.total for main in (self, *others)))
        # x would hold what made it
        self.deferral.parts.append(WeightGradPart(totals, add, [x.detach() for x in tensors], group))

    def add_rows(self, grad: Tensor, rows: Tensor, implementation: Implementation = "auto") -> None:
        """Add the gradient of a lookup: `grad` ``[tokens, features]`` of the `rows`
        ``[tokens]`` that were looked up. Nothing is rounded to the dtype of `grad`.
        """
        if self.empty:
            self.total.zero_()
            self.empty = False
        add_embedding_grad(self.total, grad, rows, implementation=implementation)

    def add_product(self, grad: Tensor, x: Tensor) -> None:
        """Adds ``gradᵀ · x``, the gradient of a linear layer's weight; `grad` ``[tokens,
        outputs]``, `x` ``[tokens, inputs]``.
        """
        wide, total, beta = self.total.dtype, self.total.flatten(0, -2), 0.0 if self.empty else 1.0
        if is_widened(x):
            grad, x = grad.to(wide), x.to(wide)
        if x.dtype == wide:
            torch.addmm(total, grad.t(), x, beta=beta, out=total)
        elif adds_in_fp32(x.device.type, x.dtype):
            torch.addmm(total, grad.t(), x, beta=beta, out_dtype=wide, out=total)
        else:
            self.add((grad.t() @ x).view_as(self.total))
        self.empty = False

    def add(self, part: Tensor) -> None:
        """Adds a gradient that a layer has computed, in the shape of its parameter."""
        if self.empty:
            self.total.copy_(part)
        else:
            self.total.add_(part)
        self.empty = False

    def take(self, parameter: Tensor) -> None:
        """Adds what autograd has left in ``parameter.grad``, if anything.

        `total` then holds a sum, be it zero.
        """
        if parameter.grad is not None:
            self.add(parameter.grad)
            parameter.grad = None
        elif self.empty:
            self.total.zero_()
            self.empty = False


def main_gradient_of(parameter: Tensor) -> MainGradient | None:
    """Where the engine sums a parameter's gradient; None where it is left to autograd.

    It is in a compiled graph, which must not change what is outside it: there the engine takes what autograd
    gives.
    """
    return None if torch.compiler.is_compiling() else getattr(parameter, "main_gradient", None)
