"""Persistent worker processes for distributed tests: `import torch` is paid once a worker, not once a test.

`Pool.run(world, function, *args)` calls a module-level function on `world` workers, each with the environment
that torchrun would have given that rank. What goes wrong in a rank is raised in the test with that rank's own
traceback.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megacore.tools.local_ranks import free_port, rank_environment
from megacore.tools.verify.line_workers import WorkerFailed, Workers

ROOT = Path(__file__).resolve().parents[1]
MAX_WORLD = 8
PATIENCE = 900.0  # seconds that a test waits for what a busy machine may do late: only a hang takes as long

# Workers are forked from one process that has imported torch, and has not computed anything yet.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preload", "tests.frozen"])


class RankError(RuntimeError):
    """A rank raised or died; the message carries its whole traceback."""

    def __init__(self, rank: int, report: str) -> None:
        super().__init__(f"rank {rank} failed:\n{report}")
        self.rank = rank


class RankTimeout(TimeoutError):
    """Some ranks did not return in time."""

    def __init__(self, ranks: list[int], world: int, timeout: float) -> None:
        super().__init__(
            f"ranks {ranks} of {world} did not return within {timeout:g} s (their stacks are on stderr)"
        )
        self.ranks = ranks


class Forked:
    """A worker (see `tools.verify.line_workers.LineWorker`) that is forked, or spawned, and talks in pickles.

    Plain pickle, not `Connection.send`: torch replaces the latter's treatment of tensors by shared memory,
    which dies with the worker that owns it.
    """

    def __init__(self, context: Any, rank: int, bare: bool) -> None:
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_serve, args=(theirs, bare), name=f"rank {rank}", daemon=True
        )
        self.process.start()
        theirs.close()  # or a dead worker would never read as end of file

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, task: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.connection.send_bytes(pickle.dumps(task))

    def receive(self) -> dict[str, Any]:
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.join()
            return {"error": f"the process ended with exit code {self.process.exitcode}"}

    def end(self) -> None:
        self.process.kill()
        self.connection.close()
        self.process.join()


class Pool(Workers):
    """Up to eight workers, started when first needed and replaced after any failure, so
    that no test sees another's wreck.
    """

    def __init__(self, *, bare: bool = False) -> None:
        """`bare`: workers start with the environment of the moment and have imported nothing yet; else they
        are forked from one that has imported torch, and have its environment.
        """
        context: Any = multiprocessing.get_context("spawn") if bare else CONTEXT
        super().__init__(lambda rank: Forked(context, rank, bare))

    def run(
        self, world: int, function: Callable[..., Any], *args: Any, timeout: float = PATIENCE
    ) -> list[Any]:
        """Calls `function(*args)` on ranks 0 .. world-1 and returns their results by rank.

        Raises `RankError` with the first failing rank's traceback, or `RankTimeout` naming the ranks that did
        not return in `timeout` seconds (workers' start-up not counted).
        """
        assert 1 <= world <= MAX_WORLD, f"the pool has at most {MAX_WORLD} workers"
        try:
            self.grow(world)
            task, port = pickle.dumps((function, args)), free_port()
            answers = self.ask(
                [(rank_environment(rank, world, port), task) for rank in range(world)], timeout
            )
            return [answer["result"] for answer in answers]
        except BaseException as error:
            if isinstance(error, WorkerFailed) and error.answer is None:
                self._dump_stacks(error.silent)
                error = RankTimeout(error.silent, world, timeout)
            elif isinstance(error, WorkerFailed) and error.answer is not None:
                error = RankError(error.rank, error.answer["error"])
            self.close()
            raise error from None

    def _dump_stacks(self, ranks: list[int]) -> None:
        for rank in ranks:
            pid = self.running[rank].process.pid
            if hasattr(signal, "SIGUSR1"):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.2)  # for the stacks to be written before the workers are killed


def _serve(connection: Connection, bare: bool) -> None:
    """A worker's life: tasks in, answers out, until the parent is gone."""
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)
    threading.Thread(target=_die_with_parent, daemon=True).start()

    import torch

    torch.set_num_threads(1)
    home, environment = os.getcwd(), dict(os.environ)
    connection.send_bytes(pickle.dumps({"error": None}))
    while True:
        try:
            variables, task = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            return
        os.environ.update(variables)
        try:
            function, args = pickle.loads(task)
            reply = pickle.dumps({"error": None, "result": function(*args)})
        except BaseException:
            reply = pickle.dumps({"error": traceback.format_exc(), "finished": time.monotonic()})
        # before the group goes, or the peers' complaints would come before the cause
        connection.send_bytes(reply)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        gc.collect()  # a group that is only forgotten keeps threads, which wake a hundred times a second
        if bare:
            # what the task has imported: to look at it behind each would take longer than the tasks
            gc.freeze()
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)
        os.chdir(home)
        os.environ.clear()
        os.environ.update(environment)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # not sys.exit: the main thread may hang in a collective
