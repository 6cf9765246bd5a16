"""fp64 for modules that ask for fp32 by name."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Exact(TorchFunctionMode):
    """A context in which whatever asks for fp32 gets fp64.

    Norms, softmax and rotary tables of many models compute in fp32 whatever their input is. A proof in fp64
    would then be off by fp32's rounding.
    """

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        """Call a function of PyTorch with fp64 in place of fp32."""
        options = {name: exact(value) for name, value in (options or {}).items()}
        if function is Tensor.float:
            return arguments[0].double()
        return function(*map(exact, arguments), **options)


def exact(argument: Any) -> Any:
    """Return fp64 for fp32, and any other argument as it is."""
    return torch.float64 if argument is torch.float32 else argument


def building(precision: str) -> AbstractContextManager[None]:
    """A context in which a module is built: in fp64 if it is to be proved in fp64, else in torch's default.

    Constants such as rotary frequencies would otherwise be fp64 numbers with fp32's rounding.
    """
    return in_fp64() if precision == "fp64" else nullcontext()


@contextmanager
def in_fp64() -> Iterator[None]:
    """A context in which new tensors are fp64 by default, and also where fp32 is asked for by name."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Exact():
            yield
    finally:
        torch.set_default_dtype(before)
