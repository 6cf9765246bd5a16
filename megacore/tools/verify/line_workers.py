"""Processes that are kept alive from one task to the next, and answer each: importing torch takes seconds.

Standard library only.
"""

import contextlib
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

# behind the first failure: the others' own complaints may be on their way, or they may wait for ever
GRACE_SECONDS = 1.0
LAST_WORDS = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Killed)\b.*")


class LineWorker:
    """A command that reads tasks from stdin, a line of JSON each, and answers each on stdout likewise.

    In its place `Workers` take anything with its methods, and whose `fileno` can be read from when there is
    an answer, or the process has ended.
    """

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str | None]) -> None:
        """`environment`: what it has otherwise than this process; None: a variable that it does not have."""
        self.complaints, pipe = tempfile.TemporaryFile("w+"), subprocess.PIPE  # noqa: SIM115 (closed by `end`)
        given = {name: value for name, value in (os.environ | environment).items() if value is not None}
        self.process = subprocess.Popen(
            command, cwd=folder, env=given, stdin=pipe, stdout=pipe, stderr=self.complaints, text=True
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.tasks, self.answers = self.process.stdin, self.process.stdout

    def fileno(self) -> int:
        return self.answers.fileno()

    def send(self, task: Any) -> None:
        """Gives it a task; one that has ended says so in its answer."""
        with contextlib.suppress(BrokenPipeError):
            self.tasks.write(json.dumps(task) + "\n")
            self.tasks.flush()

    def receive(self) -> dict[str, Any]:
        """Its answer; one that has ended has the `error` that its stderr names, in the
        line that most likely says why.
        """
        if line := self.answers.readline():
            return json.loads(line)
        status = self.status()
        self.complaints.seek(0)
        lines = [line.strip() for line in self.complaints if line.strip()]
        last = next(
            (line for line in reversed(lines) if LAST_WORDS.match(line)),
            lines[-1] if lines else "said nothing",
        )
        return {"error": f"ended with status {status}: {last}", "traceback": "\n".join(lines)}

    def status(self) -> int:
        """Its exit status, when it has ended."""
        return self.process.wait()

    def end(self) -> None:
        """Ends it, whatever it is doing."""
        self.process.kill()
        self.process.communicate()
        self.complaints.close()


class WorkerFailed(RuntimeError):
    """A worker's `answer` is an error; or None, where the first of those that are
    `silent` gave none in time.
    """

    def __init__(self, rank: int, answer: dict[str, Any] | None, silent: list[int]) -> None:
        super().__init__(f"rank {rank}: {answer['error'] if answer else 'no answer in time'}")
        self.rank, self.answer, self.silent = rank, answer, silent


class Workers:
    """Workers by rank, started when they are first needed.

    Whoever leaves the block, or calls `close`, ends them.
    """

    def __init__(self, start: Callable[[int], Any]) -> None:
        """`start` makes the worker of a rank; it gives an answer when it is ready."""
        self.start = start
        self.running: list[Any] = []

    def grow(self, world: int, seconds: float = 1e6) -> list[dict[str, Any]]:
        """Lets there be `world` workers; what those that were started said when they were ready.

        Raises `WorkerFailed`.
        """
        fresh = range(len(self.running), world)
        self.running += [self.start(rank) for rank in fresh]
        return self._answers(fresh, seconds)

    def ask(self, tasks: Sequence[Any], seconds: float) -> list[dict[str, Any]]:
        """Gives each of the first workers its task; their answers.

        Raises `WorkerFailed` with the failure that came first.
        """
        for worker, task in zip(self.running, tasks, strict=False):
            worker.send(task)
        return self._answers(range(len(tasks)), seconds)

    def _answers(self, ranks: range, seconds: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + seconds
        waiting: dict[Any, int] = {self.running[rank]: rank for rank in ranks}
        answers: dict[int, dict[str, Any]] = {}
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for worker in ready:
                rank = waiting.pop(worker)
                answers[rank] = self.running[rank].receive()
                if answers[rank].get("error"):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        failed = [rank for rank, answer in answers.items() if answer.get("error")]
        if failed or waiting:  # the earliest is the cause; the others may only have lost their peer
            silent = sorted(waiting.values())
            first = min(
                failed,
                key=lambda rank: (answers[rank].get("finished", 0.0), rank),
                default=min(silent, default=0),
            )
            raise WorkerFailed(first, answers.get(first), silent)
        return [answers[rank] for rank in ranks]

    def close(self) -> None:
        """End all workers; the next task starts new ones.

        A thread that waits for their answers may close them too, so each close takes them off the list first.
        """
        running, self.running = self.running, []
        for worker in running:
            worker.end()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
