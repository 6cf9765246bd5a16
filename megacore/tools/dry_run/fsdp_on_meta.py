"""Lets PyTorch's FSDP2 divide and gather tensors on `meta`, which it refuses before it begins: they are on no device that runs.

Everything else is its own code. What stands in is the module that PyTorch has for each type of device, with its streams and events.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

from megacore.engine.fsdp import FSDPEngine
from megacore.errors import ConfigError
from megacore.tools.dry_run.meta_watch import MetaWatch


class DeviceOnMeta:
    """Stands for `torch.cuda`, and for a stream and an event: nothing runs beside anything."""

    @staticmethod
    def current_device() -> int:
        """Of as many as there are."""
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: nullcontext() if name == "stream" else self


STOOD_IN_FOR = ((_fsdp_param, "free_storage"), (_fsdp_param, "alloc_storage"), (_fsdp_param_group, "alloc_storage"),
                (_fsdp_param_group, "FSDPParamGroup"))  # fmt: skip


@contextmanager
def on_meta(watch: MetaWatch) -> Iterator[None]:
    """Within, the fsdp engine takes stages on `meta`. Raises `ConfigError` if this PyTorch has not what it stands in for."""
    if not all(hasattr(module, name) for module, name in STOOD_IN_FOR):
        raise ConfigError("engine.kind", f"a dry run does not know the FSDP2 of PyTorch {torch.__version__}", "native, or PyTorch 2.13")
    divide = FSDPEngine._divide

    def divided(self: FSDPEngine, *args: Any) -> None:
        """Only what is held in the end counts: while FSDP2 divides, it asks for shapes of whole tensors, which never exist."""
        with watch.sleeping():
            divide(self, *args)
        for rows in self.rows:
            watch.note(rows.master)
            watch.note(rows.gradient)

    def freed(tensor: Tensor) -> None:
        watch.release(tensor)
        free(tensor)

    def made(tensor: Tensor) -> None:
        make(tensor)
        watch.note(tensor)

    free, make = _fsdp_param.free_storage, _fsdp_param.alloc_storage  # FSDP2 empties a gathered tensor's storage, and fills it again
    with (
        mock.patch.object(_fsdp_param, "free_storage", freed),
        mock.patch.object(_fsdp_param, "alloc_storage", made),
        mock.patch.object(_fsdp_param_group, "alloc_storage", made),
        mock.patch.object(torch, "meta", DeviceOnMeta(), create=True),
        mock.patch.object(torch.accelerator, "current_stream", DeviceOnMeta),
        mock.patch.object(_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", lambda group: None),
        mock.patch.object(FSDPEngine, "_divide", divided),
    ):
        yield
