"""All that this project replaces in PyTorch, and in Triton: functions that refuse tensors on
`meta`, or do there what no GPU does.

Only dry runs do so, each within a context. Everything else that watches a run is a listener
(`distributed/events.py`).
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from inspect import unwrap
from operator import eq
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megacore.errors import ConfigError
from megacore.kernels import dispatch
from megacore.kernels.absent import Kernel
from megacore.kernels.linear_cross_entropy import SHORTEST
from megacore.model import stage

FLASH = (torch.bfloat16, torch.float16)  # which PyTorch's flash attention takes
FLASH_HEAD = 256  # features of the widest head that it takes


class DeviceOnMeta:
    """Stands for `torch.cuda`, and for a stream and an event: nothing runs beside anything."""

    @staticmethod
    def current_device() -> int:
        """Of as many as there are."""
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: nullcontext() if name == "stream" else self


class Light(ModuleType):
    """Stands for a module with the few names that operations on `meta` take of it.

    Asked for another, it makes way for all that these stand for. Names such as `__file__` do not count:
    `inspect` asks them of every module, also in the middle of an import.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for other, module in list(sys.modules.items()):
            if isinstance(module, Light):
                del sys.modules[other]
        return getattr(import_module(self.__name__), name)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Within, operations on `meta` do not load PyTorch's compiler and sympy, which takes more than a second.

    They do so only to keep the compiler away from themselves, and to find that their sizes are plain numbers.
    """
    kept_away, contents = list[Any](), dict[str, dict[str, Any]]()

    def disable(function: Any, *_: Any, **__: Any) -> Any:
        kept_away.append(function)
        return function

    symbolic: dict[str, Any] = {
        "sym_eq": eq,
        "sym_or": lambda *x: any(x),
        "sym_and": lambda *x: all(x),
        "__path__": [],
    }
    symbolic |= dict.fromkeys(
        ("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true"),
        bool,
    )
    symbolic |= dict.fromkeys(
        ("is_nested_int", "has_free_symbols", "free_unbacked_symbols", "is_symbolic"), lambda _: False
    )
    symbolic |= {"has_guarding_hint": lambda _: True, "guarding_hint_or_throw": lambda number: number}
    traced = SimpleNamespace(error_on_nested_fx_trace=False, patch=lambda **_: nullcontext())
    contents["torch._dynamo"] = {"disable": disable, "config": traced}
    contents["torch.fx.experimental.symbolic_shapes"] = symbolic
    contents["sympy"] = {"Basic": Light}
    for name in contents.keys() - sys.modules.keys():
        sys.modules[name] = Light(name)
        vars(sys.modules[name]).update(contents[name])
    try:
        yield
    finally:
        for name in contents:
            if isinstance(sys.modules.get(name), Light):
                del sys.modules[name]
        for function in kept_away:  # PyTorch remembers there what `disable` gave
            vars(function).pop("__dynamo_disable", None)


@contextmanager
def on_meta(
    device: str = "cuda", launched: Callable[[tuple[Any, ...]], None] = lambda _: None
) -> Iterator[None]:
    """Within, a model's step runs on `meta` as on this type of device.

    `launched` hears of kernels' arguments.
    """
    with without_compiler(), ExitStack() as stack:
        # It chooses its kernel by the device, and would take the formula, which keeps all scores.
        stack.enter_context(
            mock.patch.object(F, "scaled_dot_product_attention", on_cpu if device == "cpu" else attention)
        )
        # PyTorch keeps its compiler away from it, and would load that first, which takes seconds.
        stack.enter_context(mock.patch.object(stage, "checkpoint", unwrap(checkpoint)))
        if device == "cpu":
            # of the chunks of a loss
            stack.enter_context(mock.patch.dict(SHORTEST, {"meta": SHORTEST["cpu"]}))
        else:
            # PyTorch has a kernel of its own there, which keeps what it reads: as a layernorm's, which has a
            # number a row more.
            stack.enter_context(mock.patch.object(F, "rms_norm", rms_norm))
        # It asks whether the backend of the tensors' device has batches: `meta` has no backend.
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", one_by_one))
        # PyTorch 2.11 cannot add a 16-bit product to an fp32 sum on `meta`, though it can on a GPU.
        stack.enter_context(mock.patch.object(torch, "addmm", addmm))
        # PyTorch looks a device's streams and events up in the module of its name, which `meta` has not.
        stack.enter_context(mock.patch.object(torch, "meta", DeviceOnMeta(), create=True))
        # A launched kernel would read memory, and there is none.
        stack.enter_context(mock.patch.object(kernel_class(), "run", lambda *args, **options: launched(args)))
        yield


def rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """A layernorm in its place. Without a weight or an epsilon too, as PyTorch's own."""
    return F.layer_norm(x, shape, weight, None, 1e-5 if eps is None else eps)


