"""Lists every parameter of a model from its config: its shape, and how the tensor ranks hold it.

The layers state the same when they are built, and a test compares both, name by name. The planner counts from this list what a rank
holds, reduces and saves.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from megacore.config.schema import Config, resolved
from megacore.pipeline.partition import placement_of, settled, stage_layers


@dataclass(frozen=True)
class Parameter:
    """A logical tensor. The tensor ranks split its `dim`; without one each holds it whole, and if `partial` each has only a part of
    its gradient."""

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    partial: bool = False

    def local(self, tensor: int, rank: int = 0) -> int:
        """Elements on a rank of `tensor`, the first of which are the fullest: pieces of ``ceil(size / tensor)``."""

        def piece(size: int) -> int:
            each = -(-size // tensor)
            return min((rank + 1) * each, size) - min(rank * each, size)

        return prod(piece(size) if dim == self.dim else size for dim, size in enumerate(self.shape))

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices, not to biases and norms."""
        return self.name == "position" or (self.name.endswith(".weight") and "norm" not in self.name)


def block_list(config: Config) -> list[Parameter]:
    """The parameters of one transformer block: attention, feed-forward and two norms."""
    model, h, f = config.model, config.model.hidden_size, resolved(config.model.ffn_size)
    sequence = config.parallel.sequence
    heads = (config.kv_heads, model.num_heads // config.kv_heads + 2, config.head_size)
    up, up_dim = ((2, f), 1) if model.activation == "swiglu" else ((f,), 0)
    norms = ("query", "key") if model.qk_norm else ()  # of each head; a rank applies them to its own heads
    return [
        *norm_list(config, "norm1"),
        Parameter("attention.qkv.weight", (*heads, h), 0),
        *([Parameter("attention.qkv.bias", heads, 0)] if model.qkv_bias else []),
        Parameter("attention.output.weight", (h, model.num_heads * config.head_size), 1),
        *([Parameter("attention.output.bias", (h,), partial=sequence)] if model.bias else []),
        *(Parameter(f"attention.{name}_norm.weight", (config.head_size,), partial=True) for name in norms),
        *norm_list(config, "norm2"),
        Parameter("feed_forward.up.weight", (*up, h), up_dim),
        *([Parameter("feed_forward.up.bias", up, up_dim)] if model.bias else []),
        Parameter("feed_forward.down.weight", (h, f), 1),
        *([Parameter("feed_forward.down.bias", (h,), partial=sequence)] if model.bias else []),
    ]


def norm_list(config: Config, name: str) -> list[Parameter]:
    """One norm: a weight, and a bias where layernorms have one."""
    has_bias = config.model.norm == "layernorm" and config.model.bias
    names = ("weight", "bias") if has_bias else ("weight",)
    return [Parameter(f"{name}.{part}", (config.model.hidden_size,), partial=config.parallel.sequence) for part in names]


def ends_list(config: Config, stage: int) -> list[Parameter]:
    """A stage's parameters outside its blocks: embeddings and positions, final norm and head, its copy of tied embeddings."""
    model, last = config.model, config.parallel.pipeline * settled(config).chunks - 1
    vocabulary = (model.vocab_size, model.hidden_size)
    found = []
    if stage == 0 and model.position == "learned":
        found.append(Parameter("position", (config.max_positions, model.hidden_size), partial=config.parallel.sequence))
    if stage == 0:
        found.append(Parameter("embedding.weight", vocabulary, 0))
    if stage == last:
        found += norm_list(config, "norm")
        if not (stage == 0 and model.tie_embeddings):
            found.append(Parameter("embedding.weight" if model.tie_embeddings else "head.weight", vocabulary, 0))
    return found


def stage_list(config: Config, stage: int) -> list[Parameter]:
    """A stage's parameters under their full names, in the order in which it registers them."""
    ends, block, layers = ends_list(config, stage), block_list(config), stage_layers(config)[stage]
    before = [parameter for parameter in ends if stage == 0 and parameter.name in ("position", "embedding.weight")]
    blocks = [replace(parameter, name=f"blocks.{layer}.{parameter.name}") for layer in layers for parameter in block]
    return [*before, *blocks, *(parameter for parameter in ends if parameter not in before)]


@dataclass(frozen=True)
class Held:
    """The parameters of a rank of the pipeline: those of `blocks` blocks, and others."""

    blocks: int
    block: list[Parameter]
    ends: list[Parameter]

    def elements(self, tensor: int) -> int:
        """Numbers on the fullest of `tensor` ranks."""
        return self.blocks * elements(self.block, tensor) + elements(self.ends, tensor)

    def partial(self) -> int:
        """Of them, those whose gradients are summed over the tensor ranks."""
        return self.blocks * elements(p for p in self.block if p.partial) + elements(p for p in self.ends if p.partial)


def held_by(config: Config) -> list[Held]:
    """The parameters of each rank of the pipeline. A parameter that two of its stages share counts once."""
    layers, block = stage_layers(config), block_list(config)
    return [
        Held(
            sum(len(layers[stage]) for stage in stages),
            block,
            list({p.name: p for stage in stages for p in ends_list(config, stage)}.values()),
        )
        for stages in placement_of(config)
    ]


def elements(parameters: Iterable[Parameter], tensor: int = 1) -> int:
    """The number of elements on the fullest of `tensor` ranks."""
    return sum(parameter.local(tensor) for parameter in parameters)


def block_parameters(config: Config, tensor: int = 1) -> int:
    """Parameters of one transformer block on the fullest of `tensor` ranks."""
    return elements(block_list(config), tensor)


def parameters(config: Config) -> int:
    """The number of logical parameters of the whole model. A tied LM head is the embedding, and counts once."""
    last = config.parallel.pipeline * settled(config).chunks - 1
    ends = {p.name: p for stage in (0, last) for p in ends_list(config, stage)}
    return config.model.num_layers * block_parameters(config) + elements(ends.values())


def rank_parameters(config: Config) -> list[int]:
    """Parameters that each rank of the pipeline holds, on the fullest of its tensor ranks."""
    return [held.elements(config.parallel.tensor) for held in held_by(config)]
