"""What looks after a rank of a real run: its flight recorder, the watchdog that reads
it, and its heartbeats.
"""

import secrets
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megacore.config import Config
from megacore.config.schema import resolved
from megacore.distributed.axes import place_text
from megacore.distributed.init import Guard
from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import RankInfo
from megacore.distributed.topology import sizes_of
from megacore.tools.diagnosis.device_work import DeviceWork
from megacore.tools.diagnosis.failure import fail
from megacore.tools.diagnosis.failure_note import NOT_MET, FailureNote
from megacore.tools.diagnosis.flight_recorder import FlightRecorder
from megacore.tools.diagnosis.heartbeat_client import HeartbeatClient
from megacore.tools.diagnosis.store_kv import StoreKV
from megacore.tools.diagnosis.watchdog import Watchdog, prepare_flight_recorder

START_BYTES = 8  # of the identifier of a start


class Guardians(Guard):
    """The guard that `launch/` gives every run.

    A failure of its rank ends the job with this rank's reason.
    """

    def __init__(
        self, config: Config, place: RankInfo, device: torch.device, folder: Path | None = None
    ) -> None:
        """`folder`: the run's, where the reason for its end is recorded; None to keep no such record.

        No other process may train in the folder: its record would be emptied.
        """
        self.config, self.place, self.device = config, place, device
        on_gpu = device.type == "cuda"
        work = DeviceWork(partial(torch.cuda.Event, enable_timing=True)) if on_gpu else None
        self.recorder = FlightRecorder(work, config.parallel.pipeline)
        self.recorder.mark("joining the mesh")
        self.listeners = (self.recorder,)
        self.watchdog: Watchdog | None = None
        self.heartbeats: HeartbeatClient | None = None
        self.failure_folder = folder
        self.note: FailureNote | None = None
        self._begin_note(NOT_MET if place.world_size > 1 else secrets.token_hex(START_BYTES))
        if on_gpu:
            prepare_flight_recorder()

    def met(self, store: dist.Store) -> None:
        parallel, folder = self.config.parallel, Path(resolved(self.config.log.dir))
        self._begin_note(StoreKV(store).first("start", secrets.token_hex(START_BYTES)))
        self.heartbeats = HeartbeatClient(store, self.place, parallel.heartbeat_seconds, self.note)
        if parallel.hang_seconds is not None:
            where, dumps = (
                place_text(self.place.rank, sizes_of(self.config)),
                folder if self.device.type == "cuda" else None,
            )
            self.watchdog = Watchdog(
                store,
                self.place,
                where,
                self.recorder,
                parallel.hang_seconds,
                self.device,
                folder=dumps,
                heartbeats=self.heartbeats,
            )

    def _begin_note(self, start: str) -> None:
        """Start the record of this start's failure. `start` is the same on all ranks."""
        if self.failure_folder is None:
            return
        self.note = FailureNote(self.failure_folder, start)
        if self.place.rank == 0:
            self.note.begin()

    def failed(self, error: BaseException, mesh: Mesh | None) -> None:
        fail(error, self.place, mesh, self.watchdog, self._report)

    def _report(self, reason: str) -> None:
        """Record why this rank has failed."""
        if self.heartbeats is not None:
            self.heartbeats.report(reason, [self.place.rank])
        elif self.note is not None:
            self.note.add(reason)

    def close(self) -> None:
        if self.watchdog is not None:
            self.watchdog.close()
        if self.heartbeats is not None:
            self.heartbeats.close()
