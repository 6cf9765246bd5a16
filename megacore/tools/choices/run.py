"""A run's trainer, for a config that may still leave settings to `auto`."""

from collections.abc import Sequence

from megacore.config import Config
from megacore.distributed.mesh import Mesh
from megacore.tools.choices.compiling import settled
from megacore.tools.choices.utilisation import Utilisation
from megacore.train.inputs import Inputs
from megacore.train.logs import Monitor
from megacore.train.trainer import Trainer


def trainer_of(config: Config, mesh: Mesh, inputs: Inputs, monitors: Sequence[Monitor] = (), apart: str = "") -> Trainer:
    """The trainer of a run on this mesh, with what `auto` becomes there; collective. A run that goes on keeps what it chose before.

    For monitors and `apart` see `Trainer`.
    """
    config, why = settled(config, mesh, inputs.opened if inputs.checkpoint else None)
    utilisation = Utilisation(config, mesh.device, mesh.place.world_size)
    return Trainer(config, mesh, inputs, monitors, apart, utilisation.both, why)
