"""A user's own file (`model.source`) whose `model.sharing` says which layer makes what another one shares."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from megacore.config import Config
from megacore.config.schema import ModelConfig
from megacore.distributed.topology import Topology
from megacore.model.block import Block
from megacore.model.context import Context
from megacore.model.embedding import Embedding
from megacore.model.flow import Loss
from megacore.model.gpt import gpt
from megacore.model.head import Head
from megacore.model.layers import Layers, LayerSpec
from megacore.model.norm import Norm

HEAD = {"exit.norm.weight": "norm.weight", "exit.norm.bias": "norm.bias", "exit.head.bias": "head.bias"}
EMBEDDING = {"exit.head.weight": "embedding.weight"}
KINDS = ("weight", "bias")


class Settings(ModelConfig):
    sharing: Literal["head", "untied head", "layer called norm", "first", "middle", "two make it"] = "head"


class Exit(Block):
    """A block with a loss of its own, by the head's parameters."""

    losses = (Loss("exit", coefficient=0.5, over="targets", sp=False),)

    def __init__(
        self, index: int, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(index, config, mesh, dtype, device)
        self.exit = Head(config, mesh, dtype, device)

    @classmethod
    def shares(cls, index: int, config: Config) -> Mapping[str, str]:
        """See `Layer`."""
        return HEAD | (EMBEDDING if config.model.tie_embeddings else {"exit.head.weight": "head.weight"})

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """``[tokens, hidden]`` → the same, and the loss of this block's output."""
        x = super().forward(x, context)
        targets = context.batch.targets
        return x, x.new_zeros(()) if targets is None else self.exit.loss(x, targets)


class NormedEmbedding(Embedding):
    """A first layer that makes a norm of the same name as the head's."""

    def __init__(self, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, mesh, dtype, device)
        self.norm = Norm(config.model, mesh.tp, config.parallel.sequence, dtype, device)

    def forward(self, context: Context) -> Tensor:
        """→ ``[tokens, hidden]``."""
        return self.norm(super().forward(context))


class HeadOfFirst(Head):
    @classmethod
    def shares(cls, config: Config) -> Mapping[str, str]:
        """See `Layer`."""
        return {**super().shares(config), **{f"norm.{kind}": f"norm.{kind}" for kind in KINDS}}


class HeadOfMiddle(Head):
    @classmethod
    def shares(cls, config: Config) -> Mapping[str, str]:
        """See `Layer`."""
        return {**super().shares(config), **{f"norm.{kind}": f"blocks.1.norm1.{kind}" for kind in KINDS}}


class BlockOfMiddle(Block):
    @classmethod
    def shares(cls, *_: Any) -> Mapping[str, str]:
        """See `Layer`."""
        return {f"norm1.{kind}": f"blocks.1.norm1.{kind}" for kind in KINDS}


class BlockOfNorm(Block):
    @classmethod
    def shares(cls, *_: Any) -> Mapping[str, str]:
        """See `Layer`."""
        return {f"norm1.{kind}": f"norm.{kind}" for kind in KINDS}


def layers(config: Config) -> Layers:
    """A GPT's, with some layers replaced."""
    first, *blocks, last = gpt(config)
    match config.model.sharing:  # type: ignore[attr-defined]
        case "head" | "untied head":
            blocks[1] = LayerSpec("blocks.1", Exit, (1,))
        case "layer called norm":  # and the head's norm is no parameter of this layer
            blocks[0] = LayerSpec("blocks.0", BlockOfNorm, (0,))
            blocks[1] = LayerSpec("norm", Block, (1,))
        case "first":
            first, last = LayerSpec("embedding", NormedEmbedding), LayerSpec("head", HeadOfFirst)
        case "middle":
            blocks[0], last = LayerSpec("blocks.0", BlockOfMiddle, (0,)), LayerSpec("head", HeadOfMiddle)
        case "two make it":
            first, blocks[0] = (
                LayerSpec("embedding", NormedEmbedding),
                LayerSpec("blocks.0", BlockOfNorm, (0,)),
            )
    return [first, *blocks, last]
