"""What a rule is, and the table of all rules.

To add an optimizer, write a subclass of `Rule` in a file of this folder, or in the file that `model.source`
names, and `register` it. Engines, checkpoints, configs, the planner and the proof ask the rule, and need no
change.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

from pydantic.fields import FieldInfo

from megacore.section import Section

if TYPE_CHECKING:  # a config is read before torch is
    import numpy as np
    from torch import Tensor

    from megacore.kernels.dispatch import Implementation

Shape = tuple[int, ...]
State = dict[str, "np.ndarray"]  # by kind
# the kind of state that is weights: where a parameter has it, it evaluates in place of what is trained
AVERAGE = "average"
S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class ParameterShard:
    """What a rule computes an update from: any range of elements of one or several parameters.

    For `Rule.direction` of a rule with `whole`: all linear maps of one kind in a weight, such as the
    queries', ``[batch, rows, columns]``, whatever the layout. `gradient` is then what `prepare` made of it,
    `state` the rule's `own_state`, and weights are not there. Nothing of it may be changed.
    """

    gradient: Tensor  # of the mean loss over the global batch: without the loss scale, and clipped
    state: Mapping[str, Tensor]  # by kind
    # how many steps were taken, with this one; a scalar of the gradient's dtype, on its device
    updates: Tensor
    read_master: Callable[[], Tensor]  # gives the weights, fp32 or fp64
    rate: float = 0.0  # of this step, and the weight decay that the engine applies; without `whole`
    weight_decay: float = 0.0


@dataclass(frozen=True)
class ReferenceStep:
    """What the proof knows of a step, in plain numpy: of a whole logical tensor; with `whole` of the maps
    ``[batch, rows, columns]`` of one kind in it.
    """

    number: int  # from 1
    before: State  # the state before it
    gradient: np.ndarray  # clipped
    weights: np.ndarray  # before it
    rate: float
    weight_decay: float  # 0 where none applies


@dataclass(frozen=True)
class ParameterShards:
    """The tensors that a rank updates by one rule: lists of flat tensors, of equal length and sizes."""

    masters: Sequence[Tensor]  # fp32 or fp64
    gradients: Sequence[Tensor]
    states: Mapping[str, Sequence[Tensor]]  # by kind
    decays: Sequence[float]  # weight decay
    # 16-bit parameters that compute, if they are not the masters: every step rounds the masters into them
    copies: Sequence[Tensor] | None


class Update(Protocol):
    """Updates some of a rank's tensors.

    `updates`, an fp32 scalar on their device, counts the steps that were not skipped.
    """

    updates: Tensor

    def step(self, lr: float, scale: Tensor, skip: Tensor) -> None:
        """Updates all masters from ``gradients / scale``, unless `skip` is not 0; both are
        scalars on the device of `updates`.
        """


class Rule(ABC, Generic[S]):
    """An optimizer: with the rate r and the weight decay w, a parameter becomes ``(1
    - r · w) · p - r · direction``.

    All state is zeros at first. What has a number for each element is divided among ranks as the parameter
    is.

    A rule with `whole` updates matrices in two parts. `prepare` is elementwise: every rank does it on what it
    holds. `direction` is given whole logical matrices, never a shard, nor queries, keys and values as one:
    one rank, their owner, computes it, and has `own_state`.
    """

    name: ClassVar[str]  # in `optim.kind`
    settings_type: ClassVar[type[Section]] = Section  # its keys, in `optim` and in an entry of `optim.groups`
    # whether it needs whole logical matrices; otherwise it is given any range of elements
    whole: ClassVar[bool] = False
    # with `whole`, as `optim.kind`: hidden matrices alone have it, and AdamW all other parameters
    hidden_only: ClassVar[bool] = False
    others_lr: ClassVar[str | None] = None  # the setting with AdamW's rate there
    # of its state, with a number for each element; a kind is also a prefix in checkpoints
    kinds: ClassVar[tuple[str, ...]] = ()
    # state, without `whole`: kinds of which all parameters of a group share one number
    numbers: ClassVar[tuple[str, ...]] = ()

    # How large an update's elements are: about one whatever the gradient's are, or in proportion to these.
    # None: mup refuses the rule.
    update_size: ClassVar[Literal["one", "gradient"] | None] = None

    def __init__(self, settings: S) -> None:
        self.settings = settings

    def width_factor(self, hidden: bool, width: float) -> float | None:
        """With mup, the factor on the rate of a `hidden` matrix whose fan-in is `width` times
        that at the base width, or of another parameter with so many times as many elements (Yang
        et al. 2022, table 8). None: nobody knows.
        """
        factors = {"one": 1.0 / width if hidden else 1.0, "gradient": 1.0 if hidden else width}
        return None if self.update_size is None else factors[self.update_size]

    def own_state(self, shape: Shape) -> dict[str, Shape]:
        """State that is no number for each element, for a rule with `whole`: by kind, for maps ``[batch,
        rows, columns]`` of this shape. The kinds are the same for every shape.
        """
        return {}

    def cost(self, shape: Shape) -> float:
        """How many operations `direction` takes, by which maps of this shape are dealt to
        ranks; for a rule with `whole`.
        """
        batch, rows, columns = shape
        return 2.0 * batch * rows * columns * min(rows, columns)

    @property
    def rounding(self) -> float:
        """In a run of 16 bits, by what part of its size a direction may be off from what fp64 makes of
        the same numbers, besides fp32's own rounding. Infinite, where `own_state` is too sensitive for
        that: then neither is proved there.
        """
        return 0.0

    @property
    def by_head(self) -> bool:
        """With `whole`: whether each of attention's heads is a matrix of its own;
        otherwise all are rows of one.
        """
        return False

    @classmethod
    def refuses(cls, shape: Shape) -> str | None:
        """Why it cannot update a parameter of this shape, in a few words; None if it can."""
        return None

    def prepare(self, given: ParameterShard) -> tuple[Tensor, dict[str, Tensor]]:
        """For a rule with `whole`: what `direction` is given in the gradient's place, and the
        elementwise state (`kinds`) after it.

        To have the same bits however elements are divided, add and multiply in operations of their own: fused
        ones may round otherwise at the end of a range.
        """
        return given.gradient, {}

    def direction(self, given: ParameterShard) -> tuple[Tensor, dict[str, Tensor]]:
        """The update at a rate of one, before its sign and without weight decay, and the state after
        it; with `whole` the own state.
        """
        raise AssertionError(f"{self.name} has only the fused form")

    def fused(self, tensors: ParameterShards, implementation: Implementation) -> Update | None:
        """The update of many tensors in few operations, for a rule that has one; else the
        engine asks for each `direction`.
        """
        return None

    @abstractmethod
    def reference_state(self, step: ReferenceStep) -> State:
        """For the proof: the state after a step.

        It is written in plain numpy, independent of `prepare`, `direction` and `fused`.
        """

    @abstractmethod
    def reference_direction(self, step: ReferenceStep, after: State) -> np.ndarray:
        """For the proof, likewise: the update at a rate of one, given the state after the step too."""


RULES: dict[str, type[Rule[Any]]] = {}  # by name
_on_register: list[Callable[[], None]] = []


def register(rule: type[Rule[Any]]) -> type[Rule[Any]]:
    """Enters a rule under its name; for use as a decorator.

    From then on configs may name it, and have its settings' keys.
    """
    assert re.fullmatch(r"[a-z][a-z0-9_]*", rule.name), f"{rule.name!r} is no name for an optimizer"
    before = RULES.get(rule.name)
    assert before is None or before.__module__.partition(".")[0] != __name__.partition(".")[0], (
        f"there is an optimizer {rule.name} already"
    )
    own = rule.settings_type.model_fields
    for other in RULES.values():
        for key, field in {} if other is before else other.settings_type.model_fields.items():
            same = key not in own or _meaning(own[key]) == _meaning(field)
            assert same, (
                f"{rule.name} and {other.name} both have a setting called {key}, of another type or default"
            )
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
