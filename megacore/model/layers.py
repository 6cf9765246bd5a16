"""What a layer declares: the tensors that it takes and hands on, its losses, and the
fields of the batch that it needs.

A model is a list of layers, and a pipeline may cut it between any two. What crosses a cut is what later
layers read, and follows from
these declarations alone: each rank knows it of every cut, and the planner without a device.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from megacore.config import Config
from megacore.distributed.buffers import SAVED_STATE, unsaved_state
from megacore.distributed.topology import Topology, alone
from megacore.model.batch import FieldSource
from megacore.model.flow import HIDDEN, Flow, Loss
from megacore.records import FIGURES

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


class Layer(nn.Module):
    """A layer of a model; a subclass declares what it is between.

    `forward` takes the tensors that it `reads`, in that order, and the `Context`, which has the batch. It
    returns those that it `writes`, and behind them a sum for each of its `losses`; a tuple, if they are
    several.
    A layer that writes nothing runs only where there are targets: not when text is generated.

    `launch/verify.py` checks gradients against differences of the loss, and training against evaluation. A
    layer, or any module in it, declares what differs on purpose: a gradient that is not the derivative of
    what forward computes (straight-through, quantised, detached), and another result in training than in
    evaluation, dropout aside (statistics of the batch).
    """

    reads: ClassVar[tuple[str, ...]] = ("hidden",)
    writes: ClassVar[Mapping[str, Flow]] = {"hidden": HIDDEN}
    losses: ClassVar[tuple[Loss, ...]] = ()
    fields: ClassVar[Mapping[str, FieldSource]] = {}  # of the batch, besides those that every batch has
    bare: ClassVar[bool] = False  # its parameters are named without the layer's name
    surrogate_gradient: ClassVar[bool] = False
    differs_in_training: ClassVar[bool] = False
    layer_name: str = ""  # in the list of layers, for messages; set where the layer is built

    @classmethod
    def shares(cls, *arguments: Any, **_: Any) -> Mapping[str, str]:
        """Which of its parameters are other layers': by its own name for one, the name that this has in the
        model. It makes them as the other layer does; both are then one. `arguments`: those of the
        constructor, up to the config.
        """
        return {}


@dataclass(frozen=True)
class LayerSpec:
    """A layer of the list, before somebody builds it: its name, its class, and what that
    takes before what all layers take.

    The class declares what `Layer` says; one without a declaration has that of `Layer`: hidden states in,
    hidden states out.
    """

    name: str
    kind: Callable[..., Any]
    arguments: tuple[Any, ...] = ()

    def declared(self, what: str) -> Any:
        """What the class declares: `reads`, `writes`, `losses`, `fields` or `bare`."""
        return getattr(self.kind, what, getattr(Layer, what))

    def shares(self, config: Config) -> Mapping[str, str]:
        """See `Layer.shares`."""
        shared: Mapping[str, str] = self.declared("shares")(*self.arguments, config)
        return shared

    def parameter_names(self, config: Config) -> set[str]:
        """Return the names, in the whole model, of the parameters that this layer makes for itself.

        Those that it shares with another layer are that layer's. The layer is built without content, which
        takes less than a millisecond: only its constructor knows what it makes.
        """
        layer = self.build(config, alone(config), DTYPES[config.train.precision], torch.device("meta"))
        names = {name for name, _ in layer.named_parameters()} - self.shares(config).keys()
        return names if self.declared("bare") else {f"{self.name}.{name}" for name in names}

    def build(self, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device) -> Any:
        """The layer, with this rank's part of its parameters."""
        layer = self.kind(*self.arguments, config, mesh, dtype, device)
        if not isinstance(layer, nn.Module):
            raise TypeError(f"{type(layer).__name__} is no torch.nn.Module")
        declarations = {what: self.declared(what) for what in ("reads", "writes", "losses")}
        for name, value in (declarations | {"layer_name": self.name}).items():
            setattr(layer, name, value)
        if unsaved := unsaved_state(layer):
            raise ValueError(f"{self.name} has {unsaved[0]}, which no checkpoint saves: {SAVED_STATE}")
        if missing := self.shares(config).keys() - dict(layer.named_parameters()).keys():
            raise ValueError(f"{self.name} shares its {min(missing)}, and has no such parameter")
        return layer


