"""How fast steps are: three models, compiled or not, at several micro batches; where their time
goes; a plain GPT beside them.
"""

import argparse
import gc
import re
from collections import defaultdict
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.running import Rows, describe_error
from benchmarks.kernel_operations import CONFIGS
from benchmarks.peers.contenders import OURS, PRODUCTS, contenders
from benchmarks.peers.process import OWN
from benchmarks.peers.report import summary
from benchmarks.rounds import race
from benchmarks.training import Training, join
from megacore.config import Config
from megacore.distributed.rank_info import RankInfo
from megacore.tools.choices.utilisation import Utilisation
from megacore.tools.settings.load import load
from megacore.train.metrics import peak_memory, reserved_memory

# the one that says most first
MICRO_BATCHES = {"gpt_124m": (16, 4, 64), "gpt_350m": (16, 4, 32), "gpt_1b": (4, 1, 16)}
MICROBATCHES, WARM_UP, STEPS = 4, 3, 6
TINY = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_heads=2",
    "model.vocab_size=64",
    "train.seq_len=16",
    "train.precision=fp32",
    "train.device=cpu",
)
GIB = 2**30


def steps(rows: Rows, name: str, compiled: str) -> None:
    """A model's steps at each micro batch, what its host needs for them, and
    where the time of the first goes.
    """
    sizes = (1, 2) if rows.dry else MICRO_BATCHES[name]
    for micro_batch in sizes:
        rows.attempt(
            lambda m=micro_batch: measured(config_of(rows, name, compiled, m), rows.dry),  # type: ignore[misc]
            micro_batch=micro_batch,
        )
    short = config_of(rows, name, compiled, 1, "train.seq_len=16")
    rows.attempt(lambda: hosts(short, rows.dry), micro_batch="1, of 16 tokens")
    for row in classes(
        rows,
        config_of(rows, name, compiled, sizes[0]),
        f"{name}_{'compiled' if compiled == 'true' else 'eager'}",
    ):
        rows.add(micro_batch=sizes[0], **row)


def config_of(rows: Rows, name: str, compiled: str, micro_batch: int, *overrides: str) -> Config:
    """A config with few microbatches of a size, and `overrides`."""
    sizes = [
        f"train.micro_batch_size={micro_batch}",
        f"train.global_batch_size={MICROBATCHES * micro_batch}",
        f"train.compile={compiled}",
    ]
    return load(str(CONFIGS / f"{name}.json"), [*sizes, *(TINY if rows.dry else ()), *overrides], 1).config


def clear(dry: bool) -> None:
    """Forgets the training before: its memory, its peaks, its compiled blocks."""
    if not dry:
        gc.collect()  # a training refers to itself
        torch.compiler.reset()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measured(config: Config, dry: bool) -> dict[str, Any]:
    """Speed and memory of some steps. A micro batch that does not fit is no failure."""
    clear(dry)
    try:
        job = Training(config, join(config, RankInfo()))
        first = job.step()
        for _ in range(0 if dry else WARM_UP - 1):
            job.step()
        seconds = [job.step() for _ in range(1 if dry else STEPS)]
    except torch.cuda.OutOfMemoryError:
        return {"skipped_because": "it does not fit"}
    device = job.mesh.device
    speed = config.train.global_batch_size * config.train.seq_len / median(seconds)
    return {
        "tokens_a_second": speed,
        "step_ms": 1e3 * median(seconds),
        "mfu": Utilisation(config, device, 1).full(speed),
        "first_step_s": first,
        "allocated_GiB": peak_memory(device) / GIB,
        "reserved_GiB": reserved_memory(device) / GIB,
        "loss": job.loss(),
    }


def hosts(config: Config, dry: bool) -> dict[str, Any]:
    """What the host needs for a layer of a microbatch, forward and backward: with so few
    tokens the device waits for it.
    """
    clear(dry)
    job = Training(config, join(config, RankInfo()))
    for _ in range(1 if dry else WARM_UP):
        job.step()
    found = []
    for _ in range(1 if dry else STEPS):
        job.meet()
        began = perf_counter()
        job.work()
        job.wait()
        found.append(perf_counter() - began)
    return {
        "step_ms": 1e3 * median(found),
        "host_ms_a_layer": 1e3 * median(found) / (config.model.num_layers * config.num_microbatches),
    }


# --- where the time goes ------------------------------------------------------------------------------------

# Classes of kernels by their names, the first that fits; on a CPU, of operators.
CLASSES = (
    ("communication", r"nccl"),
    ("attention", r"flash|fmha|cudnn.*(sdpa|attention)|scaled_dot_product|efficient_attention"),
    ("product", r"gemm|cutlass|nvjet|xmma|cublas|::mm\b|addmm|bmm|matmul"),
    ("Inductor's", r"^triton_"),
    ("loss", r"_statistics_kernel|_gradient_kernel|cross_entropy|log_softmax|nll_loss"),
    ("optimizer", r"_adamw_kernel|_prepare_kernel|_chunk_kernel|_total_kernel|multi_tensor"),
    ("embedding", r"_sum_runs_kernel|embedding|index_|radix|sort"),
    ("fused passes", r"^_\w+_kernel|layer_norm|rms_norm"),  # norms, activations, dropout, rotary positions
    ("copies", r"memcpy|memset|copy|fill|CatArray|aten::cat|zero_"),
    ("sums", r"reduce|sum"),
    ("elementwise", r"elementwise|aten::(add|mul)"),
)


