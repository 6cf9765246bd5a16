"""A rank of the coordinate check: a short run that measures what its layers and its updates are."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megacore.distributed.collectives import all_reduce
from megacore.distributed.mesh import Mesh
from megacore.tools.choices.partition import partitioned
from megacore.tools.choices.run import trainer_of
from megacore.tools.inputs import Inputs
from megacore.tools.launchers import place_from_environment
from megacore.tools.machine.device import pick_device
from megacore.tools.monitoring.statistics import ACTIVATION, Statistics, squares
from megacore.tools.settings.group_table import parameter_shards
from megacore.tools.settings.load import load
from megacore.train.step import TrainStep

MOVED, LOGITS = "moved", "logits"


class Coordinates(Statistics):
    """Statistics, with the logits as an activation more, and for each layer how far its
    updates move what it computes.
    """

    def on_built(self, train_step: TrainStep) -> None:
        """See `Statistics`."""
        super().on_built(train_step)
        self.shards = parameter_shards(self.config)
        self.logits = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)

    def on_step_begin(self, step: int, logged: bool) -> None:
        super().on_step_begin(step, logged)
        self.logits.zero_()

    @torch.no_grad()
    def on_layer_output(self, layer: nn.Module, flow: Mapping[str, Tensor]) -> None:
        """See `Statistics`."""
        super().on_layer_output(layer, flow)
        if hasattr(layer, "logits"):
            logits = layer.logits(flow["hidden"])  # type: ignore[operator]
            if self.mesh.counts(self.mesh.tp.name):
                self.logits += torch.stack([squares(logits), self.logits.new_tensor(logits.numel())])

    def on_phase(self, phase: str) -> None:
        ends = self.measuring and phase == "between steps"
        super().on_phase(phase)
        if ends:
            all_reduce(self.logits, self.mesh.world)

    def metrics(self, metrics: Mapping[str, Any], stages: Sequence[nn.Module]) -> Mapping[str, float]:
        """See `Statistics`."""
        measured = dict(super().metrics(metrics, stages))
        measured[f"{ACTIVATION}_rms/{LOGITS}"] = float(self.logits[0] / self.logits[1]) ** 0.5
        squared, counted = Counter[str](), Counter[str]()  # by layer
        for name, entries in self.named.matrices.items():
            shard = self.shards[name]
            fan_ins = (
                [matrix.sizes(shard.global_shape)[2] for matrix in shard.logical_matrices]
                if shard.is_hidden
                else [1]
            )
            for _, matrix in entries if shard.decay else ():
                elements, size = prod(matrix.shape), measured[f"update_rms/{matrix.name}"] * max(fan_ins)
                squared[matrix.layer] += elements * size**2  # type: ignore[assignment]
                counted[matrix.layer] += elements
        return measured | {
            f"{MOVED}_rms/{layer}": (squared[layer] / elements) ** 0.5 for layer, elements in counted.items()
        }


def run_measured(config_path: str, overrides: list[str], out: Path) -> None:
    """One rank of the real trainer, whose figures are in `out`.

    The environment gives the rank, as a launcher sets it.
    """
    place = place_from_environment()
    config = partitioned(load(config_path, [*overrides, f"log.dir={out}/run"], place.world_size).config)
    mesh = Mesh(config, place, pick_device(config, place))
    mesh.listeners.add(Coordinates())
    trainer_of(config, mesh, Inputs(config, place.rank)).run()
    mesh.close()