Layers = Sequence[LayerSpec]


def crossing(layers: Layers, cut: int) -> dict[str, Flow]:
    """What crosses a cut before layer number `cut`, by name, always in the same order: what a layer behind it
    reads and one before it has written. Raises `ValueError` if none has.
    """
    declared: dict[str, Flow] = {}
    for spec in layers[:cut]:
        declared |= spec.declared("writes")
    read: dict[str, str] = {}  # by which layer
    for spec in reversed(layers[cut:]):
        passed = {name: reader for name, reader in read.items() if name not in spec.declared("writes")}
        read = passed | dict.fromkeys(spec.declared("reads"), spec.name)
    for name, reader in read.items():
        if name not in declared:
            raise ValueError(f"layer {reader} reads {name}, which no layer before it writes")
    return {name: flow for name, flow in declared.items() if name in read}


def losses_of(layers: Layers) -> dict[str, Loss]:
    """The losses of a model, by name, in the order of its layers."""
    return {loss.name: loss for spec in layers for loss in spec.declared("losses")}


def fields_of(layers: Layers) -> dict[str, FieldSource]:
    """The fields of the batch that a model's layers need, besides those that every batch has."""
    return {name: source for spec in layers for name, source in spec.declared("fields").items()}


def sharing(layers: Layers, config: Config) -> dict[str, tuple[int, ...]]:
    """Return which layers use a parameter together, by its name: the one that makes it, its owner, and those
    that share it.

    Raises `ValueError` if no layer makes it, or several do.
    """
    users: dict[str, set[int]] = defaultdict(set)
    for number, spec in enumerate(layers):
        for name in spec.shares(config).values():
            users[name].add(number)

    # A bare layer may make any name, and others make those that begin with their own. No others are built.
    parameter_names = {
        number: spec.parameter_names(config)
        for number, spec in enumerate(layers)
        if any(spec.declared("bare") or name.startswith(f"{spec.name}.") for name in users)
    }
    for name, numbers in users.items():
        owners = [number for number, names in parameter_names.items() if name in names]
        if len(owners) != 1:
            makers = " and ".join(layers[number].name for number in owners)
            wrong = f"which {makers} make" if makers else "which no layer makes for itself"
            raise ValueError(
                f"{layers[min(numbers)].name} shares {name}, {wrong}: share a parameter that exactly one "
                "layer makes and does not share, by its full name"
            )
        numbers.update(owners)
    return {name: tuple(sorted(numbers)) for name, numbers in users.items()}


def check(layers: Layers) -> None:
    """Raises `ValueError` if declarations of a model's layers do not fit together."""
    crossing(layers, 0)
    for what, pairs in (
        ("tensor", [(name, flow) for spec in layers for name, flow in spec.declared("writes").items()]),
        ("loss", [(loss.name, loss) for spec in layers for loss in spec.declared("losses")]),
    ):
        known: dict[str, object] = {}
        for name, declared in pairs:
            if known.setdefault(name, declared) != declared:
                raise ValueError(f"two layers declare the {what} {name} differently")
    losses, fields = losses_of(layers), fields_of(layers)
    if not losses:
        raise ValueError("no layer gives a loss")
    for loss in losses.values():
        if loss.over not in ("tokens", "targets", *fields):
            raise ValueError(
                f"the loss {loss.name} is over {loss.over}, a field of the batch that no layer declares"
            )
        if loss.name in FIGURES:
            raise ValueError(
                f"a loss is called {loss.name}, as a figure of every record is: give it another name"
            )
    names = Counter(spec.name for spec in layers)
    if twice := sorted(name for name, count in names.items() if count > 1):
        raise ValueError(f"two layers are named {twice[0]}")
    for name in names:  # a module within another's would take the place of a part of it
        if outer := next((other for other in names if name.startswith(f"{other}.")), None):
            raise ValueError(f"the layer {name} has a name within that of the layer {outer}")
