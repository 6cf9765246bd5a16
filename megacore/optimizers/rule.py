"""What a rule is, and the table of all rules.

To add an optimizer, write a subclass of `Rule` in a file of this folder, or in the file that `model.source` names, and `register` it.
Engines, checkpoints, configs, the planner and the proof ask the rule, and need no change.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from pydantic.fields import FieldInfo

from megacore.section import Section

if TYPE_CHECKING:  # a config is read before torch is
    import numpy as np
    from torch import Tensor

    from megacore.kernels.dispatch import Implementation

Shape = tuple[int, ...]
State = dict[str, "np.ndarray"]  # by kind
S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class ParameterShard:
    """What a rule computes an update from: a whole logical tensor, or any range of elements of one or several.

    Nothing of it may be changed. `name` and `shard` are those of the logical tensor, and None for a range.
    """

    gradient: Tensor  # of the mean loss over the global batch: without the loss scale, and clipped
    state: Mapping[str, Tensor]  # by kind
    updates: Tensor  # how many steps were taken, with this one; a scalar of the gradient's dtype, on its device
    read_master: Callable[[], Tensor]  # gives the weights, fp32 or fp64; of a whole tensor it may gather them from other ranks
    name: str | None = None
    shard: Any = None  # its placement, a `distributed.shard.Shard`


@dataclass(frozen=True)
class ParameterShards:
    """The tensors that a rank updates by one rule: lists of flat tensors, of equal length and sizes."""

    masters: Sequence[Tensor]  # fp32 or fp64
    gradients: Sequence[Tensor]
    states: Mapping[str, Sequence[Tensor]]  # by kind
    decays: Sequence[float]  # weight decay
    copies: Sequence[Tensor] | None  # 16-bit parameters that compute, if they are not the masters: every step rounds the masters into them


class Update(Protocol):
    """Updates some of a rank's tensors. `updates`, an fp32 scalar on their device, counts the steps that were not skipped."""

    updates: Tensor

    def step(self, lr: float, scale: Tensor, skip: Tensor) -> None:
        """Updates all masters from ``gradients / scale``, unless `skip` is not 0; both are scalars on the device of `updates`."""


class Rule(ABC, Generic[S]):
    """An optimizer: with the rate r and the weight decay w, a parameter becomes ``(1 - r · w) · p - r · direction``.

    All state is zeros at first. What has a number for each element is divided among ranks as the parameter is. State of other shapes is
    whole on every rank that holds a part of the parameter.
    """

    name: ClassVar[str]  # in `optim.kind`
    settings_type: ClassVar[type[Section]] = Section  # its keys, in `optim` and in an entry of `optim.groups`
    whole: ClassVar[bool] = False  # whether it needs whole logical tensors; otherwise it may be given any range of elements
    kinds: ClassVar[tuple[str, ...]] = ()  # of its state, with a number for each element; a kind is also a prefix in checkpoints

    def __init__(self, settings: S) -> None:
        self.settings = settings

    @classmethod
    def own_state(cls, shape: Shape) -> dict[str, Shape]:
        """State of other shapes, for a rule with `whole`: by kind, for a parameter of this shape."""
        return {}

    @classmethod
    def refuses(cls, shape: Shape) -> str | None:
        """Why it cannot update a parameter of this shape, in a few words; None if it can."""
        return None

    def direction(self, given: ParameterShard) -> tuple[Tensor, dict[str, Tensor]]:
        """The update at a rate of one, before its sign and without weight decay, and the state after it."""
        raise AssertionError(f"{self.name} has only the fused form")

    def fused(self, tensors: ParameterShards, implementation: Implementation) -> Update | None:
        """The update of many tensors in few operations, for a rule that has one; else the engine asks for each `direction`."""
        return None

    @abstractmethod
    def reference_state(self, before: State, gradient: np.ndarray, step: int) -> State:
        """For the proof: the state after step `step` (from 1), given that before it and the clipped gradient, of a whole logical tensor.

        It is written in plain numpy, independent of `direction` and `fused`.
        """

    @abstractmethod
    def reference_direction(self, state: State, gradient: np.ndarray, step: int) -> np.ndarray:
        """For the proof, likewise: the update at a rate of one that follows from the state after the step."""


RULES: dict[str, type[Rule[Any]]] = {}  # by name
_on_register: list[Callable[[], None]] = []


def register(rule: type[Rule[Any]]) -> type[Rule[Any]]:
    """Enters a rule under its name; for use as a decorator. From then on configs may name it, and have its settings' keys."""
    assert re.fullmatch(r"[a-z][a-z0-9_]*", rule.name), f"{rule.name!r} is no name for an optimizer"
    before = RULES.get(rule.name)
    assert before is None or before.__module__.partition(".")[0] != __name__.partition(".")[0], f"there is an optimizer {rule.name} already"
    own = rule.settings_type.model_fields
    for other in RULES.values():
        for key, field in {} if other is before else other.settings_type.model_fields.items():
            same = key not in own or _meaning(own[key]) == _meaning(field)
            assert same, f"{rule.name} and {other.name} both have a setting called {key}, of another type or default"
    RULES[rule.name] = rule
    _tell()
    return rule


def unregister(rule: type[Rule[Any]]) -> None:
    """Takes a rule out again."""
    del RULES[rule.name]
    _tell()


def _tell() -> None:
    for told in _on_register:
        told()


def _meaning(field: FieldInfo) -> tuple[Any, ...]:
    """Two settings of one name are one key of the config, so this must be equal."""
    return field.annotation, field.default, field.metadata


def on_register(told: Callable[[], None]) -> None:
    """Calls `told` now, and after every rule that is registered later."""
    _on_register.append(told)
    told()
