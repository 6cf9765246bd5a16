"""Build the parts of a run that a test needs: its config, topology, mesh, model and training step.

A test that is about something else calls these functions, so only this file changes when a run is put
together in another way. Tests of `load`, `partitioned`, `Mesh` and the like call the function under test.
"""

from collections.abc import Mapping
from copy import deepcopy
from os import PathLike, fspath
from typing import Any

import torch

from megacore.config import Config
from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import RankInfo
from megacore.distributed.topology import Topology, alone
from megacore.model.layers import Layers
from megacore.model.stage import Stage, whole_model
from megacore.tools.choices.settle import settled_alone
from megacore.tools.deepspeed.engine import ENGINES
from megacore.tools.launchers import place_from_environment
from megacore.tools.settings.load import load, resolve
from megacore.train.step import TrainStep

Source = str | PathLike[str] | Mapping[str, Mapping[str, Any]] | Config


def run_of(source: Source, *overrides: str, world: int = 1) -> Config:
    """Return the config of a run on `world` ranks, checked, and with its model cut into stages.

    `source` is the path of a config file or its sections, and `overrides` are `section.key=value` as in a
    command line. `source` may also be a config that a test has changed with `model_copy`, which drops the
    cut; such a config takes no overrides.

    How context ranks attend is chosen for the device in the config if it is `auto`. Other settings
    that a run chooses on its machine, such as `train.compile`, stay `auto`.

    Raises:
        ConfigError: as `load` does, or a plan file does not fit the config.
    """
    if isinstance(source, Config):
        assert not overrides, "overrides apply to a file or its sections"
        return settled_alone(source)
    if isinstance(source, Mapping):
        sections = deepcopy(dict(source))  # because `resolve` writes overrides into it
        return settled_alone(resolve(sections, list(overrides), "test", world).config)
    return settled_alone(load(fspath(source), list(overrides), world).config)


def topology_of(run: Config, rank: int | None = None) -> Topology:
    """Return the coordinates and groups of one rank, without connecting it to the others.

    Without `rank`, of a single process that holds the whole model, whatever the run's layout.
    """
    return alone(run) if rank is None else Topology(run, rank)


def mesh_of(run: Config, rank_info: RankInfo | None = None, device: torch.device | str = "cpu") -> Mesh:
    """Connect this process to the other ranks of the run, and return its mesh. Collective over all ranks.

    Without `rank_info`, a run on one rank is this process's own, and ranks of a larger run read from the
    environment which rank they are.
    """
    if rank_info is None:
        rank_info = RankInfo() if run.world_size == 1 else place_from_environment()
    return Mesh(run, rank_info, torch.device(device))


def model_of(run: Config, device: torch.device | str = "cpu", layers: Layers | None = None) -> Stage:
    """Return the whole model on one device, with its first weights. `layers` replaces the run's model."""
    return whole_model(run, device, layers)


def step_of(
    run: Config, mesh: Mesh | None = None, *, layers: Layers | None = None, draw: bool = True
) -> TrainStep:
    """Return this rank's training step, on a new mesh if there is none yet. Collective over all ranks.

    `layers` replaces the run's model. With `draw=False` the weights are left for the caller to set.
    """
    mesh = mesh_of(run) if mesh is None else mesh
    return TrainStep(run, mesh, draw=draw, layers=layers, engines=ENGINES)
