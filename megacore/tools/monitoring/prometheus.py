"""Serves a run's figures to Prometheus (`log.prometheus_port`): the first rank of every machine,
for the ranks of that machine.

Figures change at logged steps, when the run has them anyway: a scrape reads host memory, and asks the device
for nothing.
"""

import math
import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from megacore.config import Config
from megacore.distributed.events import Waits
from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError
from megacore.tools.monitoring.scrapes import ScrapeServer
from megacore.tools.monitoring.step_parts import StepParts
from megacore.train.callbacks import Callback, Report

# What `train.metrics` logs, by its key in metrics.jsonl.
RUN = {
    "step": "Last logged step.",
    "loss": "Loss of the global batch of that step, nats a token.",
    "grad_norm": "Gradient norm of the whole model.",
    "lr": "Learning rate.",
    "tokens": "Tokens read so far.",
    "tokens_per_second": "Of all ranks together.",
    "step_seconds": "Mean since the logged step before, of the slowest rank.",
    "mfu": "Model FLOPs utilisation, attention over all pairs, or those of a document.",
    "mfu_causal": "The same, with half of attention.",
    "save_seconds": "That training waited for checkpoints since the logged step before.",
    "skipped": "Steps skipped so far.",
}
# What each rank has of its own, by label `rank`.
RANKS = {
    "rank_busy_seconds": "Of its own in a step: without waiting for other ranks.",
    "rank_waiting_seconds": "Waiting for other ranks in a step: communication that is not hidden, "
    "bubbles, slower ranks.",
    "rank_memory_bytes": "Peak.",
    "rank_memory_reserved_bytes": "Peak of what PyTorch took from the device, with blocks that nothing "
    "fitted into.",
    "rank_straggler": "1 where it holds up the others.",
}
# The same, by label `part`: bubble, data, or the group over which it waits.
PARTS = {
    "rank_part_seconds": "Of a step, not computing: the bubble, waiting for data, communication over a "
    "group that is not hidden."
}
DEVICES = {"rank_gpu_utilisation": "Part of the last second or less in which the GPU ran a kernel, by NVML."}
OTHERS = {
    "valid_loss": "Last validation, nats a token.",
    "checkpoint_step": "Step of the newest checkpoint.",
    "checkpoint_seconds": "That the newest save took, from its beginning until it was on disk.",
    "checkpoint_timestamp_seconds": "When it was first seen at a logged step.",
    "logged_timestamp_seconds": "When the last step was logged; before the first, when this process began "
    "to serve.",
    "started_timestamp_seconds": "When this process began to serve: a restart changes it.",
    "memory_limit_bytes": "Memory of a device; on CPUs of the machine.",
}


def machine_ranks(mesh: Mesh) -> list[int]:
    """The ranks on this rank's machine, in the order of their local ranks.

    Launchers need not number them one behind another, nor place as many on each machine. Collective.
    """
    hosts = mesh.hosts()
    own, _ = hosts[mesh.place.rank]
    return sorted(
        (rank for rank, (host, _) in enumerate(hosts) if host == own), key=lambda rank: hosts[rank][1]
    )


