"""Replays in fp64 what a 16-bit layout should have made of its own numbers: sums, norm,
moments, updates and rounded copies.

Errors of a few per cent from bf16 hide many mistakes. But only the model computes in bf16: gradients are
summed and masters updated in fp32. So each of these operations, repeated alone on the numbers that the same
run gave it, must agree to fp32's precision. numpy only, like `compare`.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from megacore.config import Config
from megacore.config.optim import OptimConfig
from megacore.config.optim_groups import ParameterGroups
from megacore.config.schema import resolved
from megacore.optimizers.rule import ReferenceStep
from megacore.tools.verify.compare import (
    Difference,
    Records,
    cut,
    logical,
    parsed,
    pieces_against,
    relative,
    rms,
    scales_of,
)
from megacore.tools.verify.matrix_rules import reference_direction, reference_state, zeros

if TYPE_CHECKING:
    from megacore.distributed.shard import Shard

# fp32 rounds to 2^-24. A sum over microbatches and ranks rounds some dozen times at most, a moment or an
# update less often. In bf16 the first addition would err by about 2^-9. This bound is half way between, in
# powers of two.
EXACT = 2.0**-16
# An update's error is relative to its own size, but a master can hold it only to a few units of its last
# place: four times 2^-24 of the master. So this part of the master is added to the size of which `EXACT` is a
# part.
HELD = 2.0**-6


def rate(optim: OptimConfig, step: int, steps: int, peak: float | None = None) -> float:
    """The learning rate of `step` (from 1) of `steps`, independent of the engine's code; `peak`: of a
    group, in place of `optim.lr`.
    """
    if peak is not None and peak != optim.lr:
        return rate(optim, step, steps) / optim.lr * peak
    decay_steps = resolved(optim.decay_steps)
    warm, step = max(0, step - optim.lag[0]), max(0, step - optim.lag[1])
    if 0 < optim.warmup_steps >= max(warm, step):
        if optim.warmup == "linear":
            missing = (optim.warmup_steps - warm) / optim.warmup_steps
        else:
            missing = 1 - min(1.0, math.log(1 + warm, max(2, optim.warmup_steps)))
        return optim.lr - (optim.lr - optim.warmup_lr) * missing
    if optim.schedule == "constant":
        return optim.lr
    if optim.schedule == "wsd":
        left = min(1.0, (steps - step) / decay_steps)
    else:
        left = max(0.0, (decay_steps - step) / max(1, decay_steps - optim.warmup_steps))
        if optim.schedule == "cosine":
            left = (1.0 - math.cos(math.pi * left)) / 2
    return optim.min_lr + (optim.lr - optim.min_lr) * left


def decays(name: str, dims: int) -> bool:
    """Whether weight decay applies: to matrices, not to norms and biases.

    It does not ask the parameter's record.
    """
    return dims > 1 and not name.endswith("bias")


class Replay:
    """Compares a run with what follows from its own records.

    Attributes:
        lacking: what cannot be computed again, in words; empty if everything is.
    """

    def __init__(self, run: Records, config: Config, names: list[str]) -> None:
        self.run, self.config, self.names = run, config, names
        self.held = run.whole
        self.exact: dict[str, np.ndarray] = {}  # what should be held, under the same names
        self.scales: dict[str, float] = {}
        self.found: list[Difference] = []
        self.groups = ParameterGroups(config.optim)
        self.given = f"given 1|{names[0]}" in self.held
        kept = (
            f"sums of gradients and the rounded copies of weights, which {config.engine.kind} keeps "
            "where no hook sees them"
        )
        loose = [name for name in names if math.isinf(self.groups.of(name).rule.rounding)]
        named = self.groups.of(loose[0]).rule.name if loose else ""
        rule = (
            f"updates and bases of {len(loose)} parameters of {named}, which fp32 does not decide"
            if loose
            else ""
        )
        self.lacking = rule if self.given else " and the ".join(filter(None, (kept, rule)))

    @cached_property
    def shards(self) -> "dict[str, Shard]":
        """The placements of all parameters."""
        from megacore.tools.settings.group_table import parameter_shards

        return parameter_shards(self.config)

    def differences(self) -> list[Difference]:
        """All differences, of kinds that begin with "own"."""
        for step in range(1, self.config.train.steps + 1):
            if self.given:
                self._sums(step)
            self._norm(step)
            self._update(step)
        replayed = [
            {key: tensor for key, tensor in tensors.items() if logical(key) in self.exact}
            for tensors in self.run.ranks
        ]
        apart = pieces_against(replayed, self.run.places, self.exact, self.scales)
        return [*self.found, *(replace(d, kind=f"own {d.kind}") for d in apart), *self._copies()]

    def _sums(self, step: int) -> None:
        """Checks that gradients are the sum of what each microbatch's backward gave."""
        given = {f"gradient {step}|{name}": self.held[f"given {step}|{name}"] for name in self.names}
        self.exact |= given
        self.scales |= scales_of(given)

    def _norm(self, step: int) -> None:
        """Checks that the norm is that of the gradients."""
        norm = math.sqrt(
            sum(float(np.square(self.held[f"gradient {step}|{name}"]).sum()) for name in self.names)
        )
        for rank, figures in enumerate(self.run.figures):
            apart = relative(np.array([figures[str(step)]["grad_norm"] - norm]), norm)
            self.found.append(Difference("figure", step, "own norm", rank, apart))
        self.norm = norm

    def _update(self, step: int) -> None:
        """Checks each optimizer's rule, from the recorded gradients, state and masters of the same run."""
        optim, steps = self.config.optim, self.config.train.steps
        clip = min(1.0, optim.grad_clip / (self.norm + 1e-6)) if optim.grad_clip else 1.0
        states: dict[str, np.ndarray] = {}
        updates = {}
        for name in self.names:
            group = self.groups.of(
                name, None if self.config.model.parametrization == "standard" else self.shards[name]
            )
            gradient, p = (
                clip * self.held[f"gradient {step}|{name}"],
                self.held[f"parameter {step - 1}|{name}"],
            )
            shard, lr = self.shards[name] if group.rule.whole else None, rate(optim, step, steps, group.lr)
            nothing = zeros(group.rule, p.shape, shard)
            before = {
                kind: self.held.get(f"{kind} {step - 1}|{name}", zero) for kind, zero in nothing.items()
            }
            taken = ReferenceStep(step, before, gradient, p, lr, group.weight_decay * decays(name, p.ndim))
            surely = group.rule.kinds if math.isinf(group.rule.rounding) else nothing
            states |= {
                f"{kind} {step}|{name}": x
                for kind, x in reference_state(group.rule, taken, shard).items()
                if kind in surely
            }
            if math.isinf(group.rule.rounding):
                continue
            held = {kind: self.held[f"{kind} {step}|{name}"] for kind in nothing}
            update = -lr * (reference_direction(group.rule, taken, held, shard) + taken.weight_decay * p)
            self.exact[f"parameter {step}|{name}"] = p + update
            updates[f"parameter {step}|{name}"] = update
        self.exact |= states
        self.scales |= scales_of(states)
        for key, size in scales_of(updates).items():
            rounding = self.groups.of(parsed(key)[2]).rule.rounding
            self.scales[key] = size * max(1.0, rounding / EXACT) + HELD * rms(self.exact[key])

    def _copies(self) -> Iterator[Difference]:
        """Checks that the parameters of a step are the rounded masters of the step before, bit by bit."""
        for rank, (tensors, places) in enumerate(zip(self.run.evidence, self.run.places, strict=True)):
            for key, tensor in tensors.items():
                kind, step, name = parsed(key)
                if kind == "copy":
                    master = cut(self.held[f"parameter {step - 1}|{name}"], places[key][0], tensor)
                    yield Difference(
                        "own copy", step, name, rank, relative(tensor - rounded(master), rms(master))
                    )


