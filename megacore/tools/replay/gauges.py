"""How large every tensor of a step is, forward and backward, microbatch by microbatch; and
which is the first out of line.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from megacore.config.schema import IGNORED
from megacore.distributed.events import Listener
from megacore.model.stage import Stage
from megacore.pipeline.schedule import Action, Op
from megacore.tools.verify.trace import GradientWatch

FORWARD, LOSS, BACKWARD, WEIGHT = "output", "loss", "gradient of the output", "gradient"
LIMIT = 10.0  # robust deviations above the median that are out of line
# the least that counts as one, of logarithms: what is out of line is 2.7 times the median at least
LEAST = 0.1
FEW = 4  # fewer sizes say nothing of what is usual

Tensors = tuple[str, str]  # what it is, and the name of its layer or parameter


@dataclass(frozen=True)
class Size:
    """Of a tensor in a microbatch: root mean square and largest element.

    Of a loss: both are its mean over targets.
    """

    microbatch: int
    rms: float
    largest: float
    elements: int

    @property
    def finite(self) -> bool:
        """Whether every element is."""
        return math.isfinite(self.rms) and math.isfinite(self.largest)


Sizes = Mapping[Tensors, Sequence[Size]]  # of a step, in the order in which tensors came into being


class Gauges(Listener):
    """Measures all that the modules of one process's stages give. It changes nothing."""

    on_error = "raise"

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.microbatch, self.listens = 0, False
        self.found: dict[Tensors, list[tuple[int, Tensor, int]]] = defaultdict(list)
        self.targets: list[int] = []
        for stage in stages:
            for name, module in stage.named_modules():
                if module is not stage and not isinstance(module, nn.ModuleDict | nn.ModuleList):
                    module.register_forward_hook(self._hook(stage.logical_name(name), module, stage))
        parameters = {name: parameter for stage in stages for name, parameter in stage.named_parameters()}
        self.watches = [
            GradientWatch(parameter, self._gradient(name))
            for name, parameter in parameters.items()
            if parameter.requires_grad
        ]

    def begin(self, targets: Sequence[Tensor | None]) -> None:
        """A step begins, with these targets of its microbatches."""
        self.found.clear()
        self.targets = [0 if of is None else int((of != IGNORED).sum()) for of in targets]

    def on_action_begin(self, action: Action) -> None:
        self.microbatch, self.listens = action.microbatch, action.op in (Op.FORWARD, Op.BACKWARD)

    def on_action_end(self, action: Action) -> None:
        for watch in self.watches:
            watch.look()
        self.listens = False

    def _hook(self, name: str, module: nn.Module, stage: Stage) -> Any:
        written = len(module.writes) if module in stage.layers else None  # type: ignore[arg-type]

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            for i, value in enumerate(output if isinstance(output, tuple) else (output,)):
                if not self.listens or not isinstance(value, Tensor) or not value.is_floating_point():
                    continue
                if written is not None and i >= written:
                    self._note(
                        (LOSS, module.losses[i - written].name),  # type: ignore
                        value.detach() / max(1, self.targets[self.microbatch]),
                    )
                    continue
                key = f"{name}.{i}" if i else name
                self._note((FORWARD, key), value)
                if value.requires_grad:
                    value.register_hook(partial(self._note_gradient, key))

        return after

    def _gradient(self, name: str) -> Any:
        return lambda gradient: self._note((WEIGHT, name), gradient)

    def _note_gradient(self, key: str, gradient: Tensor | None) -> None:
        if gradient is not None:  # autograd calls hooks with None where an operation gives no gradient
            self._note((BACKWARD, key), gradient)

    def _note(self, key: Tensors, value: Tensor) -> None:
        value = value.detach()
        rms = torch.linalg.vector_norm(value, dtype=torch.float64) / math.sqrt(max(1, value.numel()))
        largest = value.abs().amax().double() if value.numel() else rms
        self.found[key].append((self.microbatch, torch.stack((rms, largest)), value.numel()))

    def read(self, scale: float) -> dict[Tensors, list[Size]]:
        """The sizes of the step; gradients divided by the loss scale."""
        sizes: dict[Tensors, list[Size]] = {}
        for key, noted in self.found.items():
            by = scale if key[0] in (BACKWARD, WEIGHT) else 1.0
            numbers = torch.stack([pair for _, pair, _ in noted]).tolist()
            sizes[key] = [
                Size(at, rms / by, most / by, n)
                for (at, _, n), (rms, most) in zip(noted, numbers, strict=True)
            ]
        return sizes


@dataclass(frozen=True)
class Finding:
    """A tensor that is not finite, or out of line by so many robust deviations, and
    the microbatches in which it is.
    """

    what: str
    name: str
    deviations: float | None  # None: not finite
    microbatches: tuple[int, ...]


def deviations(x: float, usual: Sequence[float]) -> float:
    """By how many robust deviations the logarithm of a size is above the median of what is usual; 0
    where that is too little to tell.

    Sizes of gradients have long tails: of themselves instead of their logarithms, every third healthy step
    would have one out of line.
    """
    logs = [math.log(size) for size in usual if math.isfinite(size) and size > 0]
    if len(logs) < FEW or x <= 0:
        return 0.0
    if not math.isfinite(x):
        return math.inf
    middle = median(logs)
    return (math.log(x) - middle) / max(1.4826 * median(abs(size - middle) for size in logs), LEAST)


def of_microbatches(step: Mapping[int, float], before: Sequence[float]) -> dict[int, float]:
    """The deviations of each microbatch's size, against those of steps before and of the others."""
    return {
        at: deviations(x, [*before, *(other for i, other in step.items() if i != at)])
        for at, x in step.items()
    }


def first_out_of_line(step: Sizes, before: Sequence[Sizes]) -> Finding | None:
    """The first tensor of a step that is not finite, or else the first that is out of
    line; None if all are as usual.
    """
    for (what, name), sizes in step.items():
        if bad := [size.microbatch for size in sizes if not size.finite]:
            return Finding(what, name, None, tuple(dict.fromkeys(bad)))
    for key, sizes in step.items():
        past = [size for other in before for size in other.get(key, ())]
        worst: dict[int, float] = {}
        for measure in ("rms", "largest"):
            own = {size.microbatch: getattr(size, measure) for size in sizes}
            for at, apart in of_microbatches(own, [getattr(size, measure) for size in past]).items():
                worst[at] = max(worst.get(at, 0.0), apart)
        if (most := max(worst.values())) > LIMIT:
            return Finding(*key, most, tuple(at for at, apart in worst.items() if apart > LIMIT))
    return None


def losses(sizes: Sizes) -> dict[int, float]:
    """The loss of each microbatch a target, the sum where a model has several."""
    found: dict[int, float] = defaultdict(float)
    for (what, _), each in sizes.items():
        for size in each if what == LOSS else ():
            found[size.microbatch] += size.largest if not math.isfinite(size.largest) else size.rms
    return dict(found)


def norms(sizes: Sizes) -> dict[int, float]:
    """The norm of each microbatch's part of the gradient."""
    found: dict[int, float] = defaultdict(float)
    for (what, _), each in sizes.items():
        for size in each if what == WEIGHT else ():
            found[size.microbatch] += size.rms**2 * size.elements
    return {at: math.sqrt(total) for at, total in found.items()}
