"""What the tests of all kernels share: who may run them, how close is close, and
planting a fault in a kernel's source.

A kernel's checks are plain functions of a device in tests/unit/test_<operation>_kernel.py: there the fixture
`interpreted` (tests/conftest.py) runs them through Triton's interpreter on the CPU, and
tests/gpu/test_<operation>.py on a real GPU.
"""

import importlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pool import Pool

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)

# Of results whose statistics are in fp32: what rounding to the dtype costs (up to 2^-8 in bf16, 2^-11 in
# fp16), twice over.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
# the interpreter truncates to bf16 where hardware rounds
INTERPRETED_TOLERANCE = TOLERANCE | {torch.bfloat16: 1.6e-2}


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest difference, relative to the largest exact value; infinite where either
    is NaN, 0 where both are empty.
    """
    assert got.shape == exact.shape, f"{list(got.shape)} for {list(exact.shape)}"
    if not got.numel():
        return 0.0
    exact = exact.double().to(got.device)
    error = ((got.double() - exact).abs().max() / exact.abs().max().clamp_min(1e-30)).item()
    return float("inf") if error != error else error


def seeded(
    shape: tuple[int, ...],
    device: str,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    spread: float = 1.0,
) -> torch.Tensor:
    """Normal numbers of standard deviation `spread`, the same on every device."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * spread).to(device, dtype)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fills memory that is allocated without values with NaN, so that an element nobody writes is seen.

    PyTorch does so where it computes deterministically.
    """
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1).isnan(), "torch.utils.deterministic.fill_uninitialized_memory is off"
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=only_warned)


def interpret(pool: Pool, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` in a worker of `pool` whose Triton kernels are interpreted:
    Triton asks once, at its import.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # at every call: the pool replaces a worker that has failed
        pool.run(1, os.getpid)  # the worker keeps the environment that it starts with
        return pool.run(1, function, *args)[0]


def with_fault(module_name: str, right: str, wrong: str, check: Callable[..., Any], *args: Any) -> Any:
    """`check(*args)` while `megacore.kernels.<module_name>` is what its source would be with
    `wrong` in the place of `right`.

    For the interpreter's worker. The check must reach the operation through its module
    (`softmax.causal_softmax`).
    """
    module = importlib.import_module(f"megacore.kernels.{module_name}")
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert right in source, f"nothing to spoil: {right!r} is not in {module.__file__}"
    healthy = dict(vars(module))
    with tempfile.TemporaryDirectory() as folder:  # a file, because Triton reads the source of its kernels
        path = Path(folder) / f"{module_name}_with_fault.py"
        path.write_text(source.replace(right, wrong), encoding="utf-8")
        try:
            # In the module's own namespace, so that a check may set the module's constants for these
            # functions too.
            exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), vars(module))
            return check(*args)
        finally:
            vars(module).clear()
            vars(module).update(healthy)


@contextmanager
def launches() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """The name and keyword arguments (block sizes, …) of every Triton kernel launched
    meanwhile: which path really ran.
    """
    from triton.runtime.jit import KernelInterface

    log: list[tuple[str, dict[str, Any]]] = []

    def launcher(kernel: Any, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            log.append((kernel.fn.__name__, options))
            return kernel.run(*args, grid=grid, warmup=False, **options)

        return launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelInterface, "__getitem__", launcher)
        yield log
