"""Times kernels beside a copy of as many bytes, PyTorch's own and Liger-Kernel's, after
comparing their results with fp64.

All contenders take turns in interleaved rounds, the copy among them, so that whatever the clock does meets
them all. Before each turn the cache is flushed. Medians count.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from benchmarks.kernel_inputs import Inputs, Size
from benchmarks.kernel_operations import OPERATIONS, Operation
from megacore.caches import keep_inductor_private

# Relative to the largest value: twice what rounding to the dtype costs (tests/kernel_checks.py), and as much
# again for sums over rows, products of matrices, and the interpreter's truncation.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
# many times any cache; writing it also takes longer than queueing a turn does, so that no launch is waited
# for
FLUSH_BYTES = 2**30
COPY = "copy"
Turn = Callable[[], Any]


@dataclass(frozen=True)
class Measured:
    """Median seconds of each contender at one operation, size and direction; a share is
    of the copy's speed.
    """

    operation: str
    size: Size
    dtype: str
    direction: str  # forward, backward, or "step" for both
    moved: int | None  # bytes
    goal: float | None
    seconds: dict[str, float]
    memory: dict[str, int]  # bytes at the peak, beyond the inputs; of a step

    def share(self, contender: str) -> float | None:
        """Of the copy's speed."""
        return (
            self.seconds[COPY] / self.seconds[contender]
            if COPY in self.seconds and contender in self.seconds
            else None
        )

    @property
    def slower_than_eager(self) -> bool:
        return self.seconds["triton"] > self.seconds["eager"]


def prepared(inputs: Inputs, operation: Operation) -> Inputs:
    """Copies, which what works in place may overwrite; those by which the operation is
    differentiated require gradients.
    """
    copies = tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, inputs)
    for name in operation.by:
        copies[name].requires_grad_()
    return copies


def outputs(result: Any) -> tuple[Tensor, ...]:
    """Of an operation that returns one or several."""
    return result if isinstance(result, tuple) else (result,)


def results(operation: Operation, inputs: Inputs, how: str, wide: bool) -> list[Tensor]:
    """What the operation returns, and the gradients for seeded ones of that."""
    widened = (
        tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, inputs)
        if wide
        else inputs
    )
    own = prepared(widened, operation)
    found = outputs(operation.call(own, how))
    kept = [t.detach().clone() for t in found]
    if not operation.by:
        return kept
    grads = []
    for seed, t in enumerate(found):
        noise = torch.randn(t.shape, generator=torch.Generator(t.device).manual_seed(seed), device=t.device)
        grads.append(noise.bfloat16().to(t.dtype))  # the same numbers whatever the dtype
    return kept + list(torch.autograd.grad(found, [own[name] for name in operation.by], grads))


def error(name: str, size: Size, dtype: torch.dtype, device: torch.device) -> float:
    """Largest difference between Triton's results and gradients and eager ones in fp64,
    relative to the largest value of each.
    """
    operation = OPERATIONS[name]
    inputs = operation.inputs(size, dtype, device)
    largest = 0.0
    pairs = zip(
        results(operation, inputs, "triton", False), results(operation, inputs, "eager", True), strict=True
    )
    for got, exact in pairs:
        difference = ((got.double() - exact).abs().max() / exact.abs().max().clamp_min(1e-30)).item()
        largest = max(largest, difference if difference == difference else float("inf"))
    return largest


def contenders(operation: Operation, compiled: bool) -> dict[str, Callable[[Inputs], Any]]:
    """What is compared, by name."""
    found: dict[str, Callable[[Inputs], Any]] = {
        "triton": lambda inputs: operation.call(inputs, "triton"),
        "eager": lambda inputs: operation.call(inputs, "eager"),
    }
    plain = operation.plain or found["eager"]
    if operation.plain is not None:
        found["eager"] = operation.plain
    if compiled:
        keep_inductor_private()
        torch.compiler.reset()
        found["compile"] = torch.compile(plain, dynamic=False)
    if operation.liger is not None and find_spec("liger_kernel") is not None:
        liger, functions = operation.liger, import_module("liger_kernel.transformers.functional")
        found["liger"] = lambda inputs: liger(functions, inputs)
    return found


