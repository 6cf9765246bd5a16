"""A rank's end of its host's heartbeat: starts the host's process or finds it, and
ends the rank when that says so.
"""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

import torch.distributed as dist

from megacore.distributed.rank_info import RankInfo
from megacore.errors import shown
from megacore.files import ROOT
from megacore.tools.diagnosis import heartbeat
from megacore.tools.diagnosis.beats import TOKEN_BYTES, RankStates, same_user
from megacore.tools.diagnosis.failure_note import FailureNote
from megacore.tools.diagnosis.store_kv import StoreKV
from megacore.tools.error_report import record
from megacore.tools.processes import machine

LOOK_SECONDS = 0.5
FOUND_SECONDS = 120.0  # for the other ranks of this host, and for rank 0, to come
LOST_HOST = 1  # exit status
# of a report, which is one line of at most `heartbeat.LINE_BYTES`
REASON_CHARACTERS = 600
MOST_BLAMED = 16


class HeartbeatClient:
    """Watches over the hosts of a run from when this rank has reached the store.

    Call `report` before the rank ends because of a failure, and `close` before it ends well.
    """

    def __init__(
        self, store: dist.Store, place: RankInfo, seconds: float | None, note: FailureNote | None = None
    ) -> None:
        """A host that is silent for `seconds` is lost; None: hosts are not watched.

        `note`: where a failure is recorded. A run on one host has no heartbeats, because the launcher sees
        its ranks end; there ranks record failures themselves.
        """
        self.store, self.place, self.seconds, self.note = store, place, seconds, note
        self.states: RankStates | None = None  # of all ranks, as rank 0's host says; None: not known
        self.token = ""
        self.connection: socket.socket | None = None
        self.closed = False
        has_other_hosts = place.local_world_size < place.world_size
        if seconds is not None and has_other_hosts and sys.platform == "linux":
            threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def close(self) -> None:
        """Takes leave. Without it, the end of this process counts as a fault."""
        self.closed = True
        if self.connection is not None:
            with contextlib.suppress(OSError):
                self._tell(farewell=True)
                self.connection.shutdown(socket.SHUT_RDWR)

    @property
    def settle_seconds(self) -> float:
        """How long a host may be down before `state` reports it; 0 if hosts are not watched."""
        if self.seconds is None or self.states is None:
            return 0.0
        return (heartbeat.FEW + 2) * self.seconds / heartbeat.BEATS

    def state(self, rank: int) -> str:
        """The state of a rank's process on any host, as `RankStates.state`; ? if hosts are not watched."""
        states = self.states  # the heartbeats' thread may set it to None
        return "?" if states is None else states.state(rank)

    def report(self, reason: str, ranks: Sequence[int]) -> None:
        """Tell this host's process why this rank ends, before it does; `ranks` are those to blame.

        Without such a process the reason is recorded in the run's folder directly.
        """
        reason = shown(reason)[:REASON_CHARACTERS]
        if self.connection is not None:
            with contextlib.suppress(OSError):
                self._tell(reason=reason, ranks=list(ranks[:MOST_BLAMED]))
                return
        if self.note is not None:
            self.note.add(reason)

    def _run(self) -> None:
        try:
            lines = self._join()
            while "verdict" not in (message := heard(lines)):
                self.states = RankStates(**message["states"])
            verdict: str = message["verdict"]
        except Exception as error:
            self.states = None  # they would be out of date
            # Without this line users would not know that this host is not watched. Without the store the
            # watchdog ends it.
            if not self.closed:
                heartbeat.say(f"rank {self.place.rank} on {socket.gethostname()} has none: {error}")
            return
        record(f"heartbeat: {verdict}")
        os._exit(LOST_HOST)  # the process has said the verdict, once for all ranks of the host

    def _join(self) -> IO[bytes]:
        """Joins the process of this host, which is started if there is none;
        returns what it says from then on.
        """
        # a connection of this thread's own
        notices, rank, host = StoreKV(self.store), self.place.rank, machine()
        self.token = notices.first("heartbeat/token", secrets.token_hex(TOKEN_BYTES))
        starts = notices.is_first(f"heartbeat/{host}", str(rank))
        if starts:
            notices.write(f"heartbeat/{host}/door", self._start())
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect("\0" + self._asked(notices, f"heartbeat/{host}/door"))
        if not same_user(connection):
            raise OSError("another user's process has taken the place of its own")
        # before any farewell, which would come from nobody
        connection.send(self._line(rank=rank, pid=os.getpid()))
        self.connection = connection
        if self.closed:
            self.close()
        lines = connection.makefile("rb")
        port = heard(lines)["port"]
        if rank == 0:
            notices.write("heartbeat/hub", [self.place.master_address, port])
        elif starts:
            self._tell(hub=self._asked(notices, "heartbeat/hub"))
        return lines

    def _start(self) -> str:
        """Starts this host's process; returns the name of its door."""
        note = self.note and {"folder": str(self.note.folder.resolve()), "start": self.note.start}
        settings = {
            "name": socket.gethostname(),
            "token": self.token,
            "seconds": self.seconds,
            "world_size": self.place.world_size,
            "note": note,
        }
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        # In a session of its own: what ends the ranks' process group does not end it.
        process = subprocess.Popen(
            [sys.executable, "-m", heartbeat.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        with process.stdin as said, process.stdout as answer:
            said.write(json.dumps(settings) + "\n")
            said.close()
            return answer.readline().strip()

    def _asked(self, notices: StoreKV, key: str) -> Any:
        """What another rank writes under a key, as soon as it has."""
        deadline = time.monotonic() + FOUND_SECONDS
        while not (found := notices.read([key])):
            if time.monotonic() > deadline:
                raise OSError(f"nobody has told of {key.partition('/')[2]} within {FOUND_SECONDS:.0f} s")
            time.sleep(LOOK_SECONDS)
        return found[key]

    def _tell(self, **message: Any) -> None:
        assert self.connection is not None
        self.connection.send(self._line(**message))

    def _line(self, **message: Any) -> bytes:
        return f"{self.token}{json.dumps(message, ensure_ascii=False)}\n".encode()


def heard(lines: IO[bytes]) -> dict[str, Any]:
    """What the process of this host says next. Raises `OSError` if it has ended."""
    if not (line := lines.readline()):
        raise OSError("its process, which watched this host, has ended")
    found: dict[str, Any] = json.loads(line)
    return found
