"""Lets one process play a rank of a mesh of any size, on a device that holds nothing and with nobody to talk to."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megacore.config import Config
from megacore.config.resolve_auto import attention_of
from megacore.distributed.communicator import Communicator
from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError
from megacore.kernels import dispatch
from megacore.model.offload import ActivationOffload
from megacore.tools.dry_run.meta_watch import MetaWatch
from megacore.tools.planner.fsdp_units import divides_parameters

META = torch.device("meta")
FLASH = (torch.bfloat16, torch.float16)  # which PyTorch's flash attention takes
WIDEST_HEAD = 256  # that it takes


def as_on_its_device(config: Config) -> Config:
    """The config with what its `auto` settings would choose on the device that it is for, because here they see `meta`.

    Raises `ConfigError` for an engine whose own code does not run on such tensors.
    """
    engine, train = config.engine, config.train
    if engine.kind == "deepspeed":
        wrong = "DeepSpeed asks for a real device"
        raise ConfigError("engine.kind", wrong, "native or fsdp; without --dry-run its memory is predicted by formula")
    if engine.cpu_offload:
        raise ConfigError("engine.cpu_offload", "a dry run has no host memory for parameters", "false; it is predicted by formula")
    kernels = config.model.kernels
    if kernels == "auto":
        fused = train.device != "cpu" and train.precision != "fp64" and dispatch.triton is not None
        kernels = "triton" if fused else "eager"
    model = config.model.model_copy(update={"attention": attention_of(config), "kernels": kernels})
    return config.model_copy(update={"model": model, "train": train.model_copy(update={"compile": False})})


@contextmanager
def playing(config: Config, rank: int, watch: MetaWatch, host_size: int = 8) -> Iterator[Mesh]:
    """The mesh of a rank, with communicators that nobody answers. Each host has `host_size` consecutive ranks. Within, kernels that need
    a device are not launched."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = config.world_size
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", attention))
        stack.enter_context(mock.patch.object(ActivationOffload, "__init__", offload_nowhere))
        stack.enter_context(mock.patch.object(Mesh, "_hosts", lambda mesh: [divmod(other, host_size) for other in range(world)]))
        stack.enter_context(mock.patch.object(Communicator, "start_all_to_all", watch.exchanging(Communicator.start_all_to_all)))
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", one_by_one))
        if divides_parameters(config):
            from megacore.tools.dry_run.fsdp_on_meta import on_meta  # it imports DTensor, for seconds that no other run should wait

            stack.enter_context(on_meta(watch))
        if dispatch.triton is not None:
            from triton.runtime.jit import JITFunction

            stack.enter_context(mock.patch.object(JITFunction, "run", lambda *args, **options: None))
        stack.enter_context(watch)
        store = FakeStore() if world > 1 else None
        mesh = Mesh(config, RankInfo(rank, world), META, store=store, backend="fake")
        try:
            yield mesh
        finally:
            mesh.close()


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, **_: Any
) -> Tensor:
    """The kernel that `scaled_dot_product_attention` takes on a GPU, which keeps no scores; on `meta` it would take the formula."""
    if q.dtype == torch.float64:
        return plain_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    if q.dtype in FLASH and q.shape[-1] <= WIDEST_HEAD:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    kept = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal, scale=scale)
    return kept[0]  # type: ignore[no-any-return]


plain_attention = F.scaled_dot_product_attention


def one_by_one(batch: list[dist.P2POp]) -> list[dist.Work]:
    """Stands for `dist.batch_isend_irecv`, which asks whether the backend of the tensors' device has batches: `meta` has no backend."""
    return [operation.op(operation.tensor, operation.peer, group=operation.group) for operation in batch]


class FakeStream:
    """Stands for a stream, its events and the module that makes them: nothing runs beside anything."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: nullcontext() if name == "stream" else self


def offload_nowhere(self: ActivationOffload, device: torch.device) -> None:
    """Stands for the constructor of `ActivationOffload`: `MetaWatch` knows its host memory."""
    self.device, self.module = device, FakeStream()  # type: ignore[assignment]
    self.out = self.back = FakeStream()  # type: ignore[assignment]
