"""Chooses between Triton and eager for every operation here, and refuses arguments that neither can take."""

import warnings
from functools import cache
from typing import Literal

import torch

try:
    import triton
except ImportError:  # a CPU build of torch brings no Triton
    triton = None

FUSED_ON = ("cuda",)  # types of devices on which `auto` takes Triton
Implementation = Literal["auto", "triton", "eager"]
# fp64 is for proofs, where fp32 statistics are too coarse
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def use_triton(operation: str, implementation: str, **tensors: torch.Tensor | None) -> bool:
    """Whether `operation` runs its Triton kernels on these tensors, named as the caller's
    arguments; None ones are passed over.

    `auto` takes Triton for CUDA tensors of at most 32 bits, and eager elsewhere, with one line of notice
    where Triton is missing. While torch.compile traces the code, `auto` is eager: Inductor fuses eager code
    with its neighbours, and a launch would end its graph. `triton` on tensors of another device is for
    Triton's interpreter, and on meta tensors for looking at launches, also without Triton.

    Raises:
        ValueError: an unknown implementation, tensors on several devices, or a dtype or installation that
            `triton` cannot do with.
    """
    if implementation not in ("auto", "triton", "eager"):
        raise ValueError(
            f"{operation}: implementation {implementation!r} is unknown (right: auto, triton or eager)"
        )
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first, device = next((name, tensor.device) for name, tensor in given.items())
    for name, tensor in given.items():
        if tensor.device != device:
            raise ValueError(
                f"{operation}: {name} is on {tensor.device}, {first} on {device} (right: one device)"
            )
    if implementation == "eager":
        return False
    unfit = next(
        (
            name
            for name, tensor in given.items()
            if tensor.is_floating_point() and tensor.dtype not in TRITON_DTYPES
        ),
        None,
    )
    if implementation == "triton":
        if triton is None and device.type != "meta":
            raise ValueError(
                f"{operation}: Triton is not installed (right: pip install triton, or implementation='eager')"
            )
        if unfit is not None:
            wrong = f"{operation}: {unfit} is {given[unfit].dtype}, which its Triton kernel does not take"
            raise ValueError(f"{wrong} (right: fp32, bf16 or fp16, or implementation='eager')")
        return True
    if unfit is not None or device.type not in FUSED_ON or torch.compiler.is_compiling():
        return False
    if triton is None:
        notice_missing_triton(operation)
    return triton is not None


def use_grouped_mm(implementation: str, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a product of groups of rows is PyTorch's: where `auto` may choose, in bf16, on GPUs from Hopper
    on. There it is one kernel, which reads the groups' ends by itself; on others PyTorch's host waits for
    them. Rows must begin at multiples of 16 bytes.
    """
    if (
        implementation != "auto"
        or x.device.type != "cuda"
        or x.dtype != torch.bfloat16
        or not hasattr(torch, "_grouped_mm")
    ):
        return False
    if not x.numel() or torch.compiler.is_compiling() or torch.cuda.get_device_capability(x.device) < (9, 0):
        return False
    strides = [sorted(t.stride()) for t in (x, weight)]
    return (
        all(one == 1 and all(n % 8 == 0 for n in rest) for one, *rest in strides)
        and x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
    )


def check_shape(operation: str, name: str, tensor: torch.Tensor, right: str, fits: bool) -> None:
    """Raises ValueError naming the argument unless its shape `fits`; `right` says what would."""
    if not fits:
        raise ValueError(f"{operation}: {name} is {list(tensor.shape)} (right: {right})")


@cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; 1 elsewhere, for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def resident_programs(device: torch.device, per_multiprocessor: int, column_blocks: int) -> int:
    """The number of programs that share the rows of one block of columns, so that all blocks run at once.

    For kernels whose programs walk over many rows and keep sums. A program that does not fit next to the
    others starts when one of them has ended, and most of the GPU waits for it. Therefore
    `benchmarks.kernels --compile-only` checks that `per_multiprocessor` programs fit.
    """
    return max(per_multiprocessor * multiprocessors(device) // column_blocks, 1)


@cache
def notice_missing_triton(operation: str) -> None:
    """Warns once for each operation: without a warning, nobody could explain a slow run."""
    warnings.warn(
        f"Triton is not installed: {operation} runs unfused on this GPU (pip install triton)", stacklevel=4
    )