class Exporter(Callback):
    """One rank's part. Only the first rank of a machine serves; on others every method does nothing."""

    def __init__(self, port: int, place: RankInfo, device: torch.device) -> None:
        """Starts to serve.

        Raises `ConfigError` where prometheus-client is missing or the port cannot be had.
        """
        self.serving = place.local_rank == 0
        if not self.serving:
            return
        try:
            from prometheus_client import CollectorRegistry, Gauge, generate_latest
        except ImportError:
            right = "pip install 'megacore[monitoring]'"
            raise ConfigError("log.prometheus_port", "prometheus-client is not installed", right) from None
        registry = CollectorRegistry()
        self.gauges: dict[str, Any] = {
            name: Gauge(f"megacore_{name}", text, registry=registry) for name, text in (RUN | OTHERS).items()
        }
        self.gauges |= {
            name: Gauge(f"megacore_{name}", text, ["rank"], registry=registry)
            for name, text in (RANKS | DEVICES).items()
        }
        self.gauges |= {
            name: Gauge(f"megacore_{name}", text, ["rank", "part"], registry=registry)
            for name, text in PARTS.items()
        }
        self.saved_step = 0
        self.device = device
        self.ranks: Sequence[int] = ()  # on this machine
        for name in RUN | OTHERS:  # 0 would be a loss
            self._set(name, None)
        self._set("started_timestamp_seconds", time.time())
        self._set("logged_timestamp_seconds", time.time())
        self._set("memory_limit_bytes", memory_limit(device))
        try:
            self.server = ScrapeServer(port, partial(generate_latest, registry))
        except OSError as error:
            wrong = f"port {port} cannot be served: {os.strerror(error.errno or 0)}"
            raise ConfigError(
                "log.prometheus_port", wrong, "a port that nobody uses on any machine of the run"
            ) from None

    def on_start(self, config: Config, mesh: Mesh) -> None:
        """Find the ranks of the run that are on this machine. Collective."""
        self.parts = StepParts(config, mesh)
        self.watch(machine_ranks(mesh))

    def watch(self, ranks: Sequence[int]) -> None:
        """Tells which ranks of the run are on this machine, in the order of their local ranks.

        They need not be neighbours.
        """
        if not self.serving:
            return
        self.ranks = ranks
        for index in gpus(len(ranks), self.device):
            self.gauges["rank_gpu_utilisation"].labels(ranks[index]).set_function(
                partial(gpu_utilisation, index)
            )

    def step_parts(self, busy_seconds: float, waits: Waits, steps: int) -> dict[str, float]:
        """See `StepParts`; those of every rank, since this machine's first rank shows them for the others."""
        return self.parts.of(busy_seconds, waits.by_group, steps, waits.device_by_group)

    def on_log(self, report: Report) -> None:
        """Shows a logged step's figures: the run's, and those of this machine's ranks."""
        if not self.serving:
            return
        for name in RUN.keys() & report.metrics.keys():
            self._set(name, report.metrics[name])
        for name, values in report.by_rank.items():
            for rank in self.ranks:
                self.gauges[name].labels(rank).set(values[rank])
        for part, values in report.by_part.items():
            for rank in self.ranks:
                self.gauges["rank_part_seconds"].labels(rank, part).set(values[rank])
        now = time.time()
        self._set("logged_timestamp_seconds", now)
        if report.checkpoint_step != self.saved_step:
            self.saved_step = report.checkpoint_step
            self._set("checkpoint_step", report.checkpoint_step)
            self._set("checkpoint_seconds", report.checkpoint_seconds)
            self._set("checkpoint_timestamp_seconds", now)

    def on_validation(self, loss: float) -> None:
        """A validation's loss."""
        if self.serving:
            self._set("valid_loss", loss)

    def on_end(self) -> None:
        """Stops serving."""
        if self.serving:
            self.serving = False
            self.server.close()

    def _set(self, name: str, value: float | None) -> None:
        self.gauges[name].set(float("nan") if value is None else value)


def gpus(ranks: int, device: torch.device) -> range:
    """The GPUs of this machine's `ranks` that this process can ask about: all, or its own where a launcher
    shows it no other; none where NVML cannot be asked.
    """
    if device.type != "cuda" or math.isnan(gpu_utilisation(0)):
        return range(0)
    return range(min(torch.cuda.device_count(), ranks))


def gpu_utilisation(index: int) -> float:
    """Called when somebody scrapes.

    It asks the driver, and not the device; NaN where NVML or its package (nvidia-ml-py) is missing.
    """
    try:
        return torch.cuda.utilization(index) / 100
    except Exception:  # any error of the libraries below: one would end the whole scrape
        return math.nan


def memory_limit(device: torch.device) -> float:
    """Bytes that a device has; NaN where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return 1024.0 * int(file.readline().split()[1])
    except (OSError, ValueError, IndexError):
        return float("nan")
