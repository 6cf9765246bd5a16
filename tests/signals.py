"""Sends SIGTERM and Ctrl-C to commands in the phases of a run, and prints how they end.

    python -m tests.signals [PHASE ...]

A command runs alone or as two ranks under torchrun. It stops at the beginning of a phase long enough to
be signalled there. SIGTERM goes to the command's first process, as a scheduler sends it, and SIGINT to
the process group, as a terminal sends it.
"""

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from itertools import product
from pathlib import Path
from typing import Any

from megacore.tools.local_ranks import free_port
from tests.pool import PATIENCE, ROOT

Reach = Callable[[], None]
STATUS = "status_{}"  # a file with the exit status of a rank
REACHED = "reached_{}"  # a file of a rank that has reached the phase
HOLD_SECONDS = 1.0  # that a phase is held, for the signal to come within it
AGAIN_SECONDS = 2.0  # between two signals
FOR_EVER = 3600.0


@dataclass(frozen=True)
class Phase:
    """A phase of a script, and how to notice it."""

    watch: Callable[[Reach], None]  # installs what calls its argument when the phase begins
    saves: bool = False  # whether a signal lets the step end and saves it
    script: str = "pretrain"
    overrides: tuple[str, ...] = ()
    alone: tuple[tuple[str, str], ...] = ()  # variables of the environment of a command alone
    signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT)
    times: int = 1  # that the signal is sent
    launchers: tuple[str, ...] = ("alone", "torchrun")


def watch_importing(reach: Reach) -> None:
    class Finder(MetaPathFinder):
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "torch.nn":
                reach()

    sys.meta_path.insert(0, Finder())


def watch_meeting(reach: Reach) -> None:
    """Rank 1 waits for a key that no rank writes into the store; alone, for rank 0 to open it."""
    from megacore.distributed import init

    meet = init.meet

    def wait(*args: Any) -> Any:
        reach()
        store = meet(*args)
        if os.environ["RANK"] == "1":
            assert store is not None
            store.get("never written")
        return store

    init.meet = wait


def watch_connecting(reach: Reach) -> None:
    """Rank 0 waits in gloo for rank 1, which does not come."""
    from megacore.distributed import init

    class LateMesh(init.Mesh):  # type: ignore[name-defined]
        def __init__(self, *args: Any, **options: Any) -> None:
            reach()
            if os.environ["RANK"] == "1":
                time.sleep(FOR_EVER)
            super().__init__(*args, **options)

    init.Mesh = LateMesh  # type: ignore[attr-defined]


def watch_compiling(reach: Reach) -> None:
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(lambda *_: reach())


def in_step(number: int, act: Callable[[], object]) -> None:
    """Call `act` in the middle of a step."""
    from megacore.train.step import TrainStep

    begin = TrainStep.begin

    def held(self: TrainStep, step: int) -> None:
        begin(self, step)
        if step == number:
            act()

    TrainStep.begin = held  # type: ignore[method-assign]


def hold(reach: Reach) -> None:
    reach()
    time.sleep(HOLD_SECONDS)


def hold_before(owner: Any, name: str, reach: Reach) -> None:
    """Hold the phase at each call of a function of a module, or of a method of a class."""
    function = getattr(owner, name)

    def held(*args: Any, **options: Any) -> Any:
        hold(reach)
        return function(*args, **options)

    setattr(owner, name, held)


def watch_first_step(reach: Reach) -> None:
    in_step(1, lambda: hold(reach))


def watch_step(reach: Reach) -> None:
    in_step(3, lambda: hold(reach))


def watch_hanging(reach: Reach) -> None:
    """Rank 1 never enters the collective in which rank 0 waits."""

    def hang() -> None:
        reach()
        if os.environ.get("RANK", "1") == "1":
            time.sleep(FOR_EVER)

    in_step(3, hang)


def watch_saving(reach: Reach) -> None:
    from megacore.checkpoint import saver

    write_rank = saver.write_rank

    def slow(*args: Any) -> None:
        write_rank(*args)
        hold(reach)

    saver.write_rank = slow


def watch_validating(reach: Reach) -> None:
    from megacore.train import trainer

    hold_before(trainer, "evaluate", reach)


def watch_evaluating(reach: Reach) -> None:
    from megacore.train import evaluation

    hold_before(evaluation, "evaluate", reach)


def watch_generating(reach: Reach) -> None:
    from megacore.tools.text.decoding import Decoder

    hold_before(Decoder, "read", reach)


def watch_preparing(reach: Reach) -> None:
    from megacore.tools.prepare.indexed_writer import IndexedWriter

    hold_before(IndexedWriter, "write", reach)


