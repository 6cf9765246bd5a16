"""What the peers' loops share: joining the ranks, the batch, the clock, initial
weights, and which parameters decay.

Nothing here touches the process's settings: those are `benchmarks.peers.process`'s, or the library's own.
"""

from collections.abc import Callable
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.training import random_batch
from megacore.config import Config
from megacore.model.batch import Microbatch
from megacore.model.stage import whole_model
from megacore.tools.interchange.mapped import Mapped
from megacore.tools.launchers import place_from_environment
from megacore.tools.machine.device import pick_device


class Ranks:
    """This process among the peer's ranks, in `torch.distributed`'s world, on its device."""

    def __init__(self, config: Config, join: bool = True) -> None:
        self.config, place = config, place_from_environment()
        self.rank, self.world, self.device = place.rank, place.world_size, pick_device(config, place)
        if join:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=config.parallel.timeout_seconds))

    def batch(self) -> list[Microbatch]:
        """A step's microbatches of this rank's data rank (data ranks are innermost but for
        tensor ranks, as in every peer).
        """
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


def set_weights(model: nn.Module, config: Config, mapping: list[Mapped]) -> None:
    """Gives a peer's model the initial weights that megacore's has, by the mapping of its names; in fp32."""
    single = config.model_copy(update={"train": config.train.model_copy(update={"precision": "fp32"})})
    ours = {name: parameter.detach() for name, parameter in whole_model(single).named_parameters()}
    theirs: dict[str, Tensor] = {}
    for tensor in mapping:
        theirs |= tensor.split(ours.pop(tensor.name))
    assert not ours, f"no place for {', '.join(ours)}"
    missing, _ = model.load_state_dict(theirs, strict=False)
    own = model.state_dict()
    untied = [
        name for name in missing if own[name].data_ptr() not in {own[given].data_ptr() for given in theirs}
    ]
    assert not untied, f"no weights for {', '.join(untied)}"


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters for an optimizer: matrices decay, biases and norms do not, as in megacore."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
