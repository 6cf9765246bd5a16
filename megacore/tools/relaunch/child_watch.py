"""Watches over a supervisor from another process: if the supervisor is killed, it lets
the run save and stop.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from megacore.distributed.processes import ENDED, process_state
from megacore.files import ROOT
from megacore.tools.stop_request import STOP

LOOK_SECONDS = 0.2
END_SECONDS = 10.0


class ChildWatch:
    """A context with a process that notices when this one ends, in whatever way (Linux)."""

    def __init__(self, folder: Path, patience: float) -> None:
        """`folder`: the run's. `patience`: seconds that the run may take to stop."""
        self.command = [sys.executable, "-m", __name__, str(folder), str(patience)]

    def __enter__(self) -> "ChildWatch":
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        # In a session of its own: what ends the supervisor's terminal or process group does not end it.
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,
        )
        assert self.process.stdin is not None
        self.stdin = self.process.stdin
        return self

    def tell(self, launcher: int) -> None:
        """Tells the watch the process id of the running launcher; 0 when it has ended."""
        with contextlib.suppress(BrokenPipeError):  # somebody has killed the watch
            self.stdin.write(b"%d\n" % launcher)
            self.stdin.flush()

    def __exit__(self, *_: object) -> None:
        self.tell(0)
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def watch(launchers: Iterable[str], folder: Path, patience: float) -> None:
    """Reads `launchers`, the lines that `ChildWatch.tell` writes, until the supervisor ends.

    Then asks a launcher that is left to stop, by the file `STOP`, and ends it if it still runs after
    `patience` seconds.
    """
    launcher = 0
    for line in launchers:
        launcher = int(line)
    if not launcher or process_state(launcher) in (*ENDED, "?"):
        return
    from megacore.tools.relaunch.supervisor import end_tree, say

    say(f"the supervisor of process {launcher} was killed: its run is asked to stop at its next step")
    file, asked = folder / STOP, False
    try:
        with contextlib.suppress(FileExistsError):  # somebody's own request says the same
            file.open("x").close()
            asked = True
    except OSError:
        patience = 0.0  # there is no folder to ask in
    deadline = time.monotonic() + patience
    while process_state(launcher) not in ENDED and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    end_tree(launcher)
    if asked:
        file.unlink(missing_ok=True)


if __name__ == "__main__":
    watch(sys.stdin, Path(sys.argv[1]), float(sys.argv[2]))
