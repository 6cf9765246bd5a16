"""The parameters of a model as its layers state them. The layers are built on `meta`, for any rank; those that are alike are built once."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megacore.config.schema import Config
from megacore.pipeline.partition import layer_ranges, placement_of

if TYPE_CHECKING:
    from torch import nn

_BUILT: dict[Hashable, list["Parameter"]] = {}


@dataclass(frozen=True)
class Parameter:
    """A tensor of one of the tensor ranks, without content."""

    name: str
    tensor: "nn.Parameter"
    shape: tuple[int, ...]  # of the logical tensor
    elements: int
    rows: int  # that FSDP2 divides
    partial: bool  # tensor ranks sum its gradient

    def named(self, name: str) -> "Parameter":
        """The same of another layer."""
        return Parameter(name, self.tensor, self.shape, self.elements, self.rows, self.partial)


@dataclass(frozen=True)
class StageParameters:
    """The parameters of a stage in the order in which it registers them: before its blocks, of each block, and behind them."""

    before: list[Parameter]
    blocks: list[list[Parameter]]
    behind: list[Parameter]

    @property
    def ends(self) -> list[Parameter]:
        """Those outside of its blocks. What both ends share is one parameter."""
        return list({p.name: p for p in (*self.before, *self.behind)}.values())

    @property
    def all(self) -> list[Parameter]:
        """All of them, likewise."""
        every = (*self.before, *(parameter for block in self.blocks for parameter in block), *self.behind)
        return list({p.name: p for p in every}.values())


def stage_parameters(config: Config, stage: int, tensor_rank: int = 0) -> StageParameters:
    """A stage's parameters under their full names."""
    own, last = layer_ranges(config)[stage], config.model.num_layers + 1
    found = {layer: _layer(config, layer, tensor_rank) for layer in own}
    blocks = [parameters for layer, parameters in found.items() if 0 < layer < last]
    return StageParameters(found.get(0, []), blocks, found.get(last, []))


def _layer(config: Config, layer: int, tensor_rank: int) -> list[Parameter]:
    """The parameters of a layer, by its number in the model's list."""
    # Between the ends megacore's own layers differ in their names alone; those of the user's own may differ in all.
    alike = 1 if 0 < layer <= config.model.num_layers and config.model.source is None else layer
    parallel = config.parallel
    key = config.model, parallel.tensor, parallel.sequence, config.max_positions, config.train.precision, alike, tensor_rank
    if key not in _BUILT:
        from megacore.tools.planner.on_meta import logical_shape, stage_of, summed_over_tensor_ranks

        _BUILT[key] = [
            Parameter(name, tensor, logical_shape(tensor), tensor.numel(), tensor.shape[0], summed_over_tensor_ranks(tensor))
            for name, tensor in stage_of(config, range(alike, alike + 1), tensor_rank).named_parameters()
        ]
    if alike == layer:
        return _BUILT[key]
    return [parameter.named(parameter.name.replace(f".{alike - 1}.", f".{layer - 1}.", 1)) for parameter in _BUILT[key]]


@dataclass(frozen=True)
class Held:
    """The parameters of a rank of the pipeline: those of `blocks` blocks, and all."""

    blocks: int
    all: list[Parameter]


def held_by(config: Config, tensor_rank: int = 0) -> list[Held]:
    """The parameters of each rank of the pipeline. A parameter that two of its stages share counts once."""
    found = []
    for stages in placement_of(config):
        own = [stage_parameters(config, stage, tensor_rank) for stage in stages]
        found.append(Held(sum(len(stage.blocks) for stage in own), list({p.name: p for stage in own for p in stage.all}.values())))
    return found


def elements(parameters: Iterable[Parameter]) -> int:
    """The number of elements on a rank."""
    return sum(parameter.elements for parameter in parameters)


def block_parameters(config: Config) -> int:
    """Parameters of the largest transformer block on the fullest tensor rank."""
    return max(elements(block) for stage in range(len(layer_ranges(config))) for block in stage_parameters(config, stage).blocks)


def parameters(config: Config) -> int:
    """The number of logical parameters of the whole model. A tied LM head is the embedding, and counts once."""
    alone = {"tensor": 1, "pipeline": 1, "context": 1, "data": 1, "sequence": False, "schedule": "1f1b", "chunks": 1}
    return elements(stage_parameters(config.model_copy(update={"parallel": config.parallel.model_copy(update=alone)}), 0).all)


def rank_parameters(config: Config) -> list[int]:
    """Parameters that each rank of the pipeline holds, on the fullest of its tensor ranks."""
    return [elements(held.all) for held in held_by(config)]
