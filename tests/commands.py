"""Commands as a user types them, in a process that has imported torch already: seconds less for each."""

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from megacore.tools.verify import worker
from megacore.tools.verify.line_workers import LineWorker
from megacore.tools.verify.workers import ProofWorkers
from tests.pool import CONTEXT, PATIENCE, ROOT


def run_script(
    script: str, *arguments: str, timeout: float = PATIENCE, folder: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """What `python SCRIPT ARGUMENTS` says and its status, in `folder`;
    `variables` are added to the environment.

    The script runs as `__main__`, in a session and with files for output of its own, and everything that it
    starts ends with it.
    """
    environment = (
        {name: value for name, value in os.environ.items() if name not in RANKS_OWN}
        | {"OMP_NUM_THREADS": "1"}
        | variables
    )
    with tempfile.TemporaryDirectory() as outputs:
        files = [Path(outputs) / "out", Path(outputs) / "err"]
        process = CONTEXT.Process(
            target=play, args=([str(ROOT / script), *arguments], environment, files, "", folder)
        )
        process.start()
        process.join(timeout)
        late = process.is_alive()
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it left nobody behind
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        out, err = (file.read_text() for file in files)
    if late:
        raise subprocess.TimeoutExpired([script, *arguments], timeout, out, err)
    assert process.exitcode is not None
    return subprocess.CompletedProcess([script, *arguments], process.exitcode, out, err)


RANKS_OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def play(
    argv: list[str], environment: dict[str, str], files: list[Path], terminal: str = "", folder: Path = ROOT
) -> None:
    """Becomes the script `argv`, in a session of its own, whose terminal is the one given;
    `files`: for stdout and stderr.
    """
    os.setsid()
    if terminal:
        os.open(terminal, os.O_RDWR)  # open for writing alone it would not become the session's
    for descriptor, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv, status = argv, 0
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(end.code + "\n")
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def provers() -> ProofWorkers:
    """The ranks of proofs by this checkout, which `prove` takes."""
    workers = ProofWorkers(ROOT)
    workers.start = lambda rank: Prover()
    return workers


class Prover(LineWorker):
    """`python -m megacore.tools.verify.worker`, forked."""

    def __init__(self) -> None:
        (tasks, ours), (answers, theirs) = CONTEXT.Pipe(duplex=False), CONTEXT.Pipe(duplex=False)
        file, path = tempfile.mkstemp()
        self.complaints = os.fdopen(file)
        self.child = CONTEXT.Process(target=serve_proofs, args=(tasks, theirs, path), daemon=True)
        self.child.start()
        self.tasks, self.answers = (
            os.fdopen(os.dup(end.fileno()), mode) for end, mode in ((ours, "w"), (answers, "r"))
        )
        for end in (tasks, theirs, ours, answers):
            end.close()

    def status(self) -> int:
        self.child.join()
        assert self.child.exitcode is not None
        return self.child.exitcode

    def end(self) -> None:
        self.child.kill()
        self.child.join()
        with contextlib.suppress(BrokenPipeError):
            self.tasks.close()
        self.answers.close()
        self.complaints.close()


def serve_proofs(tasks: Connection, answers: Connection, complaints: str) -> None:
    """Becomes a rank of proofs, with these for stdin, stdout and stderr; nobody needs
    the last one's name any longer.
    """
    for descriptor, source in enumerate(
        (tasks.fileno(), answers.fileno(), os.open(complaints, os.O_WRONLY | os.O_APPEND))
    ):
        os.dup2(source, descriptor)
    os.unlink(complaints)
    sys.stdin = open(0)  # noqa: SIM115 (open as long as the process lives)
    os.chdir(ROOT)
    worker.serve([])
