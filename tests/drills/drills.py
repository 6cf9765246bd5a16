"""Drills run a config twice, once with a fault under the supervisor and once without, and compare the two."""

import json
import random
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megacore.errors import ConfigError
from megacore.files import open_plain
from megacore.tools.local_ranks import free_port
from megacore.tools.metrics_file import recorded
from megacore.tools.processes import descendants
from megacore.tools.relaunch.supervisor import STOPPED, Supervisor, send
from tests.drills.faults import Fault

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = f"{sys.executable} -m torch.distributed.run --nproc-per-node {{ranks}} --master-port {{port}}"


@dataclass(frozen=True)
class Expected:
    """What must follow a fault."""

    cause: str  # a pattern that a line of output matches; {rank} and {step} are the fault's
    restarts: int = 1
    same_weights: bool = True


EXPECTED = {
    "kill": Expected(r"rank {rank} \(.*is dead"),
    "exit": Expected(r"rank {rank} \(.*is dead"),
    "stop": Expected(r"rank {rank} \(.*is stopped"),
    "exception": Expected(r"rank {rank} \(.*failed: ValueError"),
    "oom": Expected(r"rank {rank} \(.*failed: OutOfMemoryError"),
    "hang": Expected(r"rank {rank} \(.*is in tests/drills/faults.py"),
    "slow": Expected(r"rank {rank} holds up the others", restarts=0),
    "nan": Expected(r"step {step} skipped", restarts=0, same_weights=False),
    "sigterm": Expected(r"stopped on request after step {step}"),
    "disk_full": Expected(r"No space left on device"),
    "corrupt": Expected(r"checkpoint error: .*/step_\d+: .* has changed in .* since it was written"),
}


@dataclass
class Outcome:
    """The outcome of a drill. A figure is None if it does not apply or did not happen."""

    fault: str
    noticed_seconds: float | None  # from the fault to the line that names its cause
    cause: str | None  # that line
    restarts: int
    steps_lost: int | None
    final_step: int
    same_weights: bool  # whether they are bitwise those of the calm run
    as_expected: bool


@dataclass(frozen=True)
class Drill:
    """How the runs of a drill are started, and where they leave their folders."""

    config: str
    overrides: list[str]
    ranks: int
    folder: Path
    launcher: str = TORCHRUN
    verbose: bool = False

    def command(self, name: str, *strike: str) -> list[str]:
        """The launcher's command for one run."""
        launcher = launcher_words(self.launcher, self.ranks, free_port())
        script = "launch/drill.py" if strike else "launch/pretrain.py"
        return [
            *launcher,
            str(ROOT / script),
            *strike,
            "--config",
            self.config,
            *self.overrides,
            f"log.dir={self.folder / name}",
        ]

    def calm(self) -> Path:
        """Runs without a fault and returns the run's folder.

        Raises `ConfigError` if the run does not finish.
        """
        folder = self._fresh("calm")
        with self._kept(folder) as keep:
            status = finish(Supervisor(self.command("calm"), folder, restarts=0, listener=keep))
        if status:
            said = re.search(r"^\w+ error: .*", said_by(folder).read_text(encoding="utf-8"), re.MULTILINE)
            wrong = f"the run without a fault ended with status {status}" + (f", {said[0]}" if said else "")
            raise ConfigError("--config", wrong, f"all that it said is in {said_by(folder)}")
        return folder

    def strike(self, fault: Fault, calm: Path) -> Outcome:
        """Runs with a fault until the run has finished."""
        folder = self._fresh(fault.name.replace(":", "_").replace(",", "_").replace("=", ""))
        lines: list[tuple[float, str]] = []
        with self._kept(folder) as keep:

            def listen(line: str) -> None:
                lines.append((time.time(), line.rstrip("\n")))
                keep(line)

            supervisor = Supervisor(
                self.command(folder.name, "--strike", fault.name), folder, backoff=0.1, listener=listen
            )
            status = finish(supervisor)
            if status == STOPPED:  # a scheduler would start it again
                status = finish(supervisor)
        expected = EXPECTED[fault.kind]
        mark = fault.mark(folder)
        struck = float(mark.read_text()) if mark.exists() else None
        pattern = re.compile(
            expected.cause.replace("{rank}", str(fault.rank)).replace("{step}", str(fault.step))
        )
        found = next(
            (
                (at, line)
                for at, line in lines
                if struck is not None and at >= struck and pattern.search(line)
            ),
            None,
        )
        restarts = supervisor.attempts - 1
        resumed = [
            int(number) for _, line in lines for number in re.findall(r"resumed after step (\d+)", line)
        ]
        lost = fault.step - 1 - (resumed[-1] if resumed else 0) if restarts else 0
        same = status == 0 and same_weights(calm, folder)
        return Outcome(
            fault.name,
            None if found is None or struck is None else found[0] - struck,
            None if found is None else found[1],
            restarts,
            None if struck is None else max(0, lost),
            supervisor.progress()[1],
            same,
            status == 0
            and found is not None
            and restarts == expected.restarts
            and same == expected.same_weights,
        )

    def soak(self, seconds: float, seed: int) -> dict[str, object]:
        """Kills random ranks of a run for `seconds`, lets it finish, and compares it with a calm one."""
        calm = self.calm()
        folder = self._fresh("soak")
        with self._kept(folder) as keep:
            supervisor = Supervisor(self.command("soak"), folder, restarts=20, backoff=0.1, listener=keep)
            kills: list[float] = []
            done = threading.Event()
            killer = threading.Thread(
                target=kill_at_random,
                args=(supervisor, seconds, random.Random(seed), kills, done),
                daemon=True,
            )
            started = time.time()
            killer.start()
            try:
                status = finish(supervisor)
            finally:
                done.set()
                killer.join()
        losses = [last_loss(path) for path in (calm, folder)]
        return {
            "seconds": time.time() - started,
            "kills": len(kills),
            "restarts": supervisor.attempts - 1,
            "calm_loss": losses[0],
            "soak_loss": losses[1],
            "same_weights": status == 0 and same_weights(calm, folder),
            "as_expected": status == 0 and losses[0] == losses[1] and bool(kills),
        }

    def _fresh(self, name: str) -> Path:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    @contextmanager
    def _kept(self, folder: Path) -> Iterator[Callable[[str], None]]:
        """Keeps the lines that a run prints."""
        with said_by(folder).open("wb", buffering=0) as file:  # read while it runs, and after a kill

            def keep(line: str) -> None:
                # neither a full disk nor a line after the end may stop the thread that reads the run's pipe
                with suppress(OSError, ValueError):
                    file.write(line.encode())
                if self.verbose:
                    sys.stderr.write(line)

            yield keep


