"""The GPT as a list of layers. Kinds may differ from layer to layer; a pipeline cuts the list wherever it is cheapest."""

from collections.abc import Callable
from typing import Any

from megacore.config import Config
from megacore.model.arranged import ArrangedBlock
from megacore.model.block import Block
from megacore.model.embedding import Embedding
from megacore.model.layers import Layers, LayerSpec
from megacore.model.z_loss import head_of

BLOCKS: dict[str, Callable[..., Any]] = {"gpt": Block}  # by `model.block`


def gpt(config: Config, block: Callable[..., Any] | None = None) -> Layers:
    """Embedding, blocks (of a class, or the config's kind), and head with the loss."""
    block = block or (ArrangedBlock if config.model.arranged else BLOCKS[config.model.block])
    blocks = [LayerSpec(f"blocks.{i}", block, (i,)) for i in range(config.model.num_layers)]
    return [LayerSpec("embedding", Embedding), *blocks, LayerSpec("head", head_of(config))]
