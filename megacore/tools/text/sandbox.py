"""A process of its own for what strangers wrote: tokenizers and chat templates.

Its memory and its time are limited.

A template is a program, and a tokenizer's file decides what native code does. Either may take all memory,
never end, or end the process that runs it. So none runs in a process that trains or writes: they run in
another one. It is started when it is first needed, answers one question at a time, and is used again for the
next. Questions and answers are JSON and bytes; nothing is unpickled.
"""

import contextlib
import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

from megacore.errors import DataError
from megacore.files import ROOT
from megacore.tools.processes import hold_signals

# For a question, and for each byte of text in it. A tokenizer of 256,000 pieces took 1.4 µs and 350 bytes a
# byte.
SECONDS, SECONDS_A_BYTE = 20, 16e-6  # of processor time
MEMORY, MEMORY_A_BYTE = 2 << 30, 512  # bytes, beyond what the process has
ANSWER, ANSWER_A_BYTE = 64 << 20, 64  # bytes
PATIENCE = 20  # times the processor time that a question may take: others may use the processors too
ALONE = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from megacore.tools.text.sandbox import serve; "
    "serve(int(sys.argv[2]))"
)

Answer = tuple[Any, bytes]


class Failure(RuntimeError):
    """What was asked raised something, took too much, or ended its process; the text
    says which, with a verb in front.
    """


class Sandbox:
    """The process. Whatever goes wrong with it, a `Failure` is all that its user meets."""

    def __init__(self) -> None:
        ours, theirs = Pipe()
        with theirs, hold_signals(signal.SIGINT):
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-c", START, str(ROOT), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=os.environ | ALONE,
                )
            except OSError as error:
                ours.close()
                raise Failure(
                    f"needs a process of its own, which cannot be started: {error.strerror}"
                ) from None
        self.connection, self.owner = ours, os.getpid()

    def ask(self, function: str, arguments: tuple[Any, ...], body: bytes) -> Answer:
        """What the function gives. Raises `DataError` as the function does, or `Failure`."""
        seconds, most = math.ceil(SECONDS + SECONDS_A_BYTE * len(body)), ANSWER + ANSWER_A_BYTE * len(body)
        limits = seconds, MEMORY + MEMORY_A_BYTE * len(body), most
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # why it has ended is told below
            self.connection.send_bytes(
                json.dumps([function, arguments, os.readlink("/proc/self/cwd"), limits]).encode()
            )
            self.connection.send_bytes(body)
        try:
            if not self.connection.poll(PATIENCE * seconds):
                raise Failure(f"has not ended after {PATIENCE * seconds} s")
            kind, value = json.loads(self.connection.recv_bytes(most))
            reply = self.connection.recv_bytes(most)
        except (EOFError, OSError):
            raise Failure(self._ending(seconds)) from None
        if kind == "data error":
            raise DataError(*value)
        if kind == "failure":
            raise Failure(value)
        return value, reply

    def _ending(self, seconds: float) -> str:
        """Why the process has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1)
        status = self.process.poll()
        if status == -signal.SIGXCPU:
            return f"takes more than {seconds} s of processor time"
        by = signal.Signals(-status).name if status and status < 0 else f"status {status}"
        return f"takes too much memory, or ends the process that runs it ({by})"

    def close(self) -> None:
        """Ends it, whatever it is doing."""
        self.connection.close()
        if self.owner == os.getpid():
            self.process.kill()
            self.process.wait()


_running: list[Sandbox] = []  # at most one


def call(function: Callable[..., Answer], *arguments: Any, body: bytes = b"") -> Answer:
    """What a function of a module gives in the sandbox: it gets `arguments`, which are JSON,
    and `body` unless that is empty.

    Raises:
        DataError: the function did.
        Failure: it raised something else, took too much memory or time, or ended its process.
    """
    # a fork's is its parent's
    if _running and (_running[0].owner != os.getpid() or _running[0].process.poll() is not None):
        _running.pop().close()
    if not _running:
        _running.append(Sandbox())
    try:
        return _running[0].ask(f"{function.__module__}:{function.__qualname__}", arguments, body)
    except DataError:
        raise
    except BaseException:  # an answer may be under way still, to a question that nobody asks any more
        _running.pop().close()
        raise


def serve(descriptor: int) -> None:
    """The process's body: answers until nobody is left who asks."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())  # Rust tells of a panic there
    Thread(target=end_with_owner, args=(descriptor,), daemon=True).start()
    with (
        Connection(descriptor) as connection,
        contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError),
    ):
        while True:
            function, arguments, folder, (seconds, memory, most) = json.loads(connection.recv_bytes())
            body = connection.recv_bytes()
            with contextlib.suppress(OSError):  # whoever asks will hear that a path leads nowhere
                os.chdir(folder)
            limit(seconds, memory)
            kind, value, reply = answered(function, [*arguments, body] if body else arguments)
            answer = json.dumps([kind, value]).encode()
            if len(answer) + len(reply) > most:
                answer, reply = (
                    json.dumps(
                        ["failure", f"makes {len(answer) + len(reply):,} bytes of {len(body):,}"]
                    ).encode(),
                    b"",
                )
            connection.send_bytes(answer)
            connection.send_bytes(reply)


def end_with_owner(descriptor: int) -> None:
    """Wait until the other side of the connection is closed, then end this process in the middle of its work.

    The owner may be killed, and an answer may take many seconds.
    """
    hangup = select.poll()
    hangup.register(descriptor, 0)
    hangup.poll()
    os._exit(1)


def limit(seconds: int, memory: int) -> None:
    """Limits what this process may take from now on: processor time, and bytes."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for kind, most in (
        (resource.RLIMIT_AS, taken + memory),
        # beyond it, SIGXCPU ends the process
        (resource.RLIMIT_CPU, math.ceil(time.process_time()) + seconds),
    ):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def answered(function: str, arguments: list[Any]) -> tuple[str, Any, bytes]:
    """The kind of an answer, the answer, and its bytes."""
    module, _, name = function.partition(":")
    try:
        return "answer", *getattr(import_module(module), name)(*arguments)
    except DataError as error:
        return "data error", [error.where, error.wrong, error.right], b""
    except MemoryError:
        return "failure", "takes too much memory", b""
    except BaseException as error:  # a panic in Rust is no Exception
        return "failure", f"fails: {one_line(error)}", b""


def one_line(error: BaseException) -> str:
    """An error's text, or its type where it has none."""
    return " ".join(f"{error}".split())[:200] or type(error).__name__
