"""Collectives that are left out, or performed once more than they should be."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megacore.distributed import collectives as comm


def not_started(x: Tensor, group: Any) -> comm.Done:
    """A collective that nobody performs."""
    return comm.Done()


def twice(collective: Callable[[Tensor, Any], Any]) -> Callable[[Tensor, Any], Any]:
    """A collective that is performed once more than it should be."""

    def start(x: Tensor, group: Any) -> Any:
        comm.all_reduce(x, group)
        return collective(x, group)

    return start
