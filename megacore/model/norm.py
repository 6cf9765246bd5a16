"""Layer and RMS norms, over features and over attention's heads.

Statistics are fp32 for bf16 and fp16 (PyTorch's kernels too).
"""

from typing import Any

import torch
from torch import Tensor, nn

from megacore.config.model import ModelConfig
from megacore.config.schema import Config
from megacore.distributed.communicator import Group
from megacore.distributed.shard import Shard, new_parameter, replicated
from megacore.kernels.layernorm import layer_norm, rms_norm


class Norm(nn.Module):
    """`model.norm` over the features (Ba et al. 2016, layernorm; Zhang and Sennrich 2019,
    rmsnorm); ``[tokens, hidden]``.
    """

    def __init__(
        self, model: ModelConfig, group: Group, sequence: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        shape = (model.hidden_size,)
        self.rms, self.eps, self.implementation = model.norm == "rmsnorm", model.norm_eps, model.kernels
        along = (replicated(group, partial=sequence),)
        self.offset = model.norm_offset
        self.weight = new_parameter(Shard(shape, along, fill=0.0 if self.offset else 1.0), dtype, device)
        has_bias = model.bias and not self.rms
        self.bias = new_parameter(Shard(shape, along), dtype, device) if has_bias else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """``[tokens, hidden]`` → the same shape; with a residual (norm(x +
        residual), x + residual), in one pass.
        """
        weight = plus_one(self.weight) if self.offset else self.weight
        if self.rms:
            return rms_norm(x, weight, self.eps, residual=residual, implementation=self.implementation)
        return layer_norm(
            x, weight, self.bias, self.eps, residual=residual, implementation=self.implementation
        )


class HeadNorm(nn.Module):
    """RMS norm of every head's features, ``[…, head]``, with one weight for all heads
    (Dehghani et al. 2023, query-key norm).

    A tensor rank applies the weight to its own heads, so its gradient is partial, with and without sequence
    parallelism.
    """

    def __init__(self, config: Config, group: Group, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps, self.implementation, self.offset = (
            config.model.norm_eps,
            config.model.kernels,
            config.model.norm_offset,
        )
        shard = Shard(
            (config.head_size,), (replicated(group, partial=True),), fill=0.0 if self.offset else 1.0
        )
        self.weight = new_parameter(shard, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        """``[…, head]`` → the same shape."""
        weight = plus_one(self.weight) if self.offset else self.weight
        return rms_norm(x, weight, self.eps, implementation=self.implementation)


def plus_one(weight: Tensor) -> Tensor:
    """``1 + weight``, in fp32 at least: in 16 bits small weights would be lost."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32)) + 1
