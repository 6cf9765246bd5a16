"""On a machine without a GPU: gives the names under `torch.cuda` that libraries
use unasked a meaning on the CPU.

Nothing is computed otherwise than on a GPU: there is one device and one stream, and its random state is the
CPU's.
"""

from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch

FACTORIES = (
    "empty",
    "zeros",
    "ones",
    "full",
    "tensor",
    "arange",
    "rand",
    "randn",
    "empty_like",
    "zeros_like",
    "ones_like",
)


class Stream:
    """The one stream: all waiting is done already."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


def _on_cpu(device: Any) -> Any:
    """The CPU in place of a GPU."""
    return torch.device("cpu") if isinstance(device, int) or str(device).startswith("cuda") else device


def let_cpu_stand_in() -> None:
    """Replaces the names, in this process, for good."""
    cuda = torch.cuda
    for name in ("current_device", "device_count"):
        setattr(cuda, name, lambda value=int(name == "device_count"): value)
    for name in (
        "set_device",
        "synchronize",
        "empty_cache",
        "reset_peak_memory_stats",
        "_lazy_call",
        "_lazy_init",
    ):
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("Stream", "Event", "current_stream", "default_stream"):
        setattr(cuda, name, lambda *_, **__: Stream())
    cuda.stream = cuda.device = lambda *_: nullcontext()  # type: ignore[misc, assignment]
    for holder in (cuda, cuda.random):
        setattr(holder, "get_rng_state", lambda *_, **__: torch.get_rng_state())  # noqa: B010 (mypy knows them as something else)
        setattr(holder, "set_rng_state", lambda state, *_, **__: torch.set_rng_state(state))  # noqa: B010
    setattr(cuda, "manual_seed", torch.manual_seed)  # noqa: B010
    cuda.memory_allocated = cuda.max_memory_allocated = lambda *_: 0  # type: ignore[assignment]
    for name in FACTORIES:
        setattr(torch, name, _moved(getattr(torch, name)))
    for name in ("cuda", "pin_memory"):
        setattr(torch.Tensor, name, lambda self, *_, **__: self)
    for name in ("to", "type", "new_empty", "new_zeros"):
        setattr(torch.Tensor, name, _moved(getattr(torch.Tensor, name)))
    torch.nn.Module.cuda = lambda self, *_: self  # type: ignore[method-assign]


def _moved(function: Any) -> Any:
    """`function`, with the CPU wherever a GPU is given; and what a CPU tensor says of
    its type is what a GPU's would.
    """

    @wraps(function)
    def moved(*args: Any, **options: Any) -> Any:
        if "device" in options:
            options["device"] = _on_cpu(options["device"])
        args = tuple(_on_cpu(a) if isinstance(a, str | torch.device) else a for a in args)
        result = function(*args, **options)
        return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else result

    return moved