def turns(
    operation: Operation, call: Callable[[Inputs], Any], inputs: Inputs, direction: str
) -> Callable[[], Turn]:
    """Makes turns: what must be done before one, such as the forward pass before a
    backward one, is done when it is made.
    """
    if direction == "forward" or not operation.by:
        return lambda: lambda: call(inputs)
    by = [inputs[name] for name in operation.by]
    grads: list[Tensor] = []

    def gradients() -> Turn:
        found = outputs(call(inputs))
        if not grads:
            grads.extend(torch.randn_like(t) for t in found)
        return lambda: torch.autograd.grad(found, by, grads)

    return gradients if direction == "backward" else lambda: lambda: gradients()()


def copies(count: int, device: torch.device) -> Callable[[], Turn]:
    """Turns of reading half of `count` bytes and writing the other half."""
    source, target = (torch.zeros(count // 2, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: lambda: target.copy_(source)


def race(makers: dict[str, Callable[[], Turn]], rounds: int, device: torch.device) -> dict[str, float]:
    """Median seconds of a turn of each, in rounds of alternating order after two that do not count."""
    timed: dict[str, list[Callable[[], float]]] = {name: [] for name in makers}
    flushed = torch.empty(FLUSH_BYTES if device.type == "cuda" else 0, dtype=torch.uint8, device=device)
    for number in range(-2, rounds):
        for name in list(makers)[:: 1 if number % 2 else -1]:
            turn = makers[name]()
            flushed.zero_()
            seconds = timed_turn(turn, device)
            if number >= 0:
                timed[name].append(seconds)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return {name: median(seconds() for seconds in found) for name, found in timed.items()}


def timed_turn(turn: Turn, device: torch.device) -> Callable[[], float]:
    """Runs or queues a turn; the result gives its seconds, on a GPU once the device is done."""
    if device.type != "cuda":
        started = perf_counter()
        turn()
        seconds = perf_counter() - started
        return lambda: seconds
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    turn()
    end.record()
    return lambda: start.elapsed_time(end) / 1e3


def able(makers: dict[str, Callable[[], Turn]]) -> dict[str, Callable[[], Turn]]:
    """Those that can do it: other people's may refuse a size, or need more memory
    than there is; ours must do it.
    """
    found = {}
    for name, maker in makers.items():
        try:
            maker()()
        except Exception:
            if name in ("triton", "eager", COPY):
                raise
            continue
        found[name] = maker
    return found


def measure(
    name: str, size: Size, dtype: torch.dtype, device: torch.device, rounds: int, compiled: bool
) -> Iterator[Measured]:
    """Forward and backward of an operation at a size; of one that memory does not
    limit, a whole step and its memory.
    """
    operation = OPERATIONS[name]
    inputs = prepared(operation.inputs(size, dtype, device), operation)
    calls = contenders(operation, compiled)
    if operation.moved is None:
        makers = able(
            {contender: turns(operation, call, inputs, "step") for contender, call in calls.items()}
        )
        memory = (
            {contender: peak(maker) for contender, maker in makers.items()} if device.type == "cuda" else {}
        )
        yield Measured(name, size, str(dtype), "step", None, None, race(makers, rounds, device), memory)
        return
    for direction, moved in zip(("forward", "backward"), operation.moved(size, dtype.itemsize), strict=True):
        if moved:
            makers = able(
                {contender: turns(operation, call, inputs, direction) for contender, call in calls.items()}
            )
            makers[COPY] = copies(moved, device)
            goal = operation.goal(direction == "backward", size.width)
            yield Measured(name, size, str(dtype), direction, moved, goal, race(makers, rounds, device), {})


def peak(maker: Callable[[], Turn]) -> int:
    """Bytes that a turn needs at its peak."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    maker()()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
