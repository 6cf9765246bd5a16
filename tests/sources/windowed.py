"""A fork in one file: attention over the last `window` tokens, a gated feed-forward layer with a squared ReLU, and one setting."""

from typing import Any

import torch
from torch import Tensor, nn

from megacore.config import Config
from megacore.config.schema import Count, ModelConfig, resolved
from megacore.distributed.topology import Topology
from megacore.model.context import Context
from megacore.model.norm import Norm
from megacore.tensor_parallel.linear import ColumnLinear, RowLinear


class Settings(ModelConfig):
    window: Count = 4


class WindowedAttention(nn.Module):
    def __init__(self, config: Config, std: float, **where: Any) -> None:
        super().__init__()
        model, self.head = config.model, config.head_size
        self.window = model.window
        self.qkv = ColumnLinear(model.hidden_size, (model.num_heads, 3, self.head), bias=False, init_std=model.init_std, **where)
        self.output = RowLinear(model.num_heads * self.head, model.hidden_size, bias=False, init_std=std, **where)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        qkv = self.qkv(x).view(context.batch_size, context.seq_len, -1, 3, self.head).transpose(1, 2)
        q, k, v = qkv.unbind(3)
        back = torch.arange(context.seq_len, device=x.device)[:, None] - torch.arange(context.seq_len, device=x.device)
        hidden = (back < 0) | (back >= self.window)
        scores = (q @ k.transpose(-2, -1)) * self.head**-0.5
        y = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        return self.output(y.transpose(1, 2).reshape(-1, y.shape[1] * self.head))


class Block(nn.Module):
    def __init__(self, index: int, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        model, group, self.index = config.model, mesh.tp, index
        where: dict[str, Any] = {"group": group, "sequence": config.parallel.sequence, "dtype": dtype, "device": device}
        std = model.init_std / (2 * model.num_layers) ** 0.5
        self.norm1 = Norm(model, group, config.parallel.sequence, dtype, device)
        self.attention = WindowedAttention(config, std, **where)
        self.norm2 = Norm(model, group, config.parallel.sequence, dtype, device)
        self.up = ColumnLinear(model.hidden_size, (resolved(model.ffn_size),), bias=False, init_std=model.init_std, **where)
        self.down = RowLinear(resolved(model.ffn_size), model.hidden_size, bias=False, init_std=std, **where)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = context.add(x, self.attention(self.norm1(x), context), 1.0, self.index, "attention")
        return context.add(x, self.down(self.up(self.norm2(x)).relu().square()), 1.0, self.index, "feed_forward")