RANK_0 = (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2"))
RANK_1 = (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2"))
PHASES = {
    "importing": Phase(watch_importing),
    "meeting": Phase(watch_meeting, alone=RANK_1),
    "connecting": Phase(watch_connecting, alone=RANK_0),
    "compiling": Phase(watch_compiling, overrides=("train.compile=true",)),
    "first step": Phase(watch_first_step, saves=True),
    "step": Phase(watch_step, saves=True),
    "saving": Phase(watch_saving, saves=True, overrides=("checkpoint.every=2",)),
    "validating": Phase(watch_validating, saves=True, overrides=("train.eval_every=2",)),
    "evaluating": Phase(watch_evaluating, script="evaluate"),
    "generating": Phase(watch_generating, script="generate"),
    "preparing": Phase(watch_preparing, script="prepare", launchers=("alone",)),
    "hanging": Phase(watch_hanging, signals=(signal.SIGINT,), times=2),
}


def play(phase: Phase, folder: Path, script: str, arguments: list[str]) -> None:
    """Become one rank of the script, which notes when it reaches the phase and how it ends."""
    rank = os.environ.get("RANK", "0")
    leave = os._exit

    def note_status(status: int) -> None:
        (folder / STATUS.format(rank)).write_text(str(status))
        leave(status)

    os._exit = note_status  # type: ignore[assignment]
    if os.environ.get("PLANTED"):  # the fault that signals are heard in the main thread alone
        signal.set_wakeup_fd = lambda *_, **options: -1  # type: ignore[assignment]
    phase.watch((folder / REACHED.format(rank)).touch)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


@dataclass(frozen=True)
class End:
    """How a command has ended after a signal."""

    status: int  # as a shell reports it
    seconds: float  # since the (last) signal
    rank_statuses: dict[int, int]  # of ranks that have ended by themselves
    left: list[int]  # processes that had not ended with it
    output: str


def command_in(name: str, launcher: str, inputs: Path, folder: Path) -> list[str]:
    """The command that stops in a phase; `inputs`: as `write_inputs` leaves them."""
    phase = PHASES[name]
    checkpoint = ["--checkpoint", f"{inputs}/weights"]
    arguments = {
        "pretrain": ["--config", f"{inputs}/config.json", f"log.dir={folder}/run", *phase.overrides],
        "evaluate": [*checkpoint, "--data", f"{inputs}/corpus"],
        "generate": [*checkpoint, "--prompt", "a", "--tokens", "100"],
        "prepare": ["--input", f"{inputs}/text.txt", "--output", f"{folder}/text", "--tokenizer", "bytes"],
    }[phase.script]
    if launcher == "torchrun" and phase.script == "generate":
        arguments.append("parallel.tensor=2")
    rank = ["-m", "tests.signals", "--play", name, str(folder), f"launch/{phase.script}.py", *arguments]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [sys.executable, *(torchrun if launcher == "torchrun" else []), *rank]


def end_in(
    name: str,
    number: signal.Signals,
    launcher: str,
    inputs: Path,
    folder: Path,
    patience: float = PATIENCE,
    **variables: str,
) -> End:
    """Start a command in `folder`, signal it in a phase, and wait for its end for `patience` seconds.

    `variables` are added to its environment.
    """
    folder.mkdir()
    phase = PHASES[name]
    place = dict(phase.alone) if launcher == "alone" else {}
    inherited = {key: value for key, value in os.environ.items() if key not in dict(RANK_0)}
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            command_in(name, launcher, inputs, folder),
            cwd=ROOT,
            env=inherited | {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())} | place | variables,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=heed_interrupts,
        )
        try:
            ranks = [int(place.get("RANK", 0))] if launcher == "alone" else [0, 1]
            deadline = time.monotonic() + PATIENCE
            while not all((folder / REACHED.format(rank)).exists() for rank in ranks):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"{name} not reached:\n{(folder / 'output').read_text()[-3000:]}")
                time.sleep(0.02)
            for wait in (HOLD_SECONDS / 3, *[AGAIN_SECONDS] * (phase.times - 1)):
                time.sleep(wait)
                signalled = time.monotonic()
                (os.kill if number == signal.SIGTERM else os.killpg)(process.pid, number)
            status = process.wait(patience)
            seconds = time.monotonic() - signalled
        finally:
            left = kill_session(process.pid)
        output.seek(0)
        files = {rank: folder / STATUS.format(rank) for rank in range(2)}
        statuses = {rank: int(file.read_text()) for rank, file in files.items() if file.exists()}
        return End(128 - status if status < 0 else status, seconds, statuses, left, output.read())


def heed_interrupts() -> None:
    """A command in the background, as of a shell script, would ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def kill_session(leader: int) -> list[int]:
    """End the processes that a command has left in its session; return their ids."""
    left = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, _, fields = stat.read_text().rpartition(")")
        except OSError:  # it has ended just now
            continue
        state, _, _, session = fields.split()[:4]
        if int(session) == leader and state != "Z":
            left.append(int(stat.parent.name))
            os.kill(left[-1], signal.SIGKILL)
    return left


def write_inputs(folder: Path) -> None:
    """Write a config, a corpus, a text and a checkpoint for the commands of all phases."""
    from tests.build import run_of
    from tests.training import write_config, write_corpus, write_weights

    corpus = write_corpus(folder)
    model = {"vocab_size": 257}
    config = write_config(
        folder, corpus, model=model, data={"train": corpus, "valid": corpus, "tokenizer": "bytes"}
    )
    write_weights(folder / "weights", run_of(config))
    (folder / "text.txt").write_text("To be, or not to be.\n" * 1000)


def main(names: list[str]) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as temporary:
        inputs = Path(temporary)
        write_inputs(inputs)
        print("| phase | signal | launcher | status | of ranks | seconds |\n|---|---|---|---|---|---|")
        for name in names or PHASES:
            phase = PHASES[name]
            for number, launcher in product(phase.signals, phase.launchers):
                folder = inputs / f"{name} {number.name} {launcher}"
                end = end_in(name, number, launcher, inputs, folder)
                ranks = ", ".join(map(str, end.rank_statuses.values()))
                print(f"| {name} | {number.name} | {launcher} | {end.status} | {ranks} | {end.seconds:.1f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--play"]:
        _, _, name, place, script, *arguments = sys.argv
        play(PHASES[name], Path(place), script, arguments)
    else:
        main(sys.argv[1:])
