"""A GPT in plain PyTorch, which knows nothing of megacore, and a table that lets it train in every layout.

The table says which linear layers tensor ranks divide, and within which modules: docs/models.md.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.config import Config


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width, self.head_size = width, width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split(self.width, dim=2)
        q, k, v = (t.unflatten(2, (-1, self.head_size)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)  # PyTorch's 1 would make the first logits huge

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(config: Config) -> nn.Module:
    model = config.model
    return GPT(model.vocab_size, config.max_positions, model.hidden_size, model.num_heads, model.num_layers)


PARTS = {
    "attention": "region",
    "attention.qkv": "column/3",  # three outputs in one: a rank has its heads of each
    "attention.output": "row",
    "attention.width": "divide",  # a number of features: those of a rank
    "mlp": "region",
    "mlp.0": "column",
    "mlp.2": "row",
}
