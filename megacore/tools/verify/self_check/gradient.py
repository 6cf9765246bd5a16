"""Compares every parameter's gradient with differences of the loss along a random direction.

The loss is taken at p ± h v and p ± h/2 v by forwards alone, where v is a random unit direction of the
parameter p. Richardson's extrapolation of the two central differences d(h) and d(h/2) has an error of order
h⁴. Their distance |d(h/2) − d(h)|, of order h², bounds it, also across a kink (relu). Where the two do not
agree, the loss jumps or bends within h, and a smaller h is tried.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megacore.model.expert_block import MixtureOfExperts
from megacore.model.layers import Layer
from megacore.model.stage import Stage
from megacore.rng import key_of
from megacore.tools.verify.self_check.case import Case
from megacore.tools.verify.self_check.finding import Finding

NAME = "gradient"
STEP = 1e-3  # of h, relative to the parameter's norm
RELATIVE = 1e-6  # of a gradient's root mean square: what a right gradient may be off
ROUNDING = 8 * torch.finfo(torch.float64).eps  # of the loss, in a difference of two
SETTLED = 1e-4  # of the difference: how far d(h/2) and d(h) may be apart
# Directions and factors of h that are tried until one shows that the gradient is right.
ATTEMPTS = ((0, 1.0), (0, 0.1), (1, 0.1), (2, 0.1), (2, 0.01), (2, 0.001))


@dataclass(frozen=True)
class Comparison:
    """A gradient and the difference of the loss, along one direction."""

    name: str
    backward: float
    difference: float
    bound: float
    is_settled: bool

    @property
    def error(self) -> float:
        """How far the two are apart."""
        return abs(self.backward - self.difference)

    @property
    def is_right(self) -> bool:
        """Whether they agree, and the bound is tight enough to tell."""
        return self.is_settled and self.error <= self.bound

    def __str__(self) -> str:
        return (
            f"{self.name}: backward gives {self.backward:.1e}, differences {self.difference:.1e} "
            f"(bound {self.bound:.0e})"
        )


def check_gradient(case: Case) -> list[Finding]:
    """Check the gradient of every parameter that is trained.

    Exempt are parameters of layers with a module that declares `surrogate_gradient`, and of all layers before
    them, because such a gradient is not meant to be that of the loss.
    """
    if case.rounds_to is not None:
        return [Finding(NAME, "not checked", f"a layer rounds to {case.rounds_to}, and differences with it")]
    model, batch = case.build(), case.microbatches[0]
    hold_undifferentiated(model)
    with torch.no_grad():
        first, second = case.loss(model, batch), case.loss(model, batch)
    if not first.isfinite():
        return [Finding(NAME, "wrong", f"the loss is {float(first)}")]
    if not torch.equal(first, second):
        return [Finding(NAME, "not checked", "two passes give different losses")]
    case.loss(model, batch, case.weights).backward()

    layer_of = layers_of_parameters(model)
    exempt = 1 + max((i for i, layer in enumerate(model.layers) if has_surrogate(layer)), default=-1)
    names = [spec.name for spec in case.layers]
    parameters = dict(model.named_parameters())
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    checked = [name for name, parameter in trained.items() if layer_of[parameter] >= exempt]

    right, wrong, unsettled = list[Comparison](), list[Comparison](), list[str]()
    for name in checked:
        comparison = examine(lambda: case.loss(model, batch), name, trained[name])
        if comparison.is_right:
            right.append(comparison)
        elif comparison.is_settled:
            wrong.append(comparison)
        else:
            unsettled.append(name)

    findings = []
    if wrong:
        # What comes after a mistake has right gradients, so the last wrong one is nearest to it. In its layer
        # a gradient of 0 tells most: it is what a detached tensor would have got.
        wrong.reverse()
        wrong.sort(key=lambda c: (-layer_of[trained[c.name]], c.backward != 0.0))
        place = names[layer_of[trained[wrong[0].name]]]
        summary = f"{wrong[0]}; last layer with a wrong gradient: {place}"
        findings.append(Finding(NAME, "wrong", summary, tuple(map(str, wrong[1:]))))
    elif right:
        frozen = len(parameters) - len(trained)
        summary = (
            f"gradient {len(right)} of {len(trained)} parameters, worst {max(c.error for c in right):.0e}"
        )
        findings.append(Finding(NAME, "right", summary + (f" ({frozen} are frozen)" if frozen else "")))
    if unsettled:
        reason = "the loss jumps close by, as where a choice flips"
        findings.append(Finding(NAME, "not checked", f"{', '.join(unsettled)} ({reason})"))
    if exempt and len(checked) < len(trained):
        exempted = [name for name in trained if name not in checked]
        summary = f"{len(exempted)} parameters up to {names[exempt - 1]}, which declares a surrogate gradient"
        findings.append(Finding(NAME, "not checked", summary, (", ".join(exempted),)))
    return findings


def examine(loss: Callable[[], Tensor], name: str, parameter: nn.Parameter) -> Comparison:
    """Return the first comparison that shows a right gradient, or else the first that tells anything."""
    comparisons = list[Comparison]()
    for direction, factor in ATTEMPTS:
        comparison = compare(loss, name, parameter, direction, factor)
        if comparison.is_right:
            return comparison
        comparisons.append(comparison)
    return next((c for c in comparisons if c.is_settled), comparisons[0])


@torch.no_grad()
def compare(
    loss: Callable[[], Tensor], name: str, parameter: nn.Parameter, number: int, factor: float
) -> Comparison:
    """Compare a gradient with differences along the parameter's random direction `number`.

    `factor`: of the usual h.
    """
    generator = torch.Generator().manual_seed(key_of("self-check", name, number))
    direction = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    direction /= direction.norm()
    # None where no loss depends on the parameter
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    start, h = parameter.clone(), factor * STEP * max(float(parameter.norm()), 1e-2)

    def central(size: float) -> tuple[float, float]:
        values = []
        for sign in (1, -1):
            parameter.copy_(start + sign * size * direction)
            values.append(float(loss()))
        return (values[0] - values[1]) / (2 * size), max(map(abs, values))

    (wide, largest), (narrow, _) = central(h), central(h / 2)
    parameter.copy_(start)
    backward, difference = float((gradient * direction).sum()), (4 * narrow - wide) / 3
    typical = float(gradient.norm()) / parameter.numel() ** 0.5
    floor, apart = max(RELATIVE * typical, ROUNDING * largest / h), abs(narrow - wide)
    # a gradient that is not finite needs no difference to be wrong
    settled = not math.isfinite(typical) or apart <= max(floor, SETTLED * max(typical, abs(difference)))
    return Comparison(name, backward, difference, max(floor, apart), settled)


def layers_of_parameters(model: Stage) -> dict[nn.Parameter, int]:
    """Return the number of the first layer that uses each parameter."""
    numbers = dict[nn.Parameter, int]()
    for number, layer in enumerate(model.layers):
        for parameter in layer.parameters():
            numbers.setdefault(parameter, number)
    return numbers


def has_surrogate(layer: nn.Module) -> bool:
    """Whether the layer, or a module in it, declares that its gradient is not that of what it computes."""
    return any(getattr(module, "surrogate_gradient", False) for module in layer.modules())


def hold_undifferentiated(model: Stage) -> None:
    """Let every pass over a microbatch reuse what the first one chose and handed on without a gradient.

    Backward treats both as constants: the experts of a token, the rows that do not fit into an expert, and
    tensors whose `Flow` has no gradient. Differences of the loss must do so too.
    """
    for layer in model.layers:
        for module in layer.modules():
            if isinstance(module, MixtureOfExperts):
                module.decide, module.decide_drops = first_time(), first_time()
        if not all(flow.gradient for flow in layer.writes.values()):
            layer.register_forward_hook(keep_detached())


def first_time() -> Callable[..., Tensor]:
    """Return a function that gives its last argument as it was in the first call."""
    kept = list[Tensor]()

    def decide(*arguments: Any) -> Tensor:
        if not kept:
            kept.append(arguments[-1].clone())
        return kept[0]

    return decide


def keep_detached() -> Callable[[Layer, Any, Any], Any]:
    """Return a forward hook that replaces outputs without a gradient by those of its first call."""
    kept = dict[str, Tensor]()

    def hook(layer: Layer, _: Any, outputs: Any) -> Any:
        values = list(outputs) if isinstance(outputs, tuple) else [outputs]
        for index, (name, flow) in enumerate(layer.writes.items()):
            if not flow.gradient:
                values[index] = kept.setdefault(name, values[index].detach().clone())
        return tuple(values) if isinstance(outputs, tuple) else values[0]

    return hook