def cancelled(reference: Records, optim: OptimConfig, names: list[str]) -> dict[tuple[int, str], float]:
    """By step and parameter, the size that the first moment would have if its gradients were
    unrelated, over the size that it has.

    The second moment has no signs, so it shows that size. The result is at least 1, and infinite if there is
    no moment at all. Parameters of other optimizers are left out.
    """
    found, held, groups = {}, reference.whole, ParameterGroups(optim)
    for kind, step, name in map(parsed, held):
        if kind == "adam_m" and step and name in names:
            settings = groups.of(name).rule.settings
            size, of_squares = rms(held[f"adam_m {step}|{name}"]), float(held[f"adam_v {step}|{name}"].mean())
            unrelated = (1 - settings.beta1) * math.sqrt(of_squares / (1 - settings.beta2))
            found[step, name] = max(1.0, unrelated / size) if size else math.inf
    return found


def undirected(optim: OptimConfig, names: list[str]) -> dict[str, int]:
    """How many of the parameters each rule updates of which `directions` knows nothing, by the rule's name:
    all but AdamW, and those whose updates are not computed again either.
    """
    rules = [ParameterGroups(optim).of(name).rule for name in names]
    return dict(
        Counter(rule.name for rule in rules if "adam_m" not in rule.kinds and math.isfinite(rule.rounding))
    )


def directions(
    run: Records, reference: Records, cancelled: dict[tuple[int, str], float], clear: float
) -> Iterator[Difference]:
    """1 − the cosine between a run's update of each parameter and fp64's, over the elements
    that rounding does not decide.

    Adam's update is little more than a sign, and rounding decides the sign of small elements. An element
    counts if its first moment is at least the part `clear` of the root mean square that all would have
    without cancellation.
    """
    held, expected = run.whole, reference.whole
    for (step, name), ratio in cancelled.items():
        moment = expected[f"adam_m {step}|{name}"]
        chosen = np.abs(moment) > clear * ratio * rms(moment)
        after, before = (f"parameter {at}|{name}" for at in (step, step - 1))
        ours, theirs = ((tensors[after] - tensors[before])[chosen] for tensors in (held, expected))
        if theirs.any():
            size = math.sqrt(float(np.square(ours).sum()) * float(np.square(theirs).sum()))
            cosine = float((ours * theirs).sum()) / size if size else 0.0
            yield Difference("direction", step, name, 0, 1.0 - cosine if math.isfinite(cosine) else math.inf)


def rounded(x: np.ndarray) -> np.ndarray:
    """Rounds fp32 numbers to bf16, to the nearest and in a tie to even.

    Returns fp64, as all compared numbers are.
    """
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
