"""Stands for Triton where it is not installed, so that what a kernel keeps and makes can be
seen on `meta` tensors there too.

Nothing else comes here: on a device, `dispatch.use_triton` says that Triton is missing.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class Kernel:
    """A kernel whose launches do nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __getitem__(self, grid: object) -> "Kernel":
        return self

    def __call__(self, *args: object, **options: object) -> None:
        """A launch."""
        self.run(*args, **options)

    def run(self, *args: object, **options: object) -> None:
        """What a launch does."""


def jit(function: Callable[..., Any] | None = None, **options: object) -> Any:
    """Of a kernel; or, with options, what is called with one."""
    return Kernel if function is None else Kernel(function)


class Names:
    """The names of Triton's language: a constant is its value, and all others only
    annotate a kernel's parameters.
    """

    def constexpr(self, value: Any) -> Any:
        """A constant."""
        return value

    def __getattr__(self, name: str) -> str:
        return name


triton: Any = SimpleNamespace(
    jit=jit, cdiv=lambda x, y: -(-x // y), next_power_of_2=lambda n: 1 << (n - 1).bit_length()
)
tl: Any = Names()
