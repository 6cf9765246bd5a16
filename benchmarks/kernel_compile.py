"""Compiles the kernels of kernels/ for GPUs that need not be there, and reads in the
machine code what they will be like.

Each operation runs once on meta tensors, which have shapes and no data, while launches are written down
instead of made. What Triton would then specialise a kernel on (dtypes, divisibility by 16, ones, block sizes,
warps) is what it is compiled with.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch
import triton
from triton._utils import find_paths_if, get_iterable_path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from benchmarks.kernel_inputs import Size
from benchmarks.kernel_operations import OPERATIONS
from megacore.caches import cache_folder
from megacore.kernels import dispatch

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# bytes that a program may have
SHARED = {"sm_80": 163 * 2**10, "sm_90": 227 * 2**10, "sm_100": 227 * 2**10, "gfx942": 64 * 2**10}
THREADS = 1024  # that a program may have
MULTIPROCESSORS = 132  # of the GPU that launches are written down for: an H200
WIDE = 128  # bits of the widest load that one thread can make everywhere
META = torch.device("meta")


@dataclass(frozen=True)
class Multiprocessor:
    """What the programs that one multiprocessor runs at once share; from the table of technical
    specifications per compute capability in the CUDA programming guide.
    """

    shared: int  # bytes
    registers: int = 65536
    warps: int = 64
    programs: int = 32

    def fitting_programs(self, warps: int, registers: int, shared: int) -> int:
        """How many programs fit, of `warps` warps, `registers` registers a thread and `shared` bytes each.

        A warp gets registers in units of 256, out of the quarter of the register file that belongs to its
        scheduler. Each program takes 1 KiB of shared memory more than it asks for.
        """
        registers_of_warp = -(-32 * registers // 256) * 256
        warps_with_registers = 4 * (self.registers // 4 // registers_of_warp)
        programs_with_warps = min(self.warps, warps_with_registers) // warps
        return min(self.programs, programs_with_warps, self.shared // (shared + 2**10))


OCCUPANCY = {
    "sm_80": Multiprocessor(shared=164 * 2**10),
    "sm_90": Multiprocessor(shared=228 * 2**10),
    "sm_100": Multiprocessor(shared=228 * 2**10),
}


@dataclass(frozen=True)
class Launch:
    """A kernel with the arguments that it was launched with.

    resident: if the grid is sized by the number of multiprocessors, how many programs are launched for each.
    """

    kernel: JITFunction
    args: tuple[Any, ...]
    options: dict[str, Any]
    programs: int = 1
    resident: int | None = None

    def source(self, target: GPUTarget) -> tuple[ASTSource, dict[str, Any]]:
        """What Triton's runtime would compile for these arguments, and with which options."""
        backend = make_backend(target)
        bind = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        # cross_entropy.py asks at its import which of the two the machine is
        most = THREADS // target.warp_size
        own = self.options | (
            {"num_warps": min(self.options["num_warps"], most)} if "num_warps" in self.options else {}
        )
        bound, specialization, options = bind(*self.args, **own)
        types = [kind for kind, _ in specialization]
        fixed = {
            path: get_iterable_path(list(bound.values()), path)
            for path in find_paths_if(types, lambda _, kind: kind == "constexpr")
        }
        hints = ["" if kind == "constexpr" else hint for kind, hint in specialization]
        hinted = find_paths_if(hints, lambda _, hint: isinstance(hint, str))
        attributes = {path: backend.parse_attr(get_iterable_path(hints, path)) for path in hinted}
        signature = dict(zip((parameter.name for parameter in self.kernel.params), types, strict=True))
        return ASTSource(self.kernel, signature, fixed, attributes), options

    def identity(self, target: str) -> str:
        """Equal for launches that compile to the same code for `target`, and of which as many must fit."""
        source, options = self.source(TARGETS[target])
        return repr(
            (source.fn.cache_key, source.signature, source.constants, source.attrs, options, self.resident)
        )


@dataclass(frozen=True)
class Variant:
    """The `index`-th launch of an operation at a size, to be compiled for a target; names alone, so
    that a process can be sent it.
    """

    operation: str
    size: Size
    dtype: torch.dtype
    index: int
    target: str


