"""The GPT as a list of layers.

Kinds may differ from layer to layer; a pipeline cuts the list wherever it is cheapest.
"""

from collections.abc import Callable
from typing import Any

from megacore.config import Config
from megacore.model.arranged import ArrangedBlock
from megacore.model.block import Block
from megacore.model.embedding import Embedding
from megacore.model.expert_block import expert_block
from megacore.model.layers import Layers, LayerSpec
from megacore.model.z_loss import head_of

BLOCKS: dict[str, Callable[..., Any]] = {"gpt": Block}  # by `model.block`


def gpt(config: Config, block: Callable[..., Any] | None = None) -> Layers:
    """Embedding, blocks (of a class, or the config's kind; those with experts are
    `ExpertBlock`s), and head with the loss.
    """
    if block is not None and config.model.num_experts is not None:
        raise ValueError("the file's Block is that of all blocks, and model.num_experts asks for others")
    block, with_experts = (
        block or (ArrangedBlock if config.model.arranged else BLOCKS[config.model.block]),
        expert_block(config),
    )
    kinds = (with_experts if config.model.has_experts(i) else block for i in range(config.model.num_layers))
    blocks = [LayerSpec(f"blocks.{i}", kind, (i,)) for i, kind in enumerate(kinds)]
    return [LayerSpec("embedding", Embedding), *blocks, LayerSpec("head", head_of(config))]
