"""A run outlives its terminal, its standard output, its log folder and TensorBoard.

Without its records it saves, and ends.
"""

import contextlib
import errno
import io
import os
import select
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tensorboard.summary.writer.record_writer import RecordWriter

from megacore import checkpoint
from megacore.config.schema import resolved
from megacore.errors import LogError
from megacore.tools.records import Records
from megacore.train.step import StepResult
from megacore.train.trainer import FINISHED, STOPPED, Trainer
from tests import training
from tests.checkpoints import find_latest
from tests.commands import play
from tests.pool import CONTEXT, PATIENCE

ENDLESS = ("train.steps=1000000", "train.compile=false")  # a run so long would first measure compiled blocks


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("outliving")
    corpus = training.write_corpus(folder)
    # a warmup that ends, so that nothing is printed before the mesh
    return training.write_config(folder, corpus, train={"steps": 5}, optim={"warmup_steps": 2})


def _command(arguments: list[str], out: str, err: str, nohup: bool, report: str) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["TORCHELASTIC_ERROR_FILE"] = report
    play(
        ["launch/pretrain.py", *arguments],
        environment,
        [Path(out), Path(err)],
        out if out.startswith("/dev/pts") else "",
    )


@contextlib.contextmanager
def command(
    config: str, run: Path, *overrides: str, out: str, err: str, nohup: bool = False
) -> Iterator[BaseProcess]:
    """launch/pretrain.py in a session of its own, whose output goes to files, pipes or a terminal.

    `RUN.error` has the traceback, if it ends with one: a closed terminal shows nothing.
    """
    arguments = ["--config", config, f"log.dir={run}", *overrides]
    process = CONTEXT.Process(target=_command, args=(arguments, out, err, nohup, f"{run}.error"))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def wait_for(what: Callable[[], Any], process: BaseProcess) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.05)


def has_begun(run: Path) -> bool:
    return (run / "metrics.jsonl").exists() and len(training.metrics(run)) > 1


def ended(process: BaseProcess) -> int | None:
    process.join(PATIENCE)
    return process.exitcode


def test_a_closed_terminal_lets_the_run_save(config: str, tmp_path: Path) -> None:
    """The kernel sends SIGHUP then, and every write to the terminal fails."""
    master, slave = os.openpty()
    terminal, run = os.ttyname(slave), tmp_path / "run"
    with command(config, run, *ENDLESS, out=terminal, err=terminal) as process:

        def shown_and_begun() -> bool:
            if select.select([master], [], [], 0)[0]:
                os.read(master, 1 << 16)
            return has_begun(run)

        wait_for(shown_and_begun, process)
        os.close(slave)
        os.close(master)
        assert ended(process) == STOPPED, (
            Path(f"{run}.error").read_text() if Path(f"{run}.error").exists() else "without a traceback"
        )
    assert find_latest(run) is not None


def test_sighup_asks_to_stop_unless_it_was_ignored_at_the_start(config: str, tmp_path: Path) -> None:
    """Who starts a run with nohup says that a closed terminal means nothing."""
    files = {"out": f"{tmp_path}/out", "err": f"{tmp_path}/err"}
    for nohup in (True, False):
        run = tmp_path / f"run {nohup}"
        with command(config, run, *ENDLESS, nohup=nohup, **files) as process:
            wait_for(lambda run=run: has_begun(run), process)  # type: ignore[misc]
            assert process.pid is not None
            os.kill(process.pid, signal.SIGHUP)
            if nohup:
                steps = len(training.metrics(run))
                wait_for(lambda run=run, steps=steps: len(training.metrics(run)) > steps + 5, process)  # type: ignore[misc]
                (run / "STOP").touch()
            assert ended(process) == STOPPED
        assert (run / "STOP").exists() == nohup


