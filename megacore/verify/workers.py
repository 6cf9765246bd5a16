"""Keeps the ranks' processes alive from one layout to the next, because importing torch takes seconds."""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megacore.distributed.place import free_port, rank_environment
from megacore.errors import ConfigError
from megacore.verify.worker import PROTOCOL


class RankFailed(RuntimeError):
    """A rank raised, died or hung; the message is one line, `report` its traceback."""

    def __init__(self, rank: int, reason: str, report: str = "") -> None:
        super().__init__(f"rank {rank}: {reason}")
        self.report = report


class Workers:
    """Processes that run the code of one checkout. There are as many as the largest layout so far needs."""

    def __init__(self, checkout: Path) -> None:
        if not (checkout / "megacore" / "verify" / "worker.py").is_file():
            raise ConfigError("--against", f"{checkout} is no checkout of megacore that has launch/verify.py", "the root of one")
        self.checkout = checkout
        self.processes: list[subprocess.Popen[str]] = []
        self.complaints: list[Any] = []  # the stderr of each

    def run(self, world: int, task: dict[str, Any], timeout: float = 300.0) -> None:
        """Gives `task` to ranks 0 … world − 1 and waits for all. Raises `RankFailed` with the first failure.

        Raises `ConfigError` if that is the user's mistake, such as a key that the checkout does not know.
        """
        try:
            self._grow(world)
            port = free_port()
            for rank in range(world):
                self._send(rank, task | {"environment": rank_environment(rank, world, port)})
            self._collect(world, time.monotonic() + timeout)
        except BaseException:
            self.close()  # the others may wait for the one that failed
            raise

    def close(self) -> None:
        """Ends the processes; the next `run` starts new ones."""
        for process in self.processes:
            process.kill()
        for process, complaints in zip(self.processes, self.complaints, strict=True):
            process.communicate()
            complaints.close()
        self.processes.clear()
        self.complaints.clear()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _grow(self, world: int) -> None:
        path = os.pathsep.join(filter(None, (str(self.checkout), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        fresh = range(len(self.processes), world)
        for _ in fresh:
            self.complaints.append(tempfile.TemporaryFile("w+"))  # noqa: SIM115 (closed by `close`)
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "megacore.verify.worker"],
                    cwd=self.checkout,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self.complaints[-1],
                    text=True,
                )
            )
        for rank in fresh:
            hello = self._receive(rank)
            if hello["protocol"] != PROTOCOL:
                wrong = f"{self.checkout} speaks version {hello['protocol']} of verify's protocol, and this one version {PROTOCOL}"
                raise ConfigError("--against", wrong, "a checkout with the same version")

    def _send(self, rank: int, task: dict[str, Any]) -> None:
        stdin = self.processes[rank].stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(task) + "\n")
            stdin.flush()
        except BrokenPipeError:  # it has died since its last task: `_receive` says why
            self._receive(rank)

    def _collect(self, world: int, deadline: float) -> None:
        waiting = {stream: rank for rank, process in enumerate(self.processes[:world]) if (stream := process.stdout) is not None}
        failures: list[tuple[float, int, dict[str, Any]]] = []
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for stream in ready:
                rank = waiting.pop(stream)
                answer = self._receive(rank)
                if answer["error"]:
                    failures.append((answer["finished"], rank, answer))
            if failures:  # other errors may still come, or the others may wait for ever
                deadline = min(deadline, time.monotonic() + 1.0)
        if failures:
            _, rank, answer = min(failures, key=lambda failure: failure[:2])
            if "mistake" in answer:
                where, wrong, right = answer["mistake"]
                raise ConfigError(where, f"{wrong}, says {self.checkout}", right)
            silent = f" (no answer from ranks {', '.join(map(str, sorted(waiting.values())))})" if waiting else ""
            raise RankFailed(rank, answer["error"] + silent, answer.get("traceback", ""))
        if waiting:
            raise RankFailed(min(waiting.values()), f"no answer in time, from {len(waiting)} of {world} ranks")

    def _receive(self, rank: int) -> dict[str, Any]:
        stdout = self.processes[rank].stdout
        assert stdout is not None
        line = stdout.readline()
        if line:
            return json.loads(line)
        status = self.processes[rank].wait()
        self.complaints[rank].seek(0)
        lines = self.complaints[rank].read().splitlines()
        raise RankFailed(rank, f"ended with status {status}{': ' + lines[-1] if lines else ''}", "\n".join(lines))
