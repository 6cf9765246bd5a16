"""A GPT that also learns tokens behind the next one (Gloeckle et al. 2024; DeepSeek-V3 2024), for
the loss and for quicker writing.

`model.ahead_kind=heads`: a block and a norm of its own for each of `model.ahead` tokens, side by side on the
last hidden states.
`module`: one block, which is also told the next token, and learns the one behind it. All share the LM head.
No target lies in another document. `speculate.py` beside this file writes text with what was learned.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from megacore.config import Config
from megacore.config.model import ModelConfig
from megacore.config.schema import IGNORED
from megacore.distributed.shard import Shard, new_parameter, replicated
from megacore.distributed.topology import Topology
from megacore.model.batch import Samples
from megacore.model.block import Block
from megacore.model.context import Context
from megacore.model.embedding import vocabulary
from megacore.model.flow import Loss
from megacore.model.gpt import gpt
from megacore.model.head import Head
from megacore.model.layers import Layers, LayerSpec
from megacore.model.norm import Norm
from megacore.section import Count, Factor


class Settings(ModelConfig):
    ahead: Count = Field(
        1,
        description="number of tokens after the next one that are predicted too; their layers count in "
        "`num_layers`",
    )
    ahead_kind: Literal["heads", "module"] = Field(
        "module",
        description="heads: one extra block and norm per token; module: one extra block that reads the next "
        "token's embedding (DeepSeek-V3)",
    )
    ahead_weight: Factor = Field(0.3, description="coefficient of the mean loss of the extra predictions")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.ahead_kind == "module" and self.ahead > 1:
            raise ValueError(
                "model.ahead is more than 1 with one module (right: 1, or model.ahead_kind=heads)"
            )
        if self.ahead >= self.num_layers:
            raise ValueError(
                f"model.num_layers={self.num_layers} leaves no block besides {self.ahead} ahead (right: more)"
            )
        return self


def token_ahead(count: int, samples: Samples) -> np.ndarray:
    """The token `count` behind the next one, `IGNORED` at a sample's end and where a
    document ends before it.
    """
    found = np.full_like(samples.targets, IGNORED)
    found[:, :-count] = samples.targets[:, count:]
    for row, bounds in enumerate(samples.documents or ()):
        for end in bounds[1:]:
            found[row, max(0, end - count) : end] = IGNORED
    return found


def next_token(samples: Samples) -> np.ndarray:
    """The token behind each, which targets may hide; at a sample's end any, for nothing is learned there."""
    return np.concatenate((samples.tokens[:, 1:], samples.tokens[:, -1:]), 1)


class Ahead(Head):
    """A block of its own, and the LM head: the loss of the token `count` behind the next one."""

    bare, count = False, 1

    def __init__(
        self, index: int, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(config, mesh, dtype, device)
        self.block = Block(index, config, mesh, dtype, device)

    @classmethod
    def shares(cls, index: int, config: Config) -> Mapping[str, str]:  # type: ignore[override]
        """See `Layer`."""
        return {"head.weight": "embedding.weight" if config.model.tie_embeddings else "head.weight"}

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """``[tokens, hidden]`` → the sum of the losses."""
        (loss,), batch = self.losses, context.batch
        x = self.guess(x, batch.get("next_token"), context)
        return self.loss(x, batch[loss.over], context.gradients.get(loss.name))

    def guess(self, x: Tensor, following: Tensor | None, context: Context) -> Tensor:
        """``[tokens, hidden]`` → the hidden states of a token further."""
        return self.block(x, context)


class Told(Ahead):
    """The same, told the next token: its vector and the hidden states, both normed, are mixed by a matrix."""

    def __init__(
        self, index: int, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(index, config, mesh, dtype, device)
        size, sequence = config.model.hidden_size, config.parallel.sequence
        self.norms = torch.nn.ModuleList(
            Norm(config.model, mesh.tp, sequence, dtype, device) for _ in range(2)
        )
        self.embedding = vocabulary(config, mesh, dtype, device)
        mix = Shard(
            (size, 2 * size),
            (replicated(mesh.tp, partial=sequence),),
            decay=True,
            init_std=config.model.init_std,
        )
        self.mix = new_parameter(mix, dtype, device)

    @classmethod
    def shares(cls, index: int, config: Config) -> Mapping[str, str]:  # type: ignore[override]
        """See `Layer`."""
        return {**super().shares(index, config), "embedding.weight": "embedding.weight"}

    def guess(self, x: Tensor, following: Tensor | None, context: Context) -> Tensor:
        """See `Ahead`."""
        assert following is not None
        both = [
            norm(part)
            for norm, part in zip(self.norms, (x, self.embedding(following.flatten())), strict=True)
        ]
        return self.block(torch.cat(both, 1) @ self.mix.T, context)


def layers(config: Config) -> Layers:
    """A GPT's, and a layer for each token ahead before its head."""
    model: Any = config.model
    usual, found = gpt(config), []
    for count in range(1, model.ahead + 1):
        loss = Loss(
            f"ahead_{count}", over=f"ahead_{count}", coefficient=model.ahead_weight / model.ahead, sp=False
        )
        fields = {loss.over: partial(token_ahead, count)} | (
            {"next_token": next_token} if model.ahead_kind == "module" else {}
        )
        kind = type(
            "Ahead",
            (Told if model.ahead_kind == "module" else Ahead,),
            {"losses": (loss,), "fields": fields, "count": count},
        )
        found.append(LayerSpec(f"ahead.{count}", kind, (model.num_layers - model.ahead + count - 1,)))
    return [*usual[: -1 - model.ahead], *found, usual[-1]]
