"""Steps that all scripts share whose ranks a launcher starts: report mistakes once, join the mesh, fail clearly."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

from megacore.caches import keep_triton_local
from megacore.config import Config
from megacore.config.schema import resolved
from megacore.distributed.axes import place_text
from megacore.distributed.mesh import Mesh, set_up_device
from megacore.distributed.rank_info import RankInfo
from megacore.distributed.rendezvous import claim, meet
from megacore.distributed.topology import sizes_of
from megacore.errors import UserError
from megacore.tools.diagnosis.device_work import DeviceWork
from megacore.tools.diagnosis.failure import fail
from megacore.tools.diagnosis.flight_recorder import FlightRecorder
from megacore.tools.diagnosis.heartbeat_client import HeartbeatClient
from megacore.tools.diagnosis.noting import note_mesh
from megacore.tools.diagnosis.watchdog import START_UP, Watchdog, prepare_flight_recorder
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
def joined(config: Config, place: RankInfo, device: torch.device) -> Iterator[tuple[Mesh, FlightRecorder]]:
    """A context with the mesh and this rank's ledger. An exception in it ends the job with this rank's reason."""
    set_up_device(config, place, device)
    if config.train.deterministic:
        with own_mistakes():
            compute_deterministically()
    mesh = doctor = pulse = None
    timeout, hang_seconds = timedelta(seconds=config.parallel.timeout_seconds), config.parallel.hang_seconds
    ledger = FlightRecorder(DeviceWork(partial(torch.cuda.Event, enable_timing=True)) if device.type == "cuda" else None)
    ledger.mark("joining the mesh")
    try:
        if device.type == "cuda":
            prepare_flight_recorder()
            keep_triton_local()
        store = meet(place, timeout, None if hang_seconds is None else timedelta(seconds=START_UP * hang_seconds))
        if store is not None:
            if config.parallel.heartbeat_seconds is not None:
                pulse = HeartbeatClient(store, place, config.parallel.heartbeat_seconds, Path(resolved(config.log.dir)))
            if hang_seconds is not None:
                where = place_text(place.rank, sizes_of(config))
                folder = Path(resolved(config.log.dir)) if device.type == "cuda" else None
                doctor = Watchdog(store, place, where, ledger, hang_seconds, device, folder)
            claim(device, place, store)
        mesh = Mesh(config, place, device, store=store)
        note_mesh(mesh, ledger)
        yield mesh, ledger
    except BaseException as error:
        fail(error, place, mesh, doctor)
        raise
    if doctor is not None:
        doctor.close()
    if pulse is not None:
        pulse.close()
    mesh.close()
