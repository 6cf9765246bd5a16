"""Multi-head latent attention (DeepSeek-V2 and V3, 2024): keys and values of all heads are made from one small vector of each token.

A token's hidden states are pressed into a latent for its queries and one for its keys and values. Both are normed, and each tensor rank
makes its own heads from them. Positions stand apart: a part of each head's query turns by its position, and so does one key that all
heads share. While a text is written, the latent and that key are all that is kept of a token: the matrices that would make its keys and
values are multiplied into queries and outputs instead.
"""

from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from megacore.config import Config
from megacore.config.model import ModelConfig
from megacore.context_parallel.attention import attend
from megacore.distributed.collectives import enter_tensor_parallel
from megacore.distributed.communicator import SOLO
from megacore.distributed.shard import LogicalMatrix, Shard, new_parameter, replicated, shard_of
from megacore.distributed.topology import Topology
from megacore.kernels.layernorm import rms_norm
from megacore.model.block import Block as Usual
from megacore.model.context import Context
from megacore.model.own_attention import keys_and_values, rotated
from megacore.section import Count
from megacore.tensor_parallel.linear import ColumnLinear, RowLinear, column_linear


class Settings(ModelConfig):  # `head_size` is the features of a query, and of the shared key, that turn
    q_rank: Count | None = Field(64, description="features of the queries' latent; null: queries are made of the hidden states")
    kv_rank: Count = Field(32, description="features of the latent of keys and values")
    plain_size: Count = Field(16, description="features of a head's query and key that do not turn")
    value_size: Count = Field(16, description="features of a head's value")


def per_head(name: str, start: int, stop: int) -> LogicalMatrix:
    """Some features of each head, in a weight ``[heads, features, inputs]``."""
    return LogicalMatrix(name, (slice(None), slice(start, stop)), (0,), (1,), (2,), (0,))


class Latent(nn.Module):
    """A matrix to a latent, which is normed, and to features `beside` it, which are not.

    Every tensor rank has all of it. With sequence parallelism it makes the latents of its own tokens, and the gradient is partial.
    """

    def __init__(self, config: Config, rank: int, beside: int, where: dict[str, Any]) -> None:
        super().__init__()
        model, along = config.model, (replicated(where["group"], partial=where["sequence"]),)
        self.sizes, self.eps, self.kernels = [rank, beside], model.norm_eps, model.kernels
        maps = tuple(LogicalMatrix(*part) for part in (("latent", (slice(rank),)), ("beside", (slice(rank, None),)))[: 1 + bool(beside)])
        down = Shard((rank + beside, model.hidden_size), along, decay=True, init_std=model.init_std, matrices=maps)
        self.weight, self.norm = (new_parameter(s, where["dtype"], where["device"]) for s in (down, Shard((rank,), along, fill=1.0)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``[tokens, hidden]`` → ``[tokens, rank]``, ``[tokens, beside]``."""
        latent, beside = column_linear(x, self.weight, None, SOLO, False).split(self.sizes, 1)
        return rms_norm(latent, self.norm, self.eps, implementation=self.kernels), beside


class LatentAttention(nn.Module):
    """Causal attention of heads that share a latent of each token's keys and values, and the part of a key that turns."""

    def __init__(self, config: Config, std: float, where: dict[str, Any]) -> None:
        super().__init__()
        model, turned = config.model, config.head_size
        q_rank, kv_rank, plain, value = (getattr(model, name) for name in ("q_rank", "kv_rank", "plain_size", "value_size"))
        self.query_sizes, self.key_value_sizes, self.scale = [plain, turned], [plain, value], (plain + turned) ** -0.5
        made: dict[str, Any] = {"bias": False, "init_std": model.init_std, **where}
        self.query_latent = None if q_rank is None else Latent(config, q_rank, 0, where)
        whole = (per_head("q", 0, plain + turned),)
        self.query = ColumnLinear(q_rank or model.hidden_size, (model.num_heads, plain + turned), matrices=whole, **made)
        self.latent = Latent(config, kv_rank, turned, where)
        both = per_head("k", 0, plain), per_head("v", plain, plain + value)
        self.key_value = ColumnLinear(kv_rank, (model.num_heads, plain + value), matrices=both, **made)
        self.output = RowLinear(model.num_heads * value, model.hidden_size, bias=False, init_std=std, **where)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """``[tokens, hidden]`` → the same (with sequence parallelism this rank's tokens)."""

        def heads(x: Tensor, features: int) -> Tensor:
            return x.view(context.batch_size, context.seq_len, -1, features).transpose(1, 2)  # [batch, heads, tokens, features]

        latent, shared = self.latent(x)
        # All ranks' heads read the shared key, and each gives a part of its gradient.
        shared = rotated(heads(enter_tensor_parallel(shared, context.group, context.sequence), self.query_sizes[1]), context)
        queries = self.query(x if self.query_latent is None else self.query_latent(x)[0])
        q, turned = heads(queries, sum(self.query_sizes)).split(self.query_sizes, -1)
        turned = rotated(turned, context)
        if context.cache is not None:
            of_tokens = heads(enter_tensor_parallel(latent, context.group, context.sequence), latent.shape[1])
            kept = keys_and_values(self, of_tokens, shared, context)
        if context.start == 0:
            k, v = heads(self.key_value(latent), sum(self.key_value_sizes)).split(self.key_value_sizes, -1)
            k = torch.cat((k, shared.expand(-1, k.shape[1], -1, -1)), -1)
            y = self.attend(torch.cat((q, turned), -1), k, v, context)
        else:  # the text's next tokens
            y = self.absorbed(q, turned, *kept)
        return self.output(y.transpose(1, 2).flatten(2).flatten(0, 1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Attention to keys and values of their own. All are padded to one size, which kernels that keep no scores ask for."""
        size, value = max(q.shape[-1], v.shape[-1]), v.shape[-1]
        q, k, v = (x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1])) for x in (q, k, v))
        if context.sequences is not None:  # over context ranks, or within documents
            return attend(q, k, v, context.sequences, self.scale)[..., :value]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)[..., :value]

    def absorbed(self, q: Tensor, turned: Tensor, latents: Tensor, shared: Tensor, behind: Tensor) -> Tensor:
        """Attention to latents ``[batch, 1, all tokens, rank]``, as if they were keys and values of one head that all queries share."""
        to_key, to_value = self.key_value.weight.split(self.key_value_sizes, 1)  # [heads, features, rank]
        q, k = torch.cat((q @ to_key, turned), -1), torch.cat((latents, shared), -1)
        k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, latents))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=behind >= 0, scale=self.scale) @ to_value.transpose(1, 2)


class Block(Usual):
    """A GPT's block with this attention."""

    def __init__(self, index: int, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(index, config, mesh, dtype, device)
        where = {"group": mesh.tp, "sequence": config.parallel.sequence, "dtype": dtype, "device": device}
        usual = shard_of(self.attention.output.weight)
        self.attention = LatentAttention(config, usual.init_std or 0.0, where)  # type: ignore[assignment]
