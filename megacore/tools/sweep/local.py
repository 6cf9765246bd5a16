"""Runs trials on this machine, several at a time, until all have ended or somebody asks them to stop."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Self

from megacore.distributed.processes import available_cores
from megacore.errors import shown
from megacore.files import LAUNCH
from megacore.tools.launchers import LAUNCHERS
from megacore.tools.processes import descendants
from megacore.tools.stop_request import STOP, requests
from megacore.tools.sweep.folder import SweepFolder
from megacore.tools.sweep.results import figure, last_line, row_of
from megacore.tools.sweep.trials import Trial

LOOK_SECONDS = 0.2
SCRIPT = LAUNCH / "pretrain.py"
OUTPUT = "output.txt"
RANKS_OWN = {name for names in LAUNCHERS.values() for name in names}


class Stopping:
    """A context in which signals ask a sweep to stop. After a second one trials are not waited for."""

    requested = False
    at_once = False

    def __enter__(self) -> Self:
        self.previous = {number: signal.signal(number, self._handle) for number in requests()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.at_once = self.requested
        self.requested = True


class Local:
    """This machine: some places, in each of which a trial runs."""

    def __init__(self, folder: SweepFolder, at_once: int, gpus: list[str], last: int) -> None:
        """`gpus`: those that trials share out among themselves; none: trials run on the cores."""
        self.folder, self.at_once, self.last = folder, at_once, last
        self.free = list(gpus)
        self.running: dict[Trial, tuple[subprocess.Popen[bytes], list[str]]] = {}

    def run(self, trials: Iterable[Trial], stop: Stopping) -> None:
        """Runs them. A trial that fails does not end the others."""
        waiting = deque(trials)
        total, begun, asked = len(waiting), 0, False
        while self.running or (waiting and not stop.requested):
            while waiting and not stop.requested and len(self.running) < self.at_once:
                begun += 1
                print(f"{begun}/{total} {waiting[0].name or 'the config'}", flush=True)
                self.start(waiting.popleft())
            if stop.requested and not asked:
                asked = True
                print("stopping: trials save and end at their next step (once more: at once)", flush=True)
                for trial in self.running:
                    (self.folder.log_dir(trial) / STOP).touch()
            if stop.at_once:
                self.kill()
            for trial, (process, gpus) in list(self.running.items()):
                if (status := process.poll()) is not None:
                    del self.running[trial]
                    self.free += gpus
                    self.end(trial, status, stopped=asked)
            time.sleep(LOOK_SECONDS)

    def start(self, trial: Trial) -> None:
        """Starts a trial, in a session of its own: Ctrl-C reaches this process alone,
        which lets trials save.
        """
        folder = self.folder.log_dir(trial)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STOP).unlink(missing_ok=True)
        self.folder.ended.pop(trial.name, None)
        gpus, self.free = (self.free[: trial.ranks], self.free[trial.ranks :]) if self.free else ([], [])
        with (folder / OUTPUT).open("ab") as output:
            process = subprocess.Popen(
                command_of(trial, self.folder.config_of(trial)),
                env=environment(self.at_once * trial.ranks, gpus),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running[trial] = process, gpus

    def end(self, trial: Trial, status: int, *, stopped: bool) -> None:
        """Notes how a trial ended, and says it."""
        (self.folder.log_dir(trial) / STOP).unlink(missing_ok=True)
        row = row_of(self.folder, trial, self.last)
        if status == 0 or not (stopped or status == 75):
            self.folder.ended[trial.name] = status
            self.folder.note()
        if status == 0:
            print(
                f"  {trial.name}: loss {figure(row.loss)}, valid loss {figure(row.valid_loss)} in "
                f"{row.seconds:.0f} s",
                flush=True,
            )
        elif stopped or status == 75:
            print(f"  {trial.name}: stopped after step {row.step}", flush=True)
        else:
            why = shown(last_line(self.folder, trial))
            print(f"  {trial.name}: failed with status {status}: {why}", file=sys.stderr, flush=True)

    def kill(self) -> None:
        """Ends all trials at once. Launchers give ranks sessions of their own, so each process is named."""
        for process, _ in self.running.values():
            for pid in [process.pid, *descendants(process.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def command_of(trial: Trial, config: Path) -> list[str]:
    """What starts a trial here."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(trial.ranks)]
        if trial.ranks > 1
        else []
    )
    return [sys.executable, *launcher, str(SCRIPT), "--config", str(config)]


def environment(processes: int, gpus: list[str]) -> dict[str, str]:
    """The variables of a trial, of `processes` that compute here at a time: each has its part of the cores,
    unless the user says how many threads it has.
    """
    own = {name: value for name, value in os.environ.items() if name not in RANKS_OWN}
    own.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // processes)))
    return own | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
