"""Settings of a process that computes on a CPU: threads, freed memory, the library for fp32 products, and
16-bit formats that a processor can only emulate. The config's section `cpu` has their switches. (Shared
memory between ranks: `distributed/shared_memory.py`.)
"""

import ctypes
import os

import torch

from megacore.config import Config
from megacore.distributed.cpu import WIDENED, emulated_formats, own_cores
from megacore.distributed.processes import available_cores
from megacore.tools.launchers import launcher_of

EXACT = 2e-6  # largest relative error of an fp32 product of length 512; bf16 inputs would give about 3e-3


def set_up_cpu(config: Config, local_world_size: int) -> None:
    """Sets up this process to compute as one of the machine's ranks."""
    divide_cores(local_world_size)
    if config.cpu.onednn:
        multiply_with_onednn()
    if config.cpu.keep_memory:
        keep_freed_memory()
    WIDENED.clear()
    if config.cpu.widen:
        WIDENED.update(emulated_formats())


def divide_cores(local_world_size: int) -> None:
    """Divide the machine's cores among its ranks, unless OMP_NUM_THREADS is set.

    PyTorch would give every rank all of them. With `srun --cpus-per-task`, Slurm has divided them already:
    a rank sees its own cores only, so dividing these again would leave most of them idle.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    task_cores = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if launcher_of(os.environ) == "srun" and task_cores.isdecimal():
        torch.set_num_threads(max(1, min(int(task_cores), available_cores())))
    else:
        torch.set_num_threads(own_cores(local_world_size))


def keep_freed_memory() -> None:
    """Makes glibc's allocator reuse large freed blocks instead of returning them to the system.

    By default every tensor of 32 MiB and more is mapped anew, and the system zeroes each of its pages: 18 ms
    for a 32 MiB one, twice what a softmax over it takes. A step of the benchmark's model became 12 % faster
    and its process 5 % larger.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc
        m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, -1)


def multiply_with_onednn() -> bool:
    """Sends fp32 products to oneDNN instead of MKL if they stay fp32-exact there; returns whether they do.

    On AMD processors with AVX-512 oneDNN is about twice as fast (measured: 462 instead of 225 GFLOP/s on two
    cores of a Zen 5; no difference on a Zen 3, which has no AVX-512). PyTorch has no switch for the library,
    but allowing bf16 inputs selects it. If the processor then really rounds to bf16 (AMX), the test product
    shows it, and the default is restored.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 512, generator=generator) for _ in range(2))
    exact = a.double() @ b.double().t()
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    # Every form a linear layer uses: forward, gradient of the input, gradient of the weight.
    products = (a @ b.t(), (b @ a.t()).t(), torch.nn.functional.linear(a, b))
    if all(float((p.double() - exact).abs().max() / exact.abs().max()) < EXACT for p in products):
        return True
    setting.fp32_precision = before
    return False
