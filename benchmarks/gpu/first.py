"""What a first call on a GPU runs besides tests: it fills the caches of kernels, then
measures three models.
"""

import os
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.running import Rows
from benchmarks.gpu.speed import (
    GIB,
    MICRO_BATCHES,
    WARM_UP,
    class_rows,
    clear,
    config_of,
    hosts,
    seconds_by_kernel,
)
from benchmarks.training import Training, join
from megacore.config import Config
from megacore.distributed.rank_info import RankInfo
from megacore.tools.choices.utilisation import Utilisation
from megacore.train.metrics import peak_memory, reserved_memory

STEPS = 10
COMPILE_THREADS = "4"  # of Inductor in each of the processes that compile at the same time


class Job(Protocol):
    """A model that trains: megacore's `Training`, or a peer's loop."""

    def step(self) -> float:
        """Train for a step; return its seconds."""

    def loss(self) -> float | None:
        """The mean loss of the last step."""


def build_job(config: Config, contender: str) -> Job:
    """Build megacore's training, eager or compiled as `config` says, or the compiled plain GPT.

    Tokens are uniformly random. The contender "text" is megacore with tokens as frequent as in text, for
    which the embedding's gradient adds many vectors to few rows.
    """
    if contender == "plain":
        from benchmarks.peers.plain_gpt import PlainGPTLoop

        return PlainGPTLoop(config)
    return Training(config, join(config, RankInfo()), zipf=contender == "text")


def contender_config(rows: Rows, model: str, contender: str, *overrides: str) -> Config:
    """The config of a contender, with the micro batch that `speed` measures first, and `overrides`."""
    micro_batch = 1 if rows.dry else MICRO_BATCHES[model][0]
    is_compiled = "true" if contender == "compiled" else "false"
    return config_of(rows, model, is_compiled, micro_batch, *overrides)


# --- compiling ----------------------------------------------------------------------------------------------


def fill_caches(rows: Rows, model: str, *contenders: str) -> None:
    """Two steps of each contender: Triton and Inductor keep what they compile, so timed parts find it.

    It also shows early whether each contender trains at all. Blocks share a graph, so megacore needs two of
    them; the plain GPT is compiled as a whole and needs them all.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", COMPILE_THREADS)
    for contender in contenders:

        def two_steps(contender: str = contender) -> dict[str, Any]:
            clear(rows.dry)
            layers = () if contender == "plain" else ("model.num_layers=2",)
            job = build_job(contender_config(rows, model, contender, *layers), contender)
            return {"first_step_s": job.step(), "second_step_s": job.step(), "loss": job.loss()}

        rows.attempt(two_steps, model=model, contender=contender)


# --- measuring ----------------------------------------------------------------------------------------------


def measure_model(rows: Rows, model: str, *contenders: str) -> None:
    """Measure each contender's steps, and for megacore what the host needs for a layer."""
    for contender in contenders:
        rows.attempt(
            lambda contender=contender: measure(rows, model, contender),  # type: ignore[misc]
            model=model,
            contender=contender,
        )
    short = config_of(rows, model, "false", 1, "train.seq_len=16")
    rows.attempt(lambda: hosts(short, rows.dry), model=model, contender="eager, 16 tokens")


def measure(rows: Rows, model: str, contender: str) -> dict[str, Any]:
    """Add rows with a contender's speed and memory and with its time by class of kernel.

    Returns the number of kernels in a step.
    """
    clear(rows.dry)
    config = contender_config(rows, model, contender)
    began = perf_counter()
    job = build_job(config, contender)
    built = perf_counter() - began

    first_step = job.step()
    for _ in range(0 if rows.dry else WARM_UP - 1):
        job.step()
    seconds = sorted(job.step() for _ in range(1 if rows.dry else STEPS))

    device = torch.device("cpu" if rows.dry else "cuda")
    tokens_a_second = config.train.global_batch_size * config.train.seq_len / median(seconds)
    rows.add(
        model=model,
        contender=contender,
        tokens_a_second=tokens_a_second,
        mfu=Utilisation(config, device, 1).full(tokens_a_second),
        step_ms=1e3 * median(seconds),
        fastest_ms=1e3 * seconds[0],
        slowest_ms=1e3 * seconds[-1],
        built_s=built,
        first_step_s=first_step,
        allocated_GiB=peak_memory(device) / GIB,
        reserved_GiB=reserved_memory(device) / GIB,
        loss=job.loss(),
    )

    activities = [ProfilerActivity.CPU, *([] if rows.dry else [ProfilerActivity.CUDA])]
    with profile(activities=activities) as profiler:
        job.step()
    kernels = seconds_by_kernel(profiler, rows.dry)
    for row in class_rows(kernels, config):
        rows.add(model=model, contender=contender, **row)
    return {"kernels_in_a_step": sum(calls for _, calls in kernels.values())}
