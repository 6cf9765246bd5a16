"""What a model's layers send from stage to stage, and how many losses they have."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from math import prod

from megacore.config.precision import ELEMENT_BYTES
from megacore.config.schema import Config
from megacore.model.flow import HIDDEN, Flow
from megacore.pipeline.partition import layer_ranges


@dataclass(frozen=True)
class ModelFlow:
    """What a model's layers declare, as predictions need it. By default a GPT's: hidden states cross
    every cut, and there is one loss, of the targets."""

    cuts: tuple[Mapping[str, Flow], ...] = ()  # what crosses the cut behind each stage
    over: tuple[str, ...] = ("targets",)  # what each loss is the mean of
    makes_targets: bool = False  # so that some are not learned

    def crossing(self, boundary: int, *, gradients: bool = False) -> list[Flow]:
        """What a message between stages `boundary` and ``boundary + 1`` brings, or
        the gradients of what it brought.
        """
        flows = self.cuts[boundary].values() if self.cuts else (HIDDEN,)
        return [flow for flow in flows if flow.gradient or not gradients]

    def message_bytes(self, config: Config, boundary: int) -> int:
        """The bytes of a microbatch's message across a cut."""
        return sum(
            prod(flow.shape(config)) * ELEMENT_BYTES[flow.precision(config)]
            for flow in self.crossing(boundary)
        )


def flow_of(config: Config) -> ModelFlow:
    """What crosses the cuts of a config's pipeline, and how many losses there are."""
    if not config.model.is_custom and config.model.num_experts is None:  # known without torch
        return ModelFlow() if config.model.z_loss is None else ModelFlow(over=("targets", "targets"))
    choose, declared = import_module("megacore.model.choose"), import_module("megacore.model.layers")
    layers = choose.layers_of(config)
    ends = [own.stop for own in layer_ranges(config)[:-1]]
    over = tuple(loss.over for loss in declared.losses_of(layers).values())
    return ModelFlow(
        tuple(declared.crossing(layers, end) for end in ends), over, "targets" in declared.fields_of(layers)
    )
