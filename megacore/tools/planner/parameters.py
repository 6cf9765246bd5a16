"""The parameters of a model as its layers state them.

The layers are built on `meta`, for any rank; those that are alike are built once.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from megacore.config.schema import Config
from megacore.pipeline.partition import layer_ranges, placement_of
from megacore.tools.choices.partition import partitioned

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")

_BUILT: dict[Hashable, list["Parameter"]] = {}
_MEASURED: dict[Hashable, Any] = {}  # of ranks, see `of_each_rank`


@dataclass(frozen=True)
class Parameter:
    """A tensor of one of the tensor ranks, without content."""

    name: str
    tensor: "nn.Parameter"
    shape: tuple[int, ...]  # of the logical tensor
    elements: int
    rows: int  # that FSDP2 divides
    partial: tuple[str, ...]  # the axes of ranks with the same tokens, over which its gradient is summed
    frozen: bool  # it has none
    tokens: tuple[str, ...]  # the axes of ranks with other tokens, over which it is summed

    def named(self, name: str) -> "Parameter":
        """The same of another layer."""
        return replace(self, name=name)


@dataclass(frozen=True)
class StageParameters:
    """The parameters of a stage in the order in which it registers them: before its blocks,
    of each block, and behind them.
    """

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
    own, last = layer_ranges(partitioned(config))[stage], config.model.num_layers + 1
    found = {layer: _layer(config, layer, tensor_rank) for layer in own}
    blocks = [parameters for layer, parameters in found.items() if 0 < layer < last]
    return StageParameters(found.get(0, []), blocks, found.get(last, []))


def _layer(config: Config, layer: int, tensor_rank: int) -> list[Parameter]:
    """The parameters of a layer, by its number in the model's list."""
    inner = not config.model.is_custom and 0 < layer <= config.model.num_layers
    alike = (
        1 + config.model.alike(layer - 1) if inner and not _is_alike(config, layer) else 1 if inner else layer
    )
    parallel = config.parallel
    experts = parallel.expert, parallel.expert_tensor
    key = (
        config.model,
        parallel.tensor,
        experts,
        parallel.sequence,
        config.max_positions,
        config.train.precision,
        alike,
        tensor_rank,
    )
    if key not in _BUILT:
        from megacore.tools.planner.on_meta import logical_shape, partial_over, stage_of, tokens_of

        _BUILT[key] = [
            Parameter(
                name,
                tensor,
                logical_shape(tensor),
                tensor.numel(),
                tensor.shape[0],
                partial_over(tensor),
                not tensor.requires_grad,
                tokens_of(config, tensor),
            )
            for name, tensor in stage_of(config, range(alike, alike + 1), tensor_rank).named_parameters()
        ]
    if alike == layer:
        return _BUILT[key]
    return [
        parameter.named(parameter.name.replace(f".{alike - 1}.", f".{layer - 1}.", 1))
        for parameter in _BUILT[key]
    ]


def _is_alike(config: Config, layer: int) -> bool:
    """Whether a layer is one of those that differ in their names alone: megacore's own between the ends; the
    user's own may differ in all, and some have experts.
    """
    return (
        0 < layer <= config.model.num_layers
        and not config.model.is_custom
        and config.model.num_experts is None
    )


def of_each_rank(config: Config, measure: Callable[[int], T], *key: Hashable) -> list[T]:
    """`measure` of each rank of the pipeline, which must not depend on names.

    It is asked once for ranks with the same ends and equally many layers, where layers are alike, and
    parameters' names choose no optimizer.

    With a `key`, its name and what it depends on besides a rank's layers, it is asked once for all layouts in
    which these are the same.
    """
    config = partitioned(config)
    ranges, placement, last = layer_ranges(config), placement_of(config), config.model.num_layers + 1
    differ = config.model.is_custom or config.model.num_experts is not None or bool(config.optim.groups)
    found: dict[Hashable, T] = {}
    if key:
        parallel, divided = config.parallel, (tuple(ranges), placement) if differ else None
        ranks = parallel.tensor, parallel.expert, parallel.expert_tensor
        kept = (
            key,
            config.model,
            ranks,
            parallel.sequence,
            parallel.pipeline > 1,
            config.max_positions,
            divided,
        )
        found = _MEASURED.setdefault((*kept, config.train.precision), {})
    kinds: list[Hashable] = []
    for rank, stages in enumerate(placement):
        own = (ranges[stage] for stage in stages)
        kinds.append(
            rank if differ else tuple((layers.start == 0, len(layers), layers.stop > last) for layers in own)
        )
        if kinds[-1] not in found:
            found[kinds[-1]] = measure(rank)
    return [found[kind] for kind in kinds]


@dataclass(frozen=True)
class Held:
    """What a rank of the pipeline holds: blocks, and elements in all."""

    blocks: int
    elements: int
    frozen: int  # of these, without gradients and state


def held_by(config: Config, tensor_rank: int = 0) -> list[Held]:
    """What each rank of the pipeline holds."""
    ranges, placement = layer_ranges(partitioned(config)), placement_of(partitioned(config))
    return of_each_rank(
        config,
        lambda rank: _held(config, [ranges[stage] for stage in placement[rank]], tensor_rank),
        "held",
        tensor_rank,
    )


def _held(config: Config, ranges: Iterable[range], tensor_rank: int = 0) -> Held:
    """What stages with these layers hold on one rank. A parameter that two of them share counts once."""
    layers = [layer for own in ranges for layer in own]
    alike = sum(_is_alike(config, layer) for layer in layers)
    others = {
        p.name: p
        for layer in layers
        if not _is_alike(config, layer)
        for p in _layer(config, layer, tensor_rank)
    }
    frozen = elements(p for p in others.values() if p.frozen)
    of_alike = alike * elements(_layer(config, 1, tensor_rank)) if alike else 0
    blocks = sum(0 < layer <= config.model.num_layers for layer in layers)
    return Held(blocks, of_alike + elements(others.values()), frozen)


def elements(parameters: Iterable[Parameter]) -> int:
    """The number of elements on a rank."""
    return sum(parameter.elements for parameter in parameters)


def block_parameters(config: Config) -> int:
    """Parameters of the largest transformer block on the fullest tensor rank."""
    blocks = range(1, 2 if _is_alike(config, 1) else config.model.num_layers + 1)
    return max(elements(_layer(config, layer, 0)) for layer in blocks)


def parameters(config: Config) -> int:
    """The number of logical parameters of the whole model.

    A tied LM head is the embedding, and counts once.
    """
    alone: dict[str, Any] = {"expert": 1, "expert_tensor": None}
    alone |= {
        "tensor": 1,
        "pipeline": 1,
        "context": 1,
        "data": 1,
        "sequence": False,
        "schedule": "1f1b",
        "chunks": 1,
    }
    whole = config.model_copy(update={"parallel": config.parallel.model_copy(update=alone)})
    return _held(whole, [range(config.model.num_layers + 2)]).elements


def rank_parameters(config: Config) -> list[int]:
    """Parameters that each rank of the pipeline holds, on the fullest of its tensor ranks."""
    return [held.elements for held in held_by(config)]
