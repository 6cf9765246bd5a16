"""Activations of the feed-forward layer that need no kernel of their own."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.kernels.dispatch import Implementation

SHARPNESS, LIMIT = 1.702, 7.0  # of gpt-oss's gate


def swiglu_clamped(x: Tensor, *, implementation: Implementation = "auto") -> Tensor:
    """``gate · sigmoid(1.702 · gate) · (up + 1)`` of ``[..., 2 · features]``, of which
    neither gets beyond 7 (gpt-oss).
    """
    gate, up = x.chunk(2, -1)
    gate = gate.clamp(max=LIMIT)
    return gate * torch.sigmoid(SHARPNESS * gate) * (up.clamp(-LIMIT, LIMIT) + 1)


def relu2(x: Tensor, *, implementation: Implementation = "auto") -> Tensor:
    """``relu(x)²`` (So et al. 2021, Primer)."""
    return F.relu(x).square()


def geglu(x: Tensor, *, approximate: str = "tanh", implementation: Implementation = "auto") -> Tensor:
    """``gelu(gate) * up`` of ``[..., 2 · features]``, the gate's features first (Shazeer 2020)."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate=approximate) * up
