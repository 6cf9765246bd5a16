"""Hands a run's figures to Weights & Biases (`log.wandb`), one run for each run's folder.

A process of its own talks to wandb, so that no slow network, lost connection or error there reaches training.
Run as a module, this
file is that process: it reads a line of JSON about the run from stdin, and then lines of figures until stdin
ends.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from megacore.config import Config
from megacore.errors import ConfigError
from megacore.files import ROOT
from megacore.tools.metrics_file import as_json
from megacore.tools.monitoring.tags import tagged
from megacore.train.callbacks import Callback

if TYPE_CHECKING:  # this file also runs as a process without torch
    from megacore.distributed.mesh import Mesh

GRACE = 20.0  # seconds that a run which has ended waits for what wandb has not sent yet
COMMAND = [sys.executable, "-m", "megacore.tools.monitoring.wandb"]


def check_wandb(config: Config) -> None:
    """Raises `ConfigError` if `log.wandb` needs a package that is missing."""
    if config.log.wandb != "off" and find_spec("wandb") is None:
        raise ConfigError("log.wandb", "wandb is not installed", "pip install 'megacore[wandb]', or off")


class Tracker(Callback):
    """Passes figures on to the process.

    Only `on_end` waits for it, for `GRACE` seconds at most.
    """

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.failed = False  # which was reported

    def on_start(self, config: Config, mesh: "Mesh") -> None:
        self.config, self.mesh = config, mesh
        self.patterns = config.log.figures

    def on_records_open(self, folder: Path, first_step: int) -> None:
        """Start the process."""
        if self.process is not None:  # the run's folder was deleted, and wandb's run continues
            return
        self.log = folder / "wandb" / "process.log"
        about = {
            "mode": self.config.log.wandb,
            "id": run_id(folder / "wandb", first_step),
            "name": folder.name,
            "dir": str(folder),
            "config": self.config.model_dump(mode="json", by_alias=True),
        }
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with self.log.open("w", encoding="utf-8") as log:
            # In a session of its own: it ends when its input does, whatever signal the run gets.
            self.process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": path, "WANDB_SILENT": "true"},
            )
        self.lines: SimpleQueue[str | None] = SimpleQueue()
        self.lines.put(json.dumps(about))
        self.thread = threading.Thread(target=self._pass_on, name="wandb", daemon=True)
        self.thread.start()

    def on_record(self, record: dict[str, Any]) -> None:
        """Pass on the metrics of a line of metrics.jsonl, by their tags."""
        self.lines.put(as_json({"step": record["step"], **tagged(record, self.patterns)}))

    def _pass_on(self) -> None:
        """Writes lines to the process until there are no more. It may wait for ever: nobody waits for it."""
        assert self.process is not None and self.process.stdin is not None
        pipe = self.process.stdin
        try:
            while (line := self.lines.get()) is not None:
                pipe.write(line + "\n")
                pipe.flush()
            pipe.close()
        except OSError:  # it has ended
            self._failed()

    def _failed(self) -> None:
        if self.failed:
            return
        self.failed = True
        said = [
            line
            for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            if line.strip()
        ]
        why = f" ({said[-1].strip()[:200]})" if said else ""
        self.mesh.print(
            f"WARNING: wandb gets no more figures{why}; training continues, and metrics.jsonl has them all"
        )

    def on_end(self) -> None:
        """Lets the process send what is left. If that takes too long, ends it."""
        if self.process is None:
            return
        self.lines.put(None)
        self.thread.join(GRACE)
        process, self.process = self.process, None
        try:
            if process.wait(GRACE) and not self.thread.is_alive():
                self._failed()
        except subprocess.TimeoutExpired:
            self.failed = True
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self.mesh.print(
                f"WARNING: wandb has not sent all figures within {GRACE:g} s; metrics.jsonl has them all"
            )


def run_id(folder: Path, first_step: int) -> str:
    """The id of the run in wandb: that of the run that goes on, or a new one for a run that begins."""
    file = folder / "run_id"
    folder.mkdir(parents=True, exist_ok=True)
    if first_step == 1 or not file.exists():
        file.write_text(secrets.token_hex(4) + "\n", encoding="ascii")
    return file.read_text(encoding="ascii").strip()


def send() -> None:
    """The process: logs what stdin brings."""
    import wandb

    about = json.loads(sys.stdin.readline())
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "megacore"),
        id=about["id"],
        name=about["name"],
        dir=about["dir"],
        config=about["config"],
        mode=about["mode"],
        # offline, wandb joins the parts when it sends them
        resume="allow" if about["mode"] == "online" else None,
        settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
    )
    for line in sys.stdin:
        figures = json.loads(line)
        run.log(
            {tag: value for tag, value in figures.items() if tag != "step" and value is not None},
            step=figures["step"],
        )
    # Whoever started this may be gone; it must not stay for ever.
    late = threading.Timer(2 * GRACE, lambda: os._exit(1))
    late.daemon = True
    late.start()
    run.finish()


if __name__ == "__main__":
    send()
