"""A GPT-2 in one file of plain PyTorch, in the manner of nanoGPT: no library, no
parallel layers, compiled as a whole.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.place import set_weights
from benchmarks.peers.transformers_loop import PlainLoop
from megacore.caches import keep_inductor_private
from megacore.config import Config
from megacore.config.schema import resolved
from megacore.tools.interchange.nanogpt import nanogpt_tensors


class Attention(nn.Module):
    """Causal self-attention, all heads in one product."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, hidden]`` → the same."""
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [batch, heads, seq, head]
        return self.c_proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two products around GPT-2's gelu, the one by tanh."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, hidden]`` → the same."""
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width, eps), Attention(width, heads)
        self.ln_2, self.mlp = nn.LayerNorm(width, eps), FeedForward(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, hidden]`` → the same."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Trunk(nn.Module):
    """Embeddings, blocks and the last norm, under nanoGPT's names."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        model = config.model
        width, inner = model.hidden_size, resolved(model.ffn_size)
        self.wte, self.wpe = nn.Embedding(model.vocab_size, width), nn.Embedding(config.max_positions, width)
        self.h = nn.Sequential(
            *(Block(width, model.num_heads, inner, model.norm_eps) for _ in range(model.num_layers))
        )
        self.ln_f = nn.LayerNorm(width, model.norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[batch, seq]`` → ``[batch, seq, hidden]``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.ln_f(self.h(self.wte(tokens) + self.wpe(positions)))


class GPT(nn.Module):
    """The model of `config`, in fp32, with the initial weights that megacore gives
    it; the LM head is the embedding.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.transformer = Trunk(config)
        self.lm_head = nn.Linear(config.model.hidden_size, config.model.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        set_weights(self, config, nanogpt_tensors(config))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of tokens and targets ``[batch, seq]``."""
        logits = self.lm_head(self.transformer(tokens))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class PlainGPTLoop(PlainLoop):
    """nanoGPT's loop: the whole model, loss included, is compiled, and DDP stands
    around it over data ranks.
    """

    def build(self, config: Config) -> nn.Module:
        """The model before DDP."""
        return GPT(config)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Compiled; DDP comes around it, so that it does not cut the graph by its buckets."""
        keep_inductor_private()
        return torch.compile(model)  # type: ignore[return-value]

    def microbatch_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over a microbatch."""
        with self.rounding():
            return self.reduced(inputs, targets)