@dataclass(frozen=True)
class Compiled:
    """What the assembler says of a kernel."""

    variant: Variant
    kernel: str
    warps: int
    registers: int
    shared: int  # bytes
    spilled: int  # bytes a thread keeps in memory because registers did not suffice
    load: int  # bits of the widest load from global memory
    store: int
    resident: int | None  # as in Launch

    @property
    def fitting(self) -> int | None:
        """How many programs fit on a multiprocessor; None if that is unknown for the target."""
        multiprocessor = OCCUPANCY.get(self.variant.target)
        if multiprocessor is None:
            return None
        return multiprocessor.fitting_programs(self.warps, self.registers, self.shared)

    @property
    def aligned(self) -> bool:
        """Whether rows start where a 16-byte load may."""
        return self.variant.size.width * self.variant.dtype.itemsize % (WIDE // 8) == 0

    @property
    def fault(self) -> str:
        """What must not be in a tuned kernel, or nothing."""
        if self.spilled:
            return f"spills {self.spilled} bytes a thread"
        if self.shared > SHARED[self.variant.target]:
            return f"needs {self.shared} bytes of shared memory, of {SHARED[self.variant.target]}"
        if self.fitting is not None and self.fitting < (self.resident or 1):
            return f"launches {self.resident or 1} programs a multiprocessor, of which {self.fitting} fit"
        if self.aligned and self.load < WIDE and self.kernel not in OPERATIONS[self.variant.operation].small:
            return f"loads {self.load} bits at most"
        return ""


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Launches within are written down, not made."""
    launches: list[Launch] = []

    def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append(Launch(kernel, args, options, prod(grid)))

    made, JITFunction.run = JITFunction.run, record
    try:
        yield launches
    finally:
        JITFunction.run = made


def launches_of(name: str, size: Size, dtype: torch.dtype, target: str = "sm_90") -> list[Launch]:
    """What an operation launches for `target`, forward and backward."""
    launches = launches_with(MULTIPROCESSORS, name, size, dtype, target)
    with_one = launches_with(1, name, size, dtype, target)
    for index, (launch, other) in enumerate(zip(launches, with_one, strict=True)):
        if launch.programs != other.programs:  # so the grid is sized by the number of multiprocessors
            launches[index] = replace(launch, resident=-(-launch.programs // MULTIPROCESSORS))
    return launches


def launches_with(
    multiprocessors: int, name: str, size: Size, dtype: torch.dtype, target: str
) -> list[Launch]:
    """What an operation launches on a GPU with this number of multiprocessors."""
    operation = OPERATIONS[name]
    inputs = operation.inputs(size, dtype, META)
    for differentiable in operation.by:
        inputs[differentiable].requires_grad_()
    with (
        mock.patch.object(torch.version, "hip", "7" if TARGETS[target].backend == "hip" else None),
        mock.patch.object(dispatch, "multiprocessors", lambda device: multiprocessors),
        recorded_launches() as launches,
    ):
        result = operation.call(inputs, "triton")
        if operation.by:
            results = [t for t in (result if isinstance(result, tuple) else (result,)) if t.requires_grad]
            torch.autograd.backward(results, [torch.empty_like(t) for t in results])
    return launches


def variants(sizes: list[tuple[str, Size]], dtypes: list[torch.dtype], targets: list[str]) -> list[Variant]:
    """All that there is to compile, what is compiled to the same code only once."""
    found: dict[str, tuple[str, Size, torch.dtype, int]] = {}
    for name, size in sizes:
        for dtype in dtypes:
            on_nvidia, on_amd = (launches_of(name, size, dtype, target) for target in ("sm_90", "gfx942"))
            for index, launches in enumerate(zip(on_nvidia, on_amd, strict=True)):
                identity = launches[0].identity("sm_90") + launches[1].identity("gfx942")
                found.setdefault(identity, (name, size, dtype, index))
    return [Variant(*place, target) for place in found.values() for target in targets]


def compile_variant(variant: Variant) -> Compiled:
    """Compiles one kernel and reads its code."""
    launches = launches_of(variant.operation, variant.size, variant.dtype, variant.target)
    launch = launches[variant.index]
    return inspect(variant, launch, compiled(launch, TARGETS[variant.target]))


def compiled(launch: Launch, target: GPUTarget) -> CompiledKernel:
    """Machine code for `target`; kept in a folder of its own, under a key that names source and options."""
    source, options = launch.source(target)
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(cache_folder("kernels"))
        return triton.compile(source, target=target, options={"enable_fp_fusion": True} | options)


def inspect(variant: Variant, launch: Launch, binary: CompiledKernel) -> Compiled:
    """Registers, shared memory, spills and widths of access."""
    cuda = "cubin" in binary.asm
    registers, spilled = (
        nvidia_resources(binary.asm["cubin"]) if cuda else amd_resources(binary.asm["amdgcn"])
    )
    load, store = (widest(binary.asm["ptx" if cuda else "amdgcn"], kind) for kind in ("load", "store"))
    return Compiled(
        variant=variant,
        kernel=launch.kernel.__name__,
        warps=binary.metadata.num_warps,
        registers=registers,
        shared=binary.metadata.shared,
        spilled=spilled,
        load=load,
        store=store,
        resident=launch.resident,
    )


def nvidia_resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes that it keeps on the stack or in local memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def amd_resources(assembly: str) -> tuple[int, int]:
    """The same of AMD's assembly, whose spilled registers have 4 bytes."""
    found = {
        name: int(value) for name, value in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s*(\d+)", assembly)
    }
    return found["vgpr_count"], 4 * found["vgpr_spill_count"]


def widest(assembly: str, kind: str) -> int:
    """Bits of the widest access to global memory in PTX or AMD's assembly; `kind` is load or store."""
    instruction = {"load": "ld", "store": "st"}[kind]
    ptx = rf"\b{instruction}\.global(?:\.[\w:]+?)*?(?:\.v(\d))?\.[bfsu](\d+)"
    bits = [int(count or 1) * int(size) for count, size in re.findall(ptx, assembly)]
    if kind == "load":  # straight into shared memory
        bits += [
            8 * int(size, 0)
            for size in re.findall(r"\bcp\.async\.c[ag]\.shared\.global[\w.:]* [^,]+, [^,]+, (\w+)", assembly)
        ]
    for size in re.findall(rf"\b(?:global|buffer|flat)_{kind}_(\w+)", assembly):
        number = re.search(r"\d+", size)
        if "dword" in size:
            bits.append(32 * int(number.group() if number else 1))
        elif number:  # b32, d16, u16 and the like
            bits.append(int(number.group()))
        else:
            bits.append(16 if "short" in size else 8)
    return max(bits, default=0)


def compile_all(todo: list[Variant], processes: int) -> Iterator[Compiled]:
    """`compile_variant` of each, in order."""
    if processes == 1:
        yield from map(compile_variant, todo)
        return
    # forked, a process may inherit a lock of torch's threads
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        yield from pool.map(compile_variant, todo, chunksize=4)
