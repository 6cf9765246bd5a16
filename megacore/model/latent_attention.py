"""Multi-head latent attention (DeepSeek-V2 and V3, 2024): keys and values of all heads are made from
one small vector of each token.

A token's hidden states are pressed into a latent for its queries and one for its keys and values. Both are
normed, and each tensor rank makes its own heads from them. Positions stand apart: a part of each head's query
turns by its position, and so does one key that all heads share. While a text is written, the latent and that
key are all that is kept of a token: the matrices that would make its keys and values are multiplied into
queries and outputs instead.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megacore.config import Config
from megacore.distributed.collectives import enter_tensor_parallel
from megacore.distributed.communicator import SOLO, Group
from megacore.distributed.shard import LogicalMatrix, Shard, new_parameter, replicated
from megacore.kernels.layernorm import rms_norm
from megacore.model.attention import CausalAttention
from megacore.model.context import Context
from megacore.model.own_attention import keys_and_values, rotated
from megacore.tensor_parallel.linear import ColumnLinear, RowLinear, column_linear


def per_head(name: str, start: int, stop: int) -> LogicalMatrix:
    """Some features of each head, in a weight ``[heads, features, inputs]``."""
    return LogicalMatrix(name, (slice(None), slice(start, stop)), (0,), (1,), (2,), (0,))


class Latent(nn.Module):
    """A matrix to a latent, which is normed, and to features `beside` it, which are not.

    Every tensor rank has all of it. With sequence parallelism it makes the latents of its own tokens, and the
    gradient is partial.
    """

    def __init__(self, config: Config, rank: int, beside: int, where: dict[str, Any]) -> None:
        super().__init__()
        model, along = config.model, (replicated(where["group"], partial=where["sequence"]),)
        self.sizes, self.eps, self.kernels = [rank, beside], model.norm_eps, model.kernels
        maps = tuple(
            LogicalMatrix(*part)
            for part in (("latent", (slice(rank),)), ("beside", (slice(rank, None),)))[: 1 + bool(beside)]
        )
        down = Shard(
            (rank + beside, model.hidden_size), along, decay=True, init_std=model.init_std, matrices=maps
        )
        self.weight, self.norm = (
            new_parameter(s, where["dtype"], where["device"]) for s in (down, Shard((rank,), along, fill=1.0))
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``[tokens, hidden]`` → ``[tokens, rank]``, ``[tokens, beside]``."""
        latent, beside = column_linear(x, self.weight, None, SOLO, False).split(self.sizes, 1)
        return rms_norm(latent, self.norm, self.eps, implementation=self.kernels), beside


class LatentAttention(CausalAttention):
    """Causal attention of heads that share a latent of each token's keys and values,
    and the part of a key that turns.
    """

    def __init__(
        self,
        config: Config,
        group: Group,
        dtype: torch.dtype,
        device: torch.device,
        output_std: float,
        index: int = 0,
    ) -> None:
        super().__init__(config, 1, index)
        model, turned, rank, heads = (
            config.model,
            config.head_size,
            config.model.kv_rank,
            config.model.num_heads,
        )
        assert rank is not None
        plain, value = model.plain_size, model.value_size
        self.query_sizes, self.key_value_sizes = [plain, turned], [plain, value]
        where: dict[str, Any] = {
            "group": group,
            "sequence": config.parallel.sequence,
            "dtype": dtype,
            "device": device,
        }
        made: dict[str, Any] = {"bias": False, "init_std": model.init_std, **where}
        self.query_latent = None if model.q_rank is None else Latent(config, model.q_rank, 0, where)
        whole = (per_head("q", 0, plain + turned),)
        self.query = ColumnLinear(
            model.q_rank or model.hidden_size, (heads, plain + turned), matrices=whole, **made
        )
        self.latent = Latent(config, rank, turned, where)
        both = per_head("k", 0, plain), per_head("v", plain, plain + value)
        self.key_value = ColumnLinear(rank, (heads, plain + value), matrices=both, **made)
        self.output = RowLinear(heads * value, model.hidden_size, bias=False, init_std=output_std, **where)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """``[tokens, hidden]`` → the same (with sequence parallelism this rank's tokens)."""

        def heads(x: Tensor, features: int) -> Tensor:
            # [batch, heads, tokens, features]
            return x.view(context.batch_size, context.seq_len, -1, features).transpose(1, 2)

        latent, shared = self.latent(x)
        # All ranks' heads read the shared key, and each gives a part of its gradient.
        shared = rotated(
            heads(enter_tensor_parallel(shared, context.group, context.sequence), self.query_sizes[1]),
            context,
        )
        queries = self.query(x if self.query_latent is None else self.query_latent(x)[0])
        q, turned = heads(queries, sum(self.query_sizes)).split(self.query_sizes, -1)
        turned = rotated(turned, context)
        if context.cache is not None:
            of_tokens = heads(enter_tensor_parallel(latent, context.group, context.sequence), latent.shape[1])
            kept = keys_and_values(self, of_tokens, shared, context)
        if context.start == 0:
            k, v = heads(self.key_value(latent), sum(self.key_value_sizes)).split(self.key_value_sizes, -1)
            k = torch.cat((k, shared.expand(-1, k.shape[1], -1, -1)), -1)
            y = self.attend_padded(torch.cat((q, turned), -1), k, v, context)
        else:  # the text's next tokens
            y = self.absorbed(q, turned, *kept)
        return self.output(y.transpose(1, 2).flatten(2).flatten(0, 1))

    def attend_padded(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Attention to keys and values of their own, all padded to one size, which
        kernels that keep no scores ask for.
        """
        if context.watch is not None:
            context.watch.on_attention(self, q, k, context)
        size, value = max(q.shape[-1], v.shape[-1]), v.shape[-1]
        if context.sequences is not None or self.kind(q) == "sdpa":
            q, k, v = (x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1])) for x in (q, k, v))
        if context.sequences is not None:  # over context ranks, or within documents
            return self.attend_parts(q, k, v, context.sequences)[..., :value]
        if self.selective and self.kind(q) != "sdpa":  # see `Attention`
            return checkpoint(self.attend, q, k, v, use_reentrant=False, preserve_rng_state=False)
        return self.attend(q, k, v)[..., :value]

    def absorbed(self, q: Tensor, turned: Tensor, latents: Tensor, shared: Tensor, behind: Tensor) -> Tensor:
        """Attention to latents ``[batch, 1, all tokens, rank]``, as if they were keys and values of
        one head that all queries share.
        """
        to_key, to_value = self.key_value.weight.split(self.key_value_sizes, 1)  # [heads, features, rank]
        q, k = torch.cat((q @ to_key, turned), -1), torch.cat((latents, shared), -1)
        k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, latents))
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=behind >= 0, scale=self.scale
        ) @ to_value.transpose(1, 2)