def addmm(
    total: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, **options: Any
) -> Tensor:
    """Replaces `torch.addmm`: with `out_dtype` it runs the product alone, of the same shapes and result."""
    if out_dtype is None:
        return plain_addmm(total, a, b, **options)
    return torch.mm(a, b, out_dtype=out_dtype, out=options.get("out"))


def kernel_class() -> type:
    """That of kernels, each of which is launched by `run`."""
    if dispatch.triton is None:
        return Kernel
    from triton.runtime.jit import JITFunction

    return JITFunction  # type: ignore[no-any-return]


@contextmanager
def fsdp_on_meta(freed: Callable[[Tensor], None], made: Callable[[Tensor], None]) -> Iterator[None]:
    """Within, PyTorch's FSDP2 divides and gathers tensors on `meta`, which it refuses before it begins: they
    are on no device that runs. `freed` and `made` are told of tensors whose memory it gives back while they
    live, before, and gets again, behind that.

    Raises `ConfigError` if this PyTorch has not what is replaced.
    """
    # DTensor: seconds that no other run should wait
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

    names = (
        (_fsdp_param, "free_storage"),
        (_fsdp_param, "alloc_storage"),
        (_fsdp_param_group, "alloc_storage"),
        (_fsdp_param_group, "FSDPParamGroup"),
    )
    if not all(hasattr(module, name) for module, name in names):
        raise ConfigError(
            "engine.kind",
            f"a dry run does not know the FSDP2 of PyTorch {torch.__version__}",
            "native, or PyTorch 2.13",
        )
    # FSDP2 empties a gathered tensor's storage, and fills it again
    free, make = _fsdp_param.free_storage, _fsdp_param.alloc_storage

    def freeing(tensor: Tensor) -> None:
        freed(tensor)
        free(tensor)

    def making(tensor: Tensor) -> None:
        make(tensor)
        made(tensor)

    with (
        mock.patch.object(_fsdp_param, "free_storage", freeing),
        mock.patch.object(_fsdp_param, "alloc_storage", making),
        mock.patch.object(_fsdp_param_group, "alloc_storage", making),
        mock.patch.object(torch.accelerator, "current_stream", DeviceOnMeta),  # there is no accelerator
        # the refusal itself
        mock.patch.object(_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", lambda group: None),
    ):
        yield


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **_: Any,
) -> Tensor:
    """The kernel that `scaled_dot_product_attention` takes on a GPU, which keeps no scores; on
    `meta` it would take the formula.
    """
    if q.dtype == torch.float64:
        return plain_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    if q.dtype in FLASH and v.shape[-1] == q.shape[-1] <= FLASH_HEAD:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    kept = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, is_causal, scale=scale
    )
    return kept[0]  # type: ignore[no-any-return]


def on_cpu(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, scale: float | None = None, **_: Any
) -> Tensor:
    """The kernel that it takes on a CPU, or the formula for values of another size than keys."""
    if v.shape[-1] != q.shape[-1]:
        return plain_attention(q, k, v, is_causal=is_causal, scale=scale)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


plain_attention = F.scaled_dot_product_attention
plain_addmm = torch.addmm


def one_by_one(batch: list[dist.P2POp]) -> list[dist.Work]:
    """Stands for `dist.batch_isend_irecv`, which asks whether the backend of the tensors' device has
    batches: `meta` has no backend.
    """
    return [operation.op(operation.tensor, operation.peer, group=operation.group) for operation in batch]
