"""What layers and steps ask about a CPU: 16-bit formats that it can only emulate,
and a rank's share of its cores.
"""

import torch
from torch import Tensor

from megacore.distributed.processes import available_cores


def emulated_formats() -> set[torch.dtype]:
    """The formats that oneDNN cannot multiply on this processor, so that PyTorch
    multiplies them one element at a time.
    """
    questions = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    known = {dtype: getattr(torch.ops.mkldnn, name, None) for dtype, name in questions.items()}
    return {dtype for dtype, supported in known.items() if supported is not None and not supported()}


WIDENED = emulated_formats()  # formats whose products are done in fp32


def is_widened(x: Tensor) -> bool:
    """Whether products of tensors like `x` are done in fp32 and rounded.

    The sums are the same, because they are fp32 anyway.
    """
    return x.device.type == "cpu" and x.dtype in WIDENED


def own_cores(local_world_size: int) -> int:
    """A rank's share of the machine's cores, at least 1."""
    return max(1, available_cores() // local_world_size)
