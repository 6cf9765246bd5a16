"""Faults for drills. A fault wraps one of the trainer's methods; training itself contains nothing of it."""

import errno
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from megacore.config.schema import Config, resolved
from megacore.errors import ConfigError
from megacore.model.batch import Microbatch
from megacore.train.trainer import Trainer

LONGEST = 86400.0  # seconds
SPEC = "KIND:rank=R,step=N, such as kill:rank=3,step=7"


@dataclass(frozen=True)
class Fault:
    """A kind of fault, its rank, and the step at whose beginning it strikes, once
    however often the run starts.
    """

    kind: str
    rank: int
    step: int
    options: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.kind}:rank={self.rank},step={self.step}" + "".join(
            f",{key}={value:g}" for key, value in self.options.items()
        )

    def mark(self, folder: Path) -> Path:
        """The file that records that the fault has struck, and when."""
        return folder / f"drill_{self.kind}_{self.rank}_{self.step}"


def parse(text: str) -> Fault:
    """Reads a fault from text of the form `SPEC`. Raises `ConfigError`."""
    kind, _, rest = text.partition(":")
    try:
        options = {key: value for key, _, value in (pair.partition("=") for pair in rest.split(",") if pair)}
        rank, step = int(options.pop("rank", 0)), int(options.pop("step", 2))
        fault = Fault(kind, rank, step, {key: float(value) for key, value in options.items()})
    except ValueError:
        raise ConfigError("--fault", f"{text} is none", SPEC) from None
    if kind not in KINDS:
        raise ConfigError("--fault", f"{kind} is no kind of fault", " ".join(KINDS))
    if unknown := set(options) - {"seconds"}:
        raise ConfigError("--fault", f"{text}: {min(unknown)} is unknown", "rank, step, seconds")
    if not 0 <= fault.options.get("seconds", 0.0) <= LONGEST:
        raise ConfigError(
            "--fault", f"{text}: its seconds are not usable", f"seconds=0 to seconds={LONGEST:g}"
        )
    return fault


def check(fault: Fault, config: Config, ranks: int) -> None:
    """Refuses a fault that could not strike, or after which no run could go on. Raises `ConfigError`."""

    def refuse(wrong: str, right: str) -> NoReturn:
        raise ConfigError("--fault", f"{fault.name}: {wrong}", right)

    saves, first, last = config.checkpoint, 1, config.train.steps
    if not 0 <= fault.rank < ranks:
        refuse(f"there are {ranks} ranks", f"rank=0 to rank={ranks - 1}, or more --world")
    if fault.kind in ("corrupt", "disk_full") and not saves.every:
        refuse("checkpoint.every=0 saves none on the way", "checkpoint.every=4")
    if fault.kind == "disk_full" and not saves.last and fault.step > last // saves.every * saves.every:
        refuse("nothing is saved from that step on", "checkpoint.last=true")
    if fault.kind == "disk_full" and saves.on_failure == "continue":
        refuse("nothing has to restart with checkpoint.on_failure=continue", "checkpoint.on_failure=stop")
    if fault.kind == "corrupt":  # it damages the newest checkpoint: one before it must be there
        first = 2 * saves.every + 1
        older = (fault.step - 1) // saves.every * saves.every - saves.every
        if saves.keep < 2 and not (saves.keep_every and older % saves.keep_every == 0):
            refuse("checkpoint.keep=1 keeps none to fall back to", "checkpoint.keep=2")
    if not first <= fault.step <= last:
        why = f"the run has {last} steps" + (
            f", its second checkpoint is of step {first - 1}" if first > 1 else ""
        )
        refuse(why, f"step={first} to step={last}" if first <= last else "more train.steps")


Strike = Callable[[Trainer, Fault], None]


def signalled(number: signal.Signals) -> Strike:
    """A fault that sends a signal to the rank's process."""
    return lambda trainer, fault: os.kill(os.getpid(), number)


def raising(error: Exception) -> Strike:
    """A fault that raises an error in the rank."""

    def strike(trainer: Trainer, fault: Fault) -> NoReturn:
        raise error

    return strike


def slow(trainer: Trainer, fault: Fault) -> None:
    """Makes this step and all after it longer on this rank: by `seconds`, or to three times as long."""
    run, began, usual = trainer.loader.read, 0.0, 0.0

    def step(number: int) -> Any:
        nonlocal began, usual
        if began and not usual:
            usual = time.monotonic() - began
        time.sleep(fault.options.get("seconds", max(0.5, 2 * usual)))
        began = time.monotonic()
        return run(number)

    trainer.loader.read = step  # type: ignore[assignment, method-assign]


def nan(trainer: Trainer, fault: Fault) -> None:
    """Makes a gradient NaN on this rank alone, as a faulty device would."""
    step = trainer.engine.step

    def poisoned(*args: Any) -> Any:
        piece, _ = next(iter(trainer.engine.gradients().values()))
        piece.fill_(torch.nan)
        trainer.engine.step = step  # type: ignore[method-assign]
        return step(*args)

    trainer.engine.step = poisoned  # type: ignore[assignment, method-assign]


def disk_full(trainer: Trainer, fault: Fault) -> None:
    """Makes the next save find a full disk."""
    sync = os.fsync

    def refuse(descriptor: int) -> NoReturn:
        os.fsync = sync
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.fsync = refuse  # type: ignore[assignment]


def corrupt(trainer: Trainer, fault: Fault) -> None:
    """Flips a bit of the newest checkpoint and kills the rank, so that the next start has to read it."""
    every = trainer.config.checkpoint.every
    newest = folder_of(trainer) / "checkpoints" / f"step_{(trainer.step - 1) // every * every:08d}"
    while not newest.exists():  # it may be under way, beside training
        time.sleep(0.05)
    file = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    with file.open("r+b") as out:
        out.seek(file.stat().st_size * 3 // 4)
        byte = out.read(1)[0]
        out.seek(-1, os.SEEK_CUR)
        out.write(bytes([byte ^ 1]))
    KINDS["kill"](trainer, fault)


KINDS: dict[str, Strike] = {
    "kill": signalled(signal.SIGKILL),  # as the kernel does when memory runs out
    "stop": signalled(signal.SIGSTOP),  # without ending it, as a debugger does
    "exit": lambda trainer, fault: os._exit(7),  # silently
    "exception": raising(ValueError("the drill's exception")),
    "oom": raising(torch.OutOfMemoryError("the drill's device is out of memory")),
    "hang": lambda trainer, fault: time.sleep(fault.options.get("seconds", 3600.0)),  # in Python
    "slow": slow,
    "nan": nan,
    "sigterm": signalled(signal.SIGTERM),  # as a scheduler does before it takes the machine away
    "disk_full": disk_full,
    "corrupt": corrupt,
}


def folder_of(trainer: Trainer) -> Path:
    """The run's folder."""
    return Path(resolved(trainer.config.log.dir))


def install(fault: Fault) -> None:
    """Prepares the fault to strike in this process, if it is the rank."""
    next_batch = Trainer.next_batch

    def struck(self: Trainer) -> list[Microbatch]:
        if (
            self.step == fault.step
            and self.mesh.place.rank == fault.rank
            and strike_once(fault.mark(folder_of(self)))
        ):
            KINDS[fault.kind](self, fault)
        return next_batch(self)

    Trainer.next_batch = struck  # type: ignore[method-assign]


def strike_once(mark: Path) -> bool:
    """Whether the fault strikes for the first time; writes the time to `mark`."""
    try:
        with mark.open("x") as out:
            out.write(str(time.time()))
            out.flush()
            os.fsync(out.fileno())
    except FileExistsError:
        return False
    return True
