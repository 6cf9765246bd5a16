"""What a linear layer costs beside its products."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megacore.distributed.collectives import Done
from megacore.distributed.communicator import SOLO, Group
from megacore.tensor_parallel import joined
from megacore.tensor_parallel.gradient import MainGradient, WeightGradQueue, finish_in_turn
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
    """It has no sum over ranks to wait for: a pass over the output for the bias alone would
    cost as much as the residual's.
    """
    device, dtype = torch.device("cpu"), torch.float64
    options: Any = {"activation": F.gelu, "recompute": recompute}
    layer = RowLinear(
        8, 6, bias=True, init_std=0.1, group=SOLO, sequence=False, dtype=dtype, device=device, **options
    )
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


def test_one_of_two_joined_weights_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other's gradient, which a schedule leaves for later, takes all ranks'
    tokens; this one has no product.
    """

    def gathered(x: torch.Tensor, group: Group) -> tuple[torch.Tensor, Done]:
        return (x if group is SOLO else torch.cat((x, x))), Done()

    monkeypatch.setattr(joined, "all_gather", lambda x, group: gathered(x, group)[0])
    monkeypatch.setattr(joined, "all_gather_start", gathered)
    monkeypatch.setattr(joined, "reduce_scatter_start", lambda x, group: (x[: len(x) // 2], Done()))
    x, weight, gate = (
        torch.randn(3, 4, requires_grad=True),
        torch.randn(6, 4),
        torch.randn(2, 4, requires_grad=True),
    )
    main = MainGradient(torch.zeros(2, 4), WeightGradQueue())
    y, gates = joined._JoinedLinear.apply(x, weight, None, gate, Group("tp", (0, 1), 0), True, (None, main))
    with main.deferral.collect() as parts, Called() as called:
        (y.sum() + gates.sum()).backward()
    assert called.names.count("mm") == 2
    list(finish_in_turn(parts))
    assert torch.allclose(main.total, (2 * x.sum(0)).expand(2, 4))