def finish(supervisor: Supervisor) -> int:
    """Return the exit status of a supervised run. A signal that asks it to stop ends the drill as well."""
    status = supervisor.run()
    if supervisor.asked():
        raise SystemExit(128 + supervisor.first_signal)
    return status


def launcher_words(launcher: str, ranks: int, port: int) -> list[str]:
    """Splits a launcher's command into words and fills in `{ranks}` and `{port}`.

    Raises `ValueError` if it is no command.
    """
    words = shlex.split(launcher)
    if not words:
        raise ValueError("it is empty")
    return [word.replace("{ranks}", str(ranks)).replace("{port}", str(port)) for word in words]


def check_launcher(launcher: str) -> None:
    """Raises `ConfigError` unless `launcher` is a command that this machine has."""
    right = "a command such as `mpirun -n {ranks} python`"
    try:
        word = launcher_words(launcher, 1, 0)[0]
    except ValueError as error:
        raise ConfigError("--launcher", f"`{launcher}` is no command: {str(error).lower()}", right) from None
    if shutil.which(word) is None:
        raise ConfigError("--launcher", f"there is no command {word}", right)


def said_by(folder: Path) -> Path:
    """The file that keeps the output of a drill's run."""
    return folder.with_name(f"{folder.name}.txt")


def kill_at_random(
    supervisor: Supervisor, seconds: float, chance: random.Random, kills: list[float], done: threading.Event
) -> None:
    """For `seconds`, kills one rank a few seconds after every start that has begun to train."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not done.is_set():
        before, attempt = supervisor.progress(), supervisor.attempts
        while supervisor.progress() == before and supervisor.attempts == attempt and not done.wait(0.1):
            continue
        if done.wait(chance.uniform(0.5, 5.0)) or supervisor.child is None:
            return
        ranks = [pid for pid in descendants(supervisor.child.pid) if is_rank(pid)]
        if ranks:
            send([chance.choice(ranks)], signal.SIGKILL)
            kills.append(time.monotonic())


def is_rank(pid: int) -> bool:
    """Whether a process trains, rather than launches."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    # behind the interpreter and its options
    return any(word.endswith(b"launch/pretrain.py") for word in words[1:3])


def last_loss(folder: Path) -> float | None:
    """The loss of a run's last logged step."""
    with open_plain(folder / "metrics.jsonl") as file:
        lines = [json.loads(line) for _, line in recorded(file)]
    return next((line["loss"] for line in reversed(lines) if "loss" in line), None)


def same_weights(one: Path, other: Path) -> bool:
    """Whether the newest checkpoints of two runs hold the same bits in every tensor, moments included."""
    from megacore.checkpoint import Reader, locate
    from megacore.tools.verify.checkpoint_diff import compare

    first, second = (Reader(locate(folder)) for folder in (one, other))
    return first.step == second.step and not any(compare(first, second))
