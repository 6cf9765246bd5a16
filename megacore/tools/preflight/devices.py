"""Times a matrix product on each GPU of this machine, or on each core where there is none,
and prints the results as JSON.
"""

import json
import os
import platform
import sys
import time
from bisect import insort
from pathlib import Path
from typing import Any

CORE_SIZE, CORE_PRODUCTS, CORE_TRIES = 192, 8, 10  # products of a try together take about a millisecond
# at most for a core; when its three best tries are so much alike, they are believed
CORE_SECONDS, ALIKE = 1.0, 1.05
GPU_SIZE, GPU_PRODUCTS, GPU_TRIES = 8192, 4, 5


def cores() -> dict[str, float]:
    """Products in GFLOP/s on each core, one after the other.

    The best of many short tries: other programs on a core interrupt some of them, and a core that is slow
    itself is slow in all.
    """
    import numpy as np

    mine = os.sched_getaffinity(0)
    matrix = np.random.default_rng(0).standard_normal((CORE_SIZE, CORE_SIZE)).astype(np.float32)
    result, found = np.empty_like(matrix), {}
    try:
        for core in sorted(mine):
            os.sched_setaffinity(0, {core})
            times: list[float] = []
            end = time.perf_counter() + CORE_SECONDS
            while len(times) < CORE_TRIES or (times[2] > ALIKE * times[0] and time.perf_counter() < end):
                started = time.perf_counter()
                for _ in range(CORE_PRODUCTS):
                    np.matmul(matrix, matrix, out=result)
                insort(times, time.perf_counter() - started)
            found[str(core)] = CORE_PRODUCTS * 2 * CORE_SIZE**3 / times[0] / 1e9
    finally:
        os.sched_setaffinity(0, mine)
    return found


def gpus() -> list[dict[str, Any]]:
    """Of each GPU: name, memory in bytes, TFLOP/s of a bf16 product, and whether a product
    with a known result was right.
    """
    import torch

    found: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count()):
        about: dict[str, Any] = {
            "name": torch.cuda.get_device_name(index),
            "tflops": 0.0,
            "right": False,
            "error": "",
        }
        found.append(about)
        try:
            about["free"], about["memory"] = torch.cuda.mem_get_info(index)
            about["tflops"], about["right"] = product(torch.device("cuda", index))
        except RuntimeError as error:  # of this GPU; the others are still to be tried
            about["error"] = str(error).splitlines()[0]
    return found


def product(device: Any) -> tuple[float, bool]:
    """TFLOP/s of a bf16 product, and whether a product with a permutation gave the matrix with its columns in
    that order: exactly, because every sum has one term that is not zero.
    """
    import torch

    generator = torch.Generator(device).manual_seed(0)
    matrix = torch.randn(GPU_SIZE, GPU_SIZE, device=device, dtype=torch.bfloat16, generator=generator)
    order = torch.randperm(GPU_SIZE, device=device, generator=generator)
    permutation = torch.zeros_like(matrix)
    permutation[order, torch.arange(GPU_SIZE, device=device)] = 1
    right = bool(torch.equal(matrix @ permutation, matrix[:, order]))
    best = float("inf")
    for _ in range(GPU_TRIES):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(GPU_PRODUCTS):
            matrix @ permutation
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return GPU_PRODUCTS * 2 * GPU_SIZE**3 / best / 1e12, right


def model() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine()
    )


def main() -> None:
    """Measures what a run with `train.device` (the argument) computes on."""
    found: dict[str, Any] = {"model": model(), "gpus": [], "cores": {}}
    if sys.argv[1] != "cpu":
        found["gpus"] = gpus()
    if not found["gpus"]:
        found["cores"] = cores()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
