"""The products of the model's shapes and nothing else: what every contender has to compute, so
that no contender can be faster.
"""

from time import perf_counter

import torch
from torch import Tensor

from benchmarks.training import join
from megacore.config import Config
from megacore.distributed.cpu import WIDENED
from megacore.engine.choose import build_stages
from megacore.model.head import Head
from megacore.model.layers import DTYPES
from megacore.model.stage import Stage
from megacore.tools.choices.settle import settled_alone
from megacore.tools.launchers import place_from_environment


def weight_shapes(stages: list[Stage]) -> list[tuple[int, int]]:
    """``(out, in)`` of this rank's matrices that multiply a microbatch's tokens:
    the blocks' and the LM head's.
    """
    named = [one for stage in stages for block in stage.inner for one in block.named_parameters()]
    weights = [p for name, p in named if name.endswith("weight") and p.ndim > 1]
    weights += [head.head.weight for stage in stages for head in stage.behind if isinstance(head, Head)]
    return [(weight.numel() // weight.shape[-1], weight.shape[-1]) for weight in weights]


class Product:
    """A linear layer's three products, on tensors of its own: its result, and the gradients
    of its input and of its weight.

    Results are written where there is memory for them already. Nothing is added, cast or normalised.
    """

    def __init__(self, tokens: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        def tensor(*sizes: int) -> Tensor:
            return torch.randn(sizes, device=device).to(dtype)

        rows, columns = shape
        self.weight, self.dw = tensor(rows, columns), tensor(rows, columns)
        self.x, self.dx = tensor(tokens, columns), tensor(tokens, columns)
        self.y, self.dy = tensor(tokens, rows), tensor(tokens, rows)

    def compute(self) -> None:
        """``[tokens, in]`` → ``[tokens, out]``, and back."""
        torch.mm(self.x, self.weight.t(), out=self.y)
        torch.mm(self.dy, self.weight, out=self.dx)
        torch.mm(self.dy.t(), self.x, out=self.dw)


class ProductsLoop:
    """A contender that takes as many steps as the others and never has a loss, in
    a process set up as megacore's.

    It has each rank's share of the layout and no communication. Attention's products of scores and values are
    left out: how many they are depends on how a kernel treats the masked half.
    """

    def __init__(self, config: Config) -> None:
        self.mesh = join(config, place_from_environment())
        dtype, device, train = DTYPES[config.train.precision], self.mesh.device, config.train
        dtype = torch.float32 if device.type == "cpu" and dtype in WIDENED else dtype
        shapes = weight_shapes(build_stages(settled_alone(config), self.mesh))
        self.products = [
            Product(train.micro_batch_size * train.seq_len, shape, dtype, device) for shape in shapes
        ]
        self.microbatches = config.num_microbatches

    def step(self) -> float:
        """Seconds of all products of a step."""
        self.mesh.barrier()
        self._wait()
        started = perf_counter()
        for _ in range(self.microbatches):
            for product in self.products:
                product.compute()
        self._wait()
        return perf_counter() - started

    def _wait(self) -> None:
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)

    def loss(self) -> None:
        """There is none."""