def class_of(name: str) -> str:
    """The class of a kernel."""
    return next((kind for kind, pattern in CLASSES if re.search(pattern, name, re.IGNORECASE)), "other")


def classes(rows: Rows, config: Config, label: str) -> list[dict[str, Any]]:
    """Rows of a profiled step: milliseconds by class of kernel, the kernels that take longest,
    and the GPU's time for a layer.

    The trace of the last model comes with the results; ui.perfetto.dev opens it.
    """
    clear(rows.dry)
    try:
        job = Training(config, join(config, RankInfo()))
        for _ in range(1 if rows.dry else WARM_UP):
            job.step()
        job.meet()
        activities = [ProfilerActivity.CPU, *([] if rows.dry else [ProfilerActivity.CUDA])]
        with profile(activities=activities) as profiler:
            job.work()
            job.wait()
        if label in ("gpt_1b_eager", "gpt_124m_eager") and (rows.dry or label == "gpt_1b_eager"):
            profiler.export_chrome_trace(str(rows.folder / f"trace_{label}.json.gz"))
        kernels = seconds_by_kernel(profiler, rows.dry)
    except Exception as error:
        return [{"class": "profile", "failed": describe_error(error)}]
    return class_rows(kernels, config)


def class_rows(kernels: dict[str, tuple[float, int]], config: Config) -> list[dict[str, Any]]:
    """Rows of a step's kernels: milliseconds by class, the 25 that take longest,
    and the GPU's time for a layer.
    """
    by_class: defaultdict[str, float] = defaultdict(float)
    for name, (seconds, _) in kernels.items():
        by_class[class_of(name)] += seconds
    whole = sum(by_class.values()) or float("nan")
    layers = config.model.num_layers * config.num_microbatches
    found: list[dict[str, Any]] = [
        {"class": "all", "ms": 1e3 * whole, "share": 1.0, "gpu_ms_a_layer": 1e3 * whole / layers}
    ]
    found += [
        {"class": kind, "ms": 1e3 * s, "share": s / whole}
        for kind, s in sorted(by_class.items(), key=lambda each: -each[1])
    ]
    for name, (seconds, calls) in sorted(kernels.items(), key=lambda each: -each[1][0])[:25]:
        found.append(
            {
                "class": class_of(name),
                "ms": 1e3 * seconds,
                "share": seconds / whole,
                "calls": calls,
                "kernel": name[:200],
            }
        )
    return found


def seconds_by_kernel(profiler: Any, dry: bool) -> dict[str, tuple[float, int]]:
    """Seconds and calls of each kernel on the device; on a CPU of each operator, without what it calls."""
    found: dict[str, tuple[float, int]] = {}
    for event in profiler.key_averages():
        if dry:
            found[event.key] = (event.self_cpu_time_total / 1e6, event.count)
        elif event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            found[event.key] = (event.self_device_time_total / 1e6, event.count)
    return {name: value for name, value in found.items() if value[0] > 0}


# --- a plain GPT beside it ----------------------------------------------------------------------------------


def beside(rows: Rows) -> None:
    """A GPT in one file of plain PyTorch, compiled as a whole, in turns with megacore, compiled and not."""
    config, precision = str(CONFIGS / "gpt_124m.json"), "fp32" if rows.dry else "bf16"
    sizes = (
        ["train.micro_batch_size=1", "train.global_batch_size=2", *TINY]
        if rows.dry
        else ["train.global_batch_size=64"]
    )
    overrides = [*sizes, "optim.lr=1e-4"]
    for compiled in ("true",) if rows.dry else ("true", "false"):
        own = [*overrides, f"train.compile={compiled}"]
        wanted = argparse.Namespace(config=config, overrides=own, before=None, peers=["plain-gpt-compiled"])
        running, absent = contenders(wanted, "one", precision, OWN, None)
        running = [
            replace(each, threads=1) if rows.dry else each for each in running if each.name != PRODUCTS
        ]
        result = race(running, config, 1 if rows.dry else 7, print, limit=max(10.0, rows.left() - 5))
        found = summary(result, absent)
        for name, entry in found["contenders"].items():
            ratio = entry.get("megacore_is_times_as_fast", {}).get("median")
            speed = entry["tokens_per_second"]["median"]
            label = f"{name}{', compiled' if name == OURS and compiled == 'true' else ''}"
            rows.add(
                contender=label,
                tokens_a_second=speed,
                megacore_is_times_as_fast=ratio,
                GiB=entry["memory_bytes"] / GIB,
            )
        for name, reason in found["absent"].items():
            rows.add(contender=name, failed=str(reason))
