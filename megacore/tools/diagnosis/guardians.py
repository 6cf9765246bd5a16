"""What looks after a rank of a real run: its flight recorder, the watchdog that reads
it, and its heartbeats.
"""

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
from megacore.tools.diagnosis.flight_recorder import FlightRecorder
from megacore.tools.diagnosis.heartbeat_client import HeartbeatClient
from megacore.tools.diagnosis.watchdog import Watchdog, prepare_flight_recorder


class Guardians(Guard):
    """The guard that `launch/` gives every run.

    A failure of its rank ends the job with this rank's reason.
    """

    def __init__(self, config: Config, place: RankInfo, device: torch.device) -> None:
        super().__init__()
        self.config, self.place, self.device = config, place, device
        on_gpu = device.type == "cuda"
        work = DeviceWork(partial(torch.cuda.Event, enable_timing=True)) if on_gpu else None
        self.recorder = FlightRecorder(work, config.parallel.pipeline)
        self.recorder.mark("joining the mesh")
        self.observers.append(self.recorder)
        self.watchdog: Watchdog | None = None
        self.heartbeats: HeartbeatClient | None = None
        if on_gpu:
            prepare_flight_recorder()

    def met(self, store: dist.Store) -> None:
        parallel, folder = self.config.parallel, Path(resolved(self.config.log.dir))
        if parallel.heartbeat_seconds is not None:
            self.heartbeats = HeartbeatClient(store, self.place, parallel.heartbeat_seconds, folder)
        if parallel.hang_seconds is not None:
            where, dumps = (
                place_text(self.place.rank, sizes_of(self.config)),
                folder if self.device.type == "cuda" else None,
            )
            self.watchdog = Watchdog(
                store, self.place, where, self.recorder, parallel.hang_seconds, self.device, dumps
            )

    def failed(self, error: BaseException, mesh: Mesh | None) -> None:
        fail(error, self.place, mesh, self.watchdog)
        self.recorder.close()  # in another program's process

    def close(self) -> None:
        self.recorder.close()
        if self.watchdog is not None:
            self.watchdog.close()
        if self.heartbeats is not None:
            self.heartbeats.close()
