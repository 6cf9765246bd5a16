"""Steps that all scripts share whose ranks a launcher starts: report mistakes once, join the mesh, fail clearly."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megacore.config import Config
from megacore.config.schema import resolved
from megacore.distributed.mesh import Mesh, set_up_device
from megacore.distributed.place import Place
from megacore.errors import UserError
from megacore.survive.doctor import Doctor, prepare_flight_recorder
from megacore.survive.failure import fail
from megacore.survive.ledger import Ledger
from megacore.survive.noting import note_mesh
from megacore.train.determinism import compute_deterministically


@contextmanager
def own_mistakes() -> Iterator[None]:
    """A context around files that every rank opens by itself. A `UserError` in it may concern this machine alone, and names it."""
    try:
        yield
    except UserError as error:
        error.of_this_machine = True
        raise


@contextmanager
def joined(config: Config, place: Place, device: torch.device) -> Iterator[tuple[Mesh, Ledger]]:
    """A context with the mesh and this rank's ledger. An exception in it ends the job with this rank's reason."""
    set_up_device(config, place, device)
    if config.train.deterministic:
        with own_mistakes():
            compute_deterministically()
    mesh = doctor = None
    try:
        if device.type == "cuda":
            prepare_flight_recorder()
        mesh = Mesh(config, place, device)
        ledger = note_mesh(mesh)
        if mesh.store is not None and config.parallel.hang_seconds is not None:
            doctor = Doctor(mesh, ledger, config.parallel.hang_seconds, Path(resolved(config.log.dir)))
        yield mesh, ledger
    except BaseException as error:
        fail(error, place, mesh, doctor)
        raise
    if doctor is not None:
        doctor.close()
    mesh.close()
