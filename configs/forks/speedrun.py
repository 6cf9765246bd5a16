"""A GPT as speedruns train it, in every layout: what modded-nanogpt and nanochat
add to GPT-2, in plain layers.

Blocks add the embedding back with a learned scale; late ones also add what their mirror image among the early
ones handed on (Ronneberger et al. 2015, U-Net); the outer ones mix vectors of the tokens into attention's
values (Zhou et al. 2024, value residuals); most see a window only. Queries and keys are normed; the
feed-forward layer squares a ReLU (So et al. 2021); output projections start at zero; logits are capped (Gemma
2). `muon` updates the matrices, by the config beside this file.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from megacore.config import Config
from megacore.config.model import ModelConfig
from megacore.config.schema import resolved
from megacore.distributed.shard import LogicalMatrix, Shard, new_parameter, replicated, split
from megacore.distributed.topology import Topology
from megacore.model.context import Context
from megacore.model.embedding import Embedding
from megacore.model.flow import Flow
from megacore.model.head import Head
from megacore.model.layers import Layer, Layers, LayerSpec
from megacore.model.own_attention import keys_and_values, rotated
from megacore.section import Count, Factor, Whole
from megacore.tensor_parallel.linear import ColumnLinear, RowLinear


class Settings(ModelConfig):
    window: Count = Field(64, description="number of tokens that a token attends to, including itself")
    full_every: Count = Field(2, description="every n-th block attends to all previous tokens")
    valued: Whole = Field(
        1,
        description="number of blocks at the start and at the end of the model that mix token embeddings "
        "into their values",
    )
    logit_cap: Factor | None = Field(15.0, description="soft cap on the logits; null: no cap")


def normed(x: Tensor) -> Tensor:
    """Divided by its root mean square over the last dim, without a weight."""
    return F.rms_norm(x, (x.shape[-1],))


class Attention(nn.Module):
    """Causal attention within a window, whose values may be mixed with vectors of the tokens."""

    def __init__(self, index: int, config: Config, where: dict[str, Any]) -> None:
        super().__init__()
        model, group = config.model, where["group"]
        full = index % model.full_every == model.full_every - 1  # type: ignore[attr-defined]
        self.window, self.head = config.train.seq_len if full else resolved(model.window), config.head_size
        heads = (model.num_heads, 3, self.head)
        maps = tuple(
            LogicalMatrix(n, (slice(None), slice(i, i + 1)), (0, 1), (2,), (3,)) for i, n in enumerate("qkv")
        )
        self.qkv = ColumnLinear(
            model.hidden_size, heads, bias=False, init_std=model.init_std, matrices=maps, **where
        )
        self.output = RowLinear(
            model.num_heads * self.head, model.hidden_size, bias=False, init_std=0.0, **where
        )
        self.values, self.mix = None, None
        if valued(index, config):
            table = Shard(
                (model.vocab_size, model.num_heads, self.head),
                (split(group, 1),),
                decay=True,
                init_std=model.init_std,
            )
            # each rank applies it to its own heads
            scale = Shard((2,), (replicated(group, partial=True),), fill=0.5)
            self.values, self.mix = (
                new_parameter(shard, where["dtype"], where["device"]) for shard in (table, scale)
            )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """``[tokens, hidden]`` → the same."""
        qkv = self.qkv(x).view(context.batch_size, context.seq_len, -1, 3, self.head)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # each [batch, heads of this rank, tokens, head]
        if self.values is not None and self.mix is not None:
            of_tokens = (
                F.embedding(context.batch.tokens, self.values.flatten(1))
                .unflatten(2, (-1, self.head))
                .transpose(1, 2)
            )
            v = self.mix[0] * v + self.mix[1] * of_tokens
        k, v, behind = keys_and_values(self, rotated(normed(k), context), v, context)
        seen = (behind >= 0) & (behind < self.window)
        y = F.scaled_dot_product_attention(rotated(normed(q), context), k, v, attn_mask=seen)
        return self.output(y.transpose(1, 2).flatten(2).flatten(0, 1))


class FeedForward(nn.Module):
    """Two layers around a ReLU, squared."""

    def __init__(self, config: Config, where: dict[str, Any]) -> None:
        super().__init__()
        size, ffn = config.model.hidden_size, resolved(config.model.ffn_size)
        self.up = ColumnLinear(size, (ffn,), bias=False, init_std=config.model.init_std, **where)
        self.down = RowLinear(ffn, size, bias=False, init_std=0.0, **where)

    def forward(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` → the same."""
        return self.down(F.relu(self.up(x)).square())


class Block(Layer):
    """``x ← a · x + b · first (+ c · skip)``, then attention and feed-forward, each
    of the normed x and added to it.
    """

    reads = ("hidden", "first")

    def __init__(
        self, index: int, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        where = {"group": mesh.tp, "sequence": config.parallel.sequence, "dtype": dtype, "device": device}
        along = (replicated(mesh.tp, partial=config.parallel.sequence),)
        kept = [1.0, 0.0] + [0.0] * (len(self.reads) - 2)  # at first a plain block
        self.scales = nn.ParameterList(
            new_parameter(Shard((1,), along, fill=fill), dtype, device) for fill in kept
        )
        self.attention, self.feed_forward = Attention(index, config, where), FeedForward(config, where)
        self.index = index

    def forward(self, *given: Any) -> Any:
        """What it `reads`, and the context → hidden states, ``[tokens, hidden]``; twice
        where a later block reads them too.
        """
        *read, context = given
        x = sum(scale * tensor for scale, tensor in zip(self.scales, read, strict=True))
        x = context.add(x, self.attention(normed(x), context), 1.0, self.index, "attention")
        x = context.add(x, self.feed_forward(normed(x)), 1.0, self.index, "feed_forward")
        return (x,) * len(self.writes) if len(self.writes) > 1 else x


class Start(Embedding):
    """Normed vectors of the tokens, which every block adds again."""

    writes: ClassVar[Mapping[str, Flow]] = {"hidden": Flow(), "first": Flow()}

    def forward(self, context: Context) -> Any:
        """→ ``[tokens, hidden]``, twice."""
        x = normed(super().forward(context))
        return x, x


def valued(index: int, config: Config) -> bool:
    """Whether a block mixes vectors of tokens into its values."""
    return min(index, config.model.num_layers - 1 - index) < config.model.valued  # type: ignore[attr-defined]


def layers(config: Config) -> Layers:
    """The first half of the blocks hands skips on, which the second half reads in the opposite order."""
    blocks, count = [], config.model.num_layers
    for i in range(count):
        flows: dict[str, Mapping[str, Flow] | tuple[str, ...]] = {}
        if i < count // 2:
            flows["writes"] = {"hidden": Flow(), f"skip_{i}": Flow()}
        elif count - 1 - i < count // 2:
            flows["reads"] = (*Block.reads, f"skip_{count - 1 - i}")
        blocks.append(LayerSpec(f"blocks.{i}", type("Block", (Block,), flows), (i,)))
    return [LayerSpec("embedding", Start), *blocks, LayerSpec("head", Head)]
