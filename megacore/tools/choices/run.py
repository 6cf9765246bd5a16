"""A run's trainer, for a config that may still leave settings to `auto`."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megacore.config import Config
from megacore.config.schema import resolved
from megacore.distributed.mesh import Mesh
from megacore.errors import ConfigError
from megacore.tools.choices.compiling import settled
from megacore.tools.choices.utilisation import Utilisation
from megacore.tools.deepspeed.engine import ENGINES
from megacore.tools.inputs import Inputs
from megacore.tools.records import Records
from megacore.tools.retention import retention
from megacore.train.trainer import Trainer


@contextmanager
def within_memory() -> Iterator[None]:
    """A context, or a decorator, in which a model is made.

    What the device has no memory for is the config's mistake, not the code's.
    """
    try:
        yield
    except RuntimeError as error:
        if (asked := re.search(r"[Tt]ried to allocate (\d[\d.]* \w+)", str(error))) is None:
            raise
        refusal = ConfigError(
            "model",
            f"a rank has no memory for {asked[1]} more",
            "smaller sizes, or a layout that launch/plan.py finds",
        )
        refusal.of_this_machine = True
        raise refusal from error


@within_memory()
def trainer_of(config: Config, mesh: Mesh, inputs: Inputs, folder_not_shared: str = "") -> Trainer:
    """Return the trainer of a run on this mesh: with what `auto` becomes there, records and retention.

    Collective. A run that resumes keeps what it chose before. Callbacks are in `mesh.listeners`.
    """
    config, decided = settled(config, mesh, inputs.opened if inputs.checkpoint else None)
    utilisation = Utilisation(config, mesh.device, mesh.place.world_size)
    checkpoints = Path(resolved(config.log.dir)) / "checkpoints"
    return Trainer(
        config,
        mesh,
        inputs,
        records=Records() if mesh.rank == 0 else None,
        prune=retention(checkpoints, config.checkpoint.keep, config.checkpoint.keep_every),
        utilisation=utilisation.both,
        folder_not_shared=folder_not_shared,
        engines=ENGINES,
        decided=decided,
    )
