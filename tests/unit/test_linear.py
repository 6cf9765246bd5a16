"""What a linear layer costs beside its products."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megacore.distributed.communicator import SOLO
from megacore.tensor_parallel.linear import RowLinear


class Called(TorchDispatchMode):
    """Notes the operations that run while entered."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("recompute", [False, True])
def test_one_rank_adds_a_row_bias_within_the_product(recompute: bool) -> None:
    """It has no sum over ranks to wait for: a pass over the output for the bias alone would cost as much as the residual's."""
    device, dtype = torch.device("cpu"), torch.float64
    options: Any = {"activation": F.gelu, "recompute": recompute}
    layer = RowLinear(8, 6, bias=True, init_std=0.1, group=SOLO, sequence=False, dtype=dtype, device=device, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(5, 8, dtype=dtype)
    with Called() as called:
        y = layer(x)
    assert called.names.count("addmm") == 1 and not {"add", "add_"} & set(called.names)
    assert layer.bias is not None
    right = F.gelu(x) @ layer.weight.t() + layer.bias
    assert float((y - right).detach().abs().max()) < 1e-12
    grads = [torch.autograd.grad(z, [layer.weight, layer.bias], torch.ones_like(z)) for z in (y, right)]
    assert max(float((a - b).abs().max()) for a, b in zip(*grads, strict=True)) < 1e-12