@pytest.mark.parametrize("kind", ["pipe", "both pipes", "full"])
def test_standard_output_may_go_away(config: str, tmp_path: Path, kind: str) -> None:
    """`pretrain | head -1`, `pretrain 2>&1 | head -1` and `pretrain > /dev/full`: the run
    ends as if nothing had happened.
    """
    out, err, first = str(tmp_path / "out"), str(tmp_path / "err"), []
    if kind == "full":
        out = "/dev/full"
        if not Path(out).is_char_device():
            pytest.skip("this system has no /dev/full")
    else:
        os.mkfifo(out)

        def head() -> None:
            with open(out) as pipe:
                first.append(pipe.readline())

        threading.Thread(target=head, daemon=True).start()
    with command(config, tmp_path / "run", out=out, err=out if kind == "both pipes" else err) as process:
        assert ended(process) == FINISHED
    assert [m["step"] for m in training.metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert find_latest(tmp_path / "run") is not None
    assert kind == "full" or first[0] == "mesh: pipeline 1 × data 1 × tensor 1 = 1 rank, threads 1\n"
    if kind != "both pipes":
        lines = Path(err).read_text().splitlines()
        assert len(lines) <= 1 and all(
            line.startswith("standard output cannot be written any more (") for line in lines
        ), lines
        assert kind != "full" or "No space left on device" in lines[0]


def disturbed_rank(
    config_path: str, overrides: list[str], log_dir: str, disturb: Callable[[Trainer], None]
) -> tuple[int, str, str]:
    """A run that `disturb` happens to on rank 0, behind step 2; its status, and what it said."""
    log = Trainer.log

    def logged(self: Trainer, result: StepResult[float]) -> None:
        log(self, result)
        if self.step == 2 and self.is_writer:
            disturb(self)

    with (
        mock.patch.object(Trainer, "log", logged),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        status = training.run_rank(config_path, overrides, log_dir)
    return status, out.getvalue(), err.getvalue()


def delete_folder(trainer: Trainer) -> None:
    shutil.rmtree(resolved(trainer.config.log.dir))


def refuse_events(trainer: Trainer) -> None:
    """TensorBoard's thread fails, as on a full disk."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    RecordWriter.write = refuse  # type: ignore[method-assign]


def refuse_records(trainer: Trainer) -> None:
    """What the next record is written to is full."""
    records = trainer.records.records
    assert isinstance(records, Records)
    file: Any = records.metrics

    class Full:
        fileno, close = file.fileno, file.close

        def write(self, text: str) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    records.metrics = Full()  # type: ignore[assignment]


def test_a_deleted_folder_is_said_once_and_made_again(run_ranks: Any, config: str, tmp_path: Path) -> None:
    """The open file would take every line, and nobody would ever see them."""
    status, out, err = run_ranks(
        1, disturbed_rank, config, ["log.tensorboard=true"], str(tmp_path / "run"), delete_folder
    )[0]
    assert (
        status == FINISHED
        and out.count("WARNING") == 1
        and "metrics.jsonl was deleted while the run wrote it" in out
    )
    assert [m["step"] for m in training.metrics(tmp_path / "run")] == [3, 4, 5]
    assert (
        (tmp_path / "run/config.json").exists() and list((tmp_path / "run/tensorboard").iterdir()) and not err
    )
    assert find_latest(tmp_path / "run") is not None


def test_tensorboard_may_fail(run_ranks: Any, config: str, tmp_path: Path) -> None:
    """When it is opened, and in the thread that writes for it; the reason is one line,
    without a traceback.
    """
    (tmp_path / "never").mkdir()
    (tmp_path / "never/tensorboard").touch()
    for name, disturb, reason in (
        ("never", delete_nothing, "FileExistsError"),
        ("later", refuse_events, "No space left on device"),
    ):
        status, out, err = run_ranks(
            1, disturbed_rank, config, ["log.tensorboard=true"], str(tmp_path / name), disturb
        )[0]
        assert (
            status == FINISHED
            and out.count("WARNING: TensorBoard's files cannot be written") == 1
            and reason in out
            and not err
        )
        assert [m["step"] for m in training.metrics(tmp_path / name)] == [1, 2, 3, 4, 5]


def delete_nothing(trainer: Trainer) -> None:
    pass


def unrecorded_rank(config_path: str, overrides: list[str], log_dir: str) -> str:
    with pytest.raises(LogError) as raised:
        disturbed_rank(config_path, overrides, log_dir, refuse_records)
    return str(raised.value)


@pytest.mark.parametrize("steps", [5, 3])
def test_without_its_records_a_run_saves_and_ends(
    run_ranks: Any, config: str, tmp_path: Path, steps: int
) -> None:
    """Nobody would know what was trained.

    All ranks end alike, also where only the last step's record is lost.
    """
    overrides = [f"train.steps={steps}", "checkpoint.last=false", "parallel.tensor=2"]
    lines = run_ranks(2, unrecorded_rank, config, overrides, str(tmp_path / "run"))
    saved = find_latest(tmp_path / "run")
    assert saved is not None
    step = checkpoint.Reader(saved).step
    assert step == min(4, steps)
    right = f"make room, or see to its folder; the same command resumes from step {step}"
    assert (
        lines
        == [f"log error: {tmp_path}/run/metrics.jsonl: cannot be written: No space left on device ({right})"]
        * 2
    )
    again = run_ranks(2, training.run_rank, config, [*overrides, "train.steps=6"], str(tmp_path / "run"))
    assert again == [FINISHED] * 2
