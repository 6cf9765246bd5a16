"""Layer and RMS norm. Statistics in fp32 for bf16 and fp16 input (PyTorch's kernels do so)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.config.schema import Model
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
