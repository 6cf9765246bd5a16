"""Mistakes of a model itself, which layouts and the reference share: only verify's self-checks see them."""

from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.context_parallel import scored
from megacore.model import attention, head, norm
from megacore.model.block import Block

patch = mock.patch.object


def detached_gate() -> Any:
    """Attention's gates are detached, so that their weight is not learned."""
    gated = attention.gated
    return patch(attention, "gated", lambda x, gates: gated(x, gates.detach()))


def norm_without_mean_square() -> Any:
    """The RMS norm's backward takes the mean square for a constant."""

    def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Any = None, **_: Any) -> Any:
        total = x if residual is None else x + residual
        y = total * (total.square().mean(-1, keepdim=True).detach() + eps).rsqrt() * weight
        return y if residual is None else (y, total)

    return patch(norm, "rms_norm", rms_norm)


def cap_without_gradient() -> Any:
    """The cap of the logits is not differentiated: their gradient is that of logits without a cap."""
    cap = scored.soft_cap
    return patch(head, "soft_cap", lambda x, limit: x + (cap(x, limit) - x).detach())


def cap_of_scores_without_gradient() -> Any:
    """Attention's backward forgets how little a score grows near its cap."""
    scores = scored.ScoredPart.scores
    return patch(scored.ScoredPart, "scores", lambda *arguments: (scores(*arguments)[0], 1.0))


def on_feed_forward(change: Any) -> Any:
    """Change the output of the second block's feed-forward layer; `change` takes the layer and its output."""
    make = Block.make_feed_forward

    def changed(self: Block, *arguments: Any) -> nn.Module:
        layer = make(self, *arguments)
        if self.index == 1:
            layer.register_forward_hook(lambda module, _, output: change(module, output))
        return layer

    return patch(Block, "make_feed_forward", changed)


class ScaledGradient(torch.autograd.Function):
    """The identity, whose gradient is 0.1 % too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the same numbers."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        """Return a little more."""
        return grad * 1.001


def scaled_backward() -> Any:
    """The backward of a feed-forward layer has a scale that its forward has not."""
    return on_feed_forward(lambda _, output: ScaledGradient.apply(output))


def factor_in_training() -> Any:
    """A feed-forward layer's result is scaled in training, and not in evaluation."""
    return on_feed_forward(lambda layer, output: output * 1.001 if layer.training else output)


def random_numbers() -> Any:
    """A layer draws from PyTorch's generator, so recomputation and other layouts draw other numbers."""
    return on_feed_forward(lambda _, output: output + 1e-9 * torch.randn_like(output))


def mask_shifted_by_one() -> Any:
    """The causal mask is shifted by one token: each token sees the one that it is to predict."""

    def attend(self: attention.CausalAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = torch.arange(q.shape[2])
        return self.formula(q, k, v, positions[:, None] - positions + 1)

    return patch(attention.CausalAttention, "attend", attend)


def documents_see_each_other() -> Any:
    """`data.document_mask` restarts positions in each document, and attention sees all of them."""

    def attend(q: Tensor, k: Tensor, v: Tensor, sequences: Any, scale: float, *_: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

    return patch(attention, "attend_parts", attend)


def loss_of_microbatch() -> Any:
    """The head gives the mean over the sequences of a microbatch in place of their sum."""
    loss = head.Head.loss

    def mean(self: head.Head, x: Tensor, targets: Tensor, gradient: Tensor | None = None) -> Tensor:
        return loss(self, x, targets, gradient) / len(targets)

    return patch(head.Head, "loss", mean)
