"""What every peer's loop shares: joining its ranks, the batch, and the clock."""

from collections.abc import Callable
from datetime import timedelta
from time import perf_counter

import torch
import torch.distributed as dist

from benchmarks.training import random_batch
from megacore.config import Config
from megacore.distributed.cpu import share_cores
from megacore.distributed.mesh import pick_device
from megacore.distributed.place import place_from_environment
from megacore.pipeline.runtime import Microbatch


class Ranks:
    """This process among the peer's ranks, in `torch.distributed`'s world, on its device."""

    def __init__(self, config: Config, join: bool = True) -> None:
        self.config, place = config, place_from_environment()
        self.rank, self.world, self.device = place.rank, place.world_size, pick_device(config, place)
        if self.device.type == "cpu":
            share_cores(place.local_world_size)
        if join:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=config.parallel.timeout_seconds))

    def batch(self) -> list[Microbatch]:
        """A step's microbatches of this rank's data rank (data ranks are innermost but for tensor ranks, as in every peer)."""
        parallel = self.config.parallel
        return random_batch(self.config, self.device, seed=self.rank // parallel.tensor % int(parallel.data))

    def seconds(self, step: Callable[[], object]) -> float:
        """Of a step, from when all ranks are ready until this rank's device is done."""
        if dist.is_initialized():
            dist.barrier()
        self._wait()
        started = perf_counter()
        step()
        self._wait()
        return perf_counter() - started

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
