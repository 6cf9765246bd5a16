"""Mistakes of backwards in two halves, and of ranks that hold several chunks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

from megacore.engine import native
from megacore.pipeline import runtime
from megacore.tensor_parallel.gradient import WeightGradPart, finish_in_turn
from tests.faults import fault

patch = mock.patch.object
ZB = "parallel.schedule=zb_h1"


def spoiling(spoil: Callable[[Any, list[WeightGradPart]], None]) -> Any:
    """The second half of every backward, with its parts changed beforehand."""
    whole = native.NativeEngine.backward_weight

    def spoilt(self: Any, chunk: int, parts: list[WeightGradPart], *, last: bool) -> None:
        spoil(self, parts)
        whole(self, chunk, parts, last=last)

    return patch(native.NativeEngine, "backward_weight", spoilt)


@fault(
    "the second half of backward loses a weight's gradient (split backward: pytorch issue 161904; "
    "torchtitan issue 3584)",
    "pp2",
    "module blocks.3.attention.output, gradient of its weight, microbatch 0, backward",
    ZB,
)
def weight_gradient_lost() -> Any:
    return spoiling(lambda engine, parts: parts.pop(-2))


@fault(
    "the second half of backward adds a weight's gradient twice",
    "pp2",
    "module blocks.3.attention.output, gradient of its weight, microbatch 0, backward",
    ZB,
)
def weight_gradient_doubled() -> Any:
    return spoiling(lambda engine, parts: parts.append(replace(parts[-2], tensors=[*parts[-2].tensors])))


@fault(
    "the second half of backward multiplies a gradient by the input of another microbatch",
    "pp2",
    "module blocks.3.feed_forward.down, gradient of its weight, microbatch 1, backward",
    ZB,
)
def weight_gradient_of_another_microbatch() -> Any:
    before: dict[int, Any] = {}

    def mix(engine: Any, parts: list[WeightGradPart]) -> None:
        for part in parts:
            (total,), own = part.totals, part.tensors[-1]
            part.tensors[-1] = before.get(id(total), own)
            before[id(total)] = own

    return spoiling(mix)


@fault(
    "a chunk's gradients are summed over the data ranks before its last weights have theirs",
    "pp2dp2",
    "every microbatch's gradients agree; their sum over microbatches and ranks does not: first "
    "embedding.weight",
    ZB,
)
def reduced_before_the_last_weight() -> Any:
    def early(self: Any, chunk: int, parts: list[WeightGradPart], *, last: bool) -> None:
        if last:
            self.reducer.complete(self.reducer.totals_of(chunk))
            for work in self.reducer.work:
                work.wait()
        for _ in finish_in_turn(parts):
            pass

    return patch(native.NativeEngine, "backward_weight", early)


@fault(
    "a rank runs its chunks in each other's place",
    "pp4",
    "module blocks.1, its input, microbatch 0, forward",
    "parallel.schedule=interleaved",
    "model.num_layers=8",
)
def chunks_swapped() -> Any:
    run = runtime.Runtime.run

    def swapped(self: Any, *rest: Any) -> Any:
        if not any(stage.first or stage.last for stage in self.stages):
            self.modules = self.modules[::-1]
        return run(self, *rest)

    return patch(runtime.Runtime, "run", swapped)
