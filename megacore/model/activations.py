"""Activations of the feed-forward layer that need no kernel of their own."""

import torch.nn.functional as F
from torch import Tensor

from megacore.kernels.dispatch import Implementation


def relu2(x: Tensor, *, implementation: Implementation = "auto") -> Tensor:
    """``relu(x)²`` (So et al. 2021, Primer)."""
    return F.relu(x).square()


def geglu(x: Tensor, *, approximate: str = "tanh", implementation: Implementation = "auto") -> Tensor:
    """``gelu(gate) * up`` of ``[..., 2 · features]``, the gate's features first (Shazeer 2020)."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate=approximate) * up
