"""On what a result was measured."""

import math
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch


def processor() -> str:
    """The processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    fields = dict(line.replace("\t", "").split(":", 1) for line in lines if ":" in line)
    name = fields.get("model name", platform.processor()).strip()
    # A virtual machine often shows no more than "AMD EPYC": family and model tell the generation.
    return (
        f"{name} (family {fields['cpu family'].strip()}, model {fields['model'].strip()})"
        if "cpu family" in fields
        else name
    )


def instructions() -> str:
    """The widest that PyTorch's own loops use, and AMX, where oneDNN's products of bf16 have it."""
    cpuinfo = Path("/proc/cpuinfo")
    amx = cpuinfo.is_file() and "amx_bf16" in cpuinfo.read_text()
    return torch.backends.cpu.get_cpu_capability() + (" and AMX" if amx else "")


def measured_peak(dtype: torch.dtype, device: torch.device, seconds: float = 1.0) -> float:
    """Operations a second of a large square product, the best of as many as fit in `seconds`: 2·n³ each."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best, until = math.inf, perf_counter() + seconds
    while perf_counter() < until or best == math.inf:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, perf_counter() - started)
    return 2 * size**3 / best


def measured_bandwidth(device: torch.device, seconds: float = 1.0) -> float:
    """Bytes a second that a large copy reads and writes, the best of as many as fit in `seconds`."""
    source = torch.zeros(2**30 if device.type == "cuda" else 2**27, dtype=torch.uint8, device=device)
    target, best, until = torch.empty_like(source), math.inf, perf_counter() + seconds
    while perf_counter() < until or best == math.inf:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, perf_counter() - started)
    return 2 * source.numel() / best


def device_content(precision: str, peak: float, device: torch.device) -> dict[str, Any]:
    """What a device file of the planner holds, measured here: see megacore/tools/planner/devices.py."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "name": gpu.name if gpu else processor(),
        "source": "benchmarks.throughput --peak",
        "peak_flops": {precision: peak},
        "memory_gib": gpu.total_memory / 2**30 if gpu else None,
        "memory_bytes_per_second": measured_bandwidth(device),
        "multiprocessors": gpu.multi_processor_count if gpu else None,
        "power_watts": None,
        "overlaps": device.type != "cpu",
    }


def commit(checkout: Path) -> str | None:
    """The commit that a checkout is of; None outside git, or if git is not installed."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=checkout
        )
    except OSError:
        return None
    return done.stdout.strip() or None


def describe() -> dict[str, Any]:
    """Machine, versions and date, for JSON."""
    versions = {"python": platform.python_version(), "megacore commit": commit(Path(__file__).parent)}
    for package in ("torch", "transformers", "deepspeed"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "processor": processor(),
            "instructions": instructions(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "system": platform.platform(),
        },
        "versions": versions,
    }


def heading(title: str, command: str, description: dict[str, Any]) -> list[str]:
    """Return the first lines of a results page: the title, and a line of command, machine and date.

    `description` is what `describe()` returned on the machine that measured.
    """
    machine = description["machine"]
    devices = [f"{machine['processor']}, {machine['cores']} cores", *machine["gpus"]]
    return [f"# {title}", "", f"`{command}` · {', '.join(devices)} · {description['date'][:10]}", ""]
