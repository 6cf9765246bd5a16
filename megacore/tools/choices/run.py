"""A run's trainer, for a config that may still leave settings to `auto`."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megacore.config import Config
from megacore.config.schema import resolved
from megacore.distributed.mesh import Mesh
from megacore.errors import ConfigError
from megacore.tools.choices.compiling import settled
from megacore.tools.choices.utilisation import Utilisation
from megacore.tools.drift import Drift
from megacore.tools.inputs import Inputs
from megacore.tools.opening import opening
from megacore.tools.records import Console, Records
from megacore.tools.retention import SetAside, retention
from megacore.train.logs import Monitor
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
def trainer_of(
    config: Config, mesh: Mesh, inputs: Inputs, monitors: Sequence[Monitor] = (), apart: str = ""
) -> Trainer:
    """The trainer of a run on this mesh, with what `auto` becomes there, its records, its lines on the
    console, who deletes old checkpoints, and who compares what tensor ranks hold alike; collective. A run
    that goes on keeps what it chose before.

    For other monitors and `apart` see `Trainer`.
    """
    config, why = settled(config, mesh, inputs.opened if inputs.checkpoint else None)
    utilisation = Utilisation(config, mesh.device, mesh.place.world_size)
    records, console = Records(), Console()
    # before metrics.jsonl is cut, whose steps these checkpoints are of
    aside = [SetAside()] if config.checkpoint.resume != "auto" else []
    own = [*aside, records, console] if mesh.place.rank == 0 else []
    folder, options = Path(resolved(config.log.dir)) / "checkpoints", config.checkpoint
    clean = retention(folder, options.keep, options.keep_every)
    trainer = Trainer(config, mesh, inputs, [*own, *monitors], apart, utilisation.both, clean)
    records.watchers = console.watchers = trainer.monitors  # without those that fail
    for old in [listener for listener in mesh.listeners if isinstance(listener, Drift)]:
        mesh.listeners.remove(old)  # of a run before this one on the same mesh
    if mesh.tp.size > 1:
        mesh.listeners.append(Drift(trainer.train_step.stages, mesh, trainer.say))
    trainer.opening = [*opening(trainer, inputs, why)]
    return trainer
