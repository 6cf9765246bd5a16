"""Layer and RMS norm, of the features and of attention's heads. Statistics in fp32 for bf16 and fp16 input (PyTorch's kernels do so)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.config.schema import Config, Model
from megacore.mesh import Group
from megacore.tensor_parallel.linear import replicated
from megacore.tensor_parallel.shard import new_parameter


class Norm(nn.Module):
    """`model.norm` over the features (Ba et al. 2016, layernorm; Zhang and Sennrich 2019, rmsnorm); ``[tokens, hidden]``."""

    def __init__(self, model: Model, group: Group, sequence: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        shape = (model.hidden_size,)
        self.rms, self.eps = model.norm == "rmsnorm", model.norm_eps
        self.weight = new_parameter(replicated(shape, group, sequence, fill=1.0), dtype, device)
        has_bias = model.bias and not self.rms
        self.bias = new_parameter(replicated(shape, group, sequence), dtype, device) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` → the same shape."""
        if self.rms:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class HeadNorm(nn.Module):
    """RMS norm of every head's features, ``[…, head]``, with one weight for all heads (Dehghani et al. 2023, query-key norm).

    A tensor rank applies the weight to its own heads, so that its gradient is partial, with and without sequence parallelism.
    """

    def __init__(self, config: Config, group: Group, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = config.model.norm_eps
        self.weight = new_parameter(replicated((config.head_size,), group, partial=True, fill=1.0), dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        """``[…, head]`` → the same shape."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
