"""Causal self-attention with heads split over the tensor ranks, grouped queries,
query-key norm and rotary positions.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megacore.config import Config
from megacore.config.implied import attention_of, compiles
from megacore.config.schema import resolved
from megacore.context_parallel.attention import Sequences
from megacore.context_parallel.attention import attend as attend_parts
from megacore.context_parallel.scored import Scoring
from megacore.context_parallel.whole import distances
from megacore.distributed.communicator import Group
from megacore.distributed.cpu import is_widened
from megacore.distributed.shard import LogicalMatrix, Shard, new_parameter, split
from megacore.kernels.dispatch import use_triton
from megacore.kernels.rope import rope, rope_qkv
from megacore.kernels.softmax import causal_softmax
from megacore.kernels.split_heads import split_heads
from megacore.model.context import Context
from megacore.model.heads_norm import AllHeadsNorm
from megacore.model.norm import HeadNorm
from megacore.tensor_parallel.joined import GatedColumnLinear, gated
from megacore.tensor_parallel.linear import ColumnLinear, RowLinear


class CausalAttention(nn.Module):
    """Attention of queries to keys and values, however a subclass makes them: the formula, or in parts."""

    def __init__(self, config: Config, queries: int, index: int = 0) -> None:
        """`queries`: query heads that share a key/value head."""
        super().__init__()
        model, window = config.model, config.model.window_of(index)
        self.queries, self.scale = queries, resolved(model.attention_scale)
        self.kinds = {kind: attention_of(config, kind) for kind in ("cpu", "cuda")}  # by type of device
        self.windowed, self.index, self.model = window is not None, index, model
        self.scoring = (
            None if window is None and model.attention_cap is None else Scoring(window, model.attention_cap)
        )
        self.kernels, self.selective = model.kernels, config.train.recompute == "selective"
        self.sinks: Tensor | None = None
        # the graph ends around it. As a decorator it would load the compiler in every process, in 1.5 s
        if compiles(config):
            self.attend_parts = torch.compiler.disable(self.attend_parts)  # type: ignore[method-assign]

    def at_step(self, step: int) -> None:
        """See `Stage.at_step`: the window of that step."""
        if self.windowed and self.model.window_schedule:
            self.scoring = Scoring(self.model.window_of(self.index, step), self.model.attention_cap)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``softmax(scale · q kᵀ + causal mask) v``; q ``[batch, heads, seq, head]``, k
        and v with the key/value heads.
        """
        if is_widened(q):
            return self.attend(q.float(), k.float(), v.float()).to(q.dtype)
        kind = self.kind(q)
        if kind == "sdpa":
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=self.queries > 1
            )
        if self.queries > 1:
            k, v = k.repeat_interleave(self.queries, 1), v.repeat_interleave(self.queries, 1)
        if kind == "fused":
            return causal_softmax(q @ k.transpose(-2, -1), self.scale, self.kernels) @ v
        seq_len = q.shape[2]
        mask = q.new_full((seq_len, seq_len), float("-inf")).triu_(1)
        # Scaled and masked inside the product: no pass over the scores but the softmax's, which computes in
        # fp32 at least.
        scores = torch.baddbmm(mask, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), alpha=self.scale)
        return (scores.softmax(-1) @ v.flatten(0, 1)).unflatten(0, q.shape[:2])

    def in_context(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Attention of a pass's tokens to all that they should see: `attend`, or across context ranks, within
        documents, or to the tokens that a cache holds.
        """
        if context.watch is not None:
            context.watch.on_attention(self, q, k, context)
        if context.cache is not None:
            return context.cache.attend(self, q, k, v)
        if context.sequences is not None:
            return self.attend_parts(q, k, v, context.sequences)
        if self.selective and self.kind(q) != "sdpa":  # which keeps no scores to drop
            y: Tensor = checkpoint(self.attend, q, k, v, use_reentrant=False, preserve_rng_state=False)
            return y
        return self.attend(q, k, v)

    def attend_parts(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
        """`attend` over sequences that are divided among context ranks, or into documents."""
        if is_widened(q):
            return self.attend_parts(q.float(), k.float(), v.float(), sequences).to(q.dtype)
        if sequences.group.size == 1 and self.kind(q) == "eager":
            return self.formula(q, k, v, distances(sequences, q.device))
        return attend_parts(q, k, v, sequences, self.scale, self.scoring, self.sinks)

    def formula(self, q: Tensor, k: Tensor, v: Tensor, behind: Tensor) -> Tensor:
        """Attention by the plain formula; `behind`: how far each query stands behind each key,
        below 0 where it must not see it.
        """
        scoring = self.scoring or Scoring()
        k, v = k.repeat_interleave(self.queries, 1), v.repeat_interleave(self.queries, 1)
        scores = scoring.capped(q @ k.transpose(-2, -1) * self.scale)
        scores = scores.masked_fill(~scoring.sees(behind), float("-inf"))
        if self.sinks is not None:
            sinks = self.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1] @ v
        return scores.softmax(-1) @ v

    def kind(self, x: Tensor) -> str:
        """How attention is computed where `x` is."""
        return self.kinds["cpu" if x.device.type == "cpu" else "cuda"]


class Attention(CausalAttention):
    """Attention between a column-parallel layer, which makes queries, keys and
    values, and a row-parallel one.

    The logical qkv weight is ``[kv_heads, group + 2, head, hidden]``: for each key/value head its `group`
    query heads, then its key, then its value. It is split along kv_heads, so a tensor rank holds whole groups
    (Ainslie et al. 2023, grouped-query attention; group = 1 is multi-head).
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
        model = config.model
        super().__init__(config, model.num_heads // config.kv_heads, index)
        self.head_size, self.rotates = config.head_size, model.rotates(index)
        where: dict[str, Any] = {
            "group": group,
            "sequence": config.parallel.sequence,
            "dtype": dtype,
            "device": device,
        }
        heads = (config.kv_heads, self.queries + 2, config.head_size)
        named = (
            ("q", 0, self.queries),
            ("k", self.queries, self.queries + 1),
            ("v", self.queries + 1, self.queries + 2),
        )
        dims: dict[str, Any] = {"batch": (0, 1), "rows": (2,), "columns": (3,), "heads": (0, 1)}
        matrices = tuple(LogicalMatrix(n, (slice(None), slice(*at)), **dims) for n, *at in named)
        width = model.num_heads * config.head_size
        gates = width if model.attention_gate == "elementwise" else model.num_heads
        self.gated = model.attention_gate is not None
        self.qkv: Any = (partial(GatedColumnLinear, gates=gates) if self.gated else ColumnLinear)(
            model.hidden_size,
            heads,
            bias=resolved(model.qkv_bias),
            init_std=model.init_std,
            matrices=matrices,
            **where,
        )
        has_output_bias = resolved(model.output_bias)
        self.output = RowLinear(width, model.hidden_size, bias=has_output_bias, init_std=output_std, **where)
        each = model.qk_norm and model.qk_norm_heads == "each"
        self.query_norm = HeadNorm(config, group, dtype, device) if each else None
        self.key_norm = HeadNorm(config, group, dtype, device) if each else None
        self.heads_norm = AllHeadsNorm(config, group, dtype, device) if model.qk_norm and not each else None
        heads_of_all = Shard((model.num_heads,), (split(group, 0),))
        self.sinks = new_parameter(heads_of_all, dtype, device) if model.attention_sinks else None
        # ZeRO-3 frees the norms' weights outside of their layers; the kernel takes them as they are.
        self.folds = config.engine.kind != "deepspeed" and not model.norm_offset
        # A kernel can also sum the gradient of the bias, if queries, keys and values are neither gated,
        # rotated nor normed. ZeRO-3 frees the bias outside of its layer.
        has_plain_bias = resolved(model.qkv_bias) and not (self.gated or self.rotates or model.qk_norm)
        self.splits = has_plain_bias and config.engine.kind != "deepspeed"

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """``[tokens, hidden]`` → the same (with sequence parallelism this rank's tokens)."""
        bias = None
        if self.splits and use_triton("split_heads", self.kernels, x=x, bias=self.qkv.bias):
            bias = self.qkv.bias
        gates = None
        if self.gated:
            qkv, gates = self.qkv.both(x)
        else:
            qkv = self.qkv(x, constant_bias=bias is not None)
        # [batch, seq, kv heads, queries + 2, head]
        qkv = qkv.view(context.batch_size, context.seq_len, -1, self.queries + 2, self.head_size)
        tables = ((context.window_rope if self.windowed else None) or context.rope) if self.rotates else None
        # positions differ between sequences
        if context.sequences is not None and context.sequences.documents is not None:
            q, k, v = (
                x.transpose(1, 2).unflatten(1, qkv.shape[:2]).squeeze(0).transpose(1, 2)
                for x in self.heads(qkv.flatten(0, 1)[None], tables, bias)
            )
        else:
            q, k, v = self.heads(qkv, tables, bias)
        y = self.in_context(q, k, v, context)
        y = y.transpose(1, 2).reshape(-1, y.shape[1] * self.head_size)
        return self.output(y if gates is None else gated(y, gates))

    def heads(
        self, qkv: Tensor, tables: tuple[Tensor, Tensor] | None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Splits the qkv layer's outputs into queries, keys and values, ``[batch, heads, seq, head]``;
        norms and rotates the first two.

        A Triton kernel norms and rotates in one pass over memory. Without rotation they are views, but for
        queries that share a key: their heads are not equally far apart, so they are copied. If a bias is
        given, a kernel joins their gradients, and sums that of the bias in the same pass.
        """
        if bias is not None:
            return split_heads(qkv, bias.view(qkv.shape[2:]), implementation=self.kernels)
        if tables is not None and self.query_norm is None and self.heads_norm is None:
            return rope_qkv(qkv, *tables, implementation=self.kernels)
        if (
            tables is not None
            and self.folds
            and self.heads_norm is None
            and use_triton("rope_qkv", self.kernels, qkv=qkv, cos=tables[0])
        ):
            assert self.query_norm is not None and self.key_norm is not None
            norms = self.query_norm.weight, self.key_norm.weight, self.query_norm.eps
            return rope_qkv(qkv, *tables, norms=norms, implementation=self.kernels)
        # [batch, seq, heads, head]
        q, k, v = (t.flatten(2, 3) for t in qkv.split([self.queries, 1, 1], dim=3))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.heads_norm is not None:
            q, k = self.heads_norm(q, k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if tables is not None:
            q, k = (rope(t, *tables, implementation=self.kernels) for t in (q, k))
        return q, k, v
