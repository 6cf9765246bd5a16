"""What every script does whose ranks a launcher starts: say its mistakes once, join the mesh, fail clearly."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megacore.config import Config
from megacore.config.schema import resolved
from megacore.errors import UserError
from megacore.mesh import Mesh
from megacore.place import Place
from megacore.train.cpu import keep_freed_memory, multiply_with_onednn, share_cores
from megacore.train.determinism import compute_deterministically
from megacore.train.doctor import Doctor, prepare_flight_recorder
from megacore.train.failure import fail


@contextmanager
def own_mistakes() -> Iterator[None]:
    """Around what a rank opens by itself: a `UserError` may then be of this machine alone, which is named."""
    try:
        yield
    except UserError as error:
        error.of_this_machine = True
        raise


@contextmanager
def joined(config: Config, place: Place, device: torch.device) -> Iterator[Mesh]:
    """The mesh, for as long as the block runs; whatever is raised in it ends the job with this rank's reason."""
    if device.type == "cpu":
        share_cores(place.local_world_size)
        multiply_with_onednn()
        keep_freed_memory()
    if config.train.deterministic:
        with own_mistakes():
            compute_deterministically()
    mesh = doctor = None
    try:
        if device.type == "cuda":
            prepare_flight_recorder()
        mesh = Mesh(config, place, device)
        if mesh.store is not None and config.parallel.hang_seconds is not None:
            doctor = Doctor(mesh, config.parallel.hang_seconds, Path(resolved(config.log.dir)))
        yield mesh
    except BaseException as error:
        fail(error, place, mesh, doctor)
        raise
    if doctor is not None:
        doctor.close()
    mesh.close()
