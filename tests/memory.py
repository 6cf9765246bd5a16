"""How much memory tensors take, by counting and not by asking the system."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Allocated(TorchDispatchMode):
    """While entered, counts the bytes of all storages that operations of this thread make: those
    that live, and the `peak` of it.

    A storage on `meta` counts as if it were real, with `meta`.
    """

    def __init__(self, *, meta: bool = False) -> None:
        super().__init__()
        self.meta = meta
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if type(tensor) is Tensor and (self.meta or not tensor.is_meta):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size
