"""Ctrl-C and SIGTERM: a quiet end with status 128 + signal, also while the main thread waits in C++.

Every script imports this module first, because the imports that follow take seconds. Until it has run,
Ctrl-C prints a traceback, so it imports little.
"""

import os
import signal
import time
from collections.abc import Callable
from types import FrameType

GRACE_SECONDS = 2.0  # for the main thread to end by itself, before its process is ended
# One Ctrl-C reaches a rank several times: from the terminal, and within milliseconds from its launcher.
PASSED_ON_SECONDS = 1.0


def status_after_signal(number: int) -> int:
    """The exit status that shells report for a command that a signal has ended."""
    return 128 + number


def signal_of(error: KeyboardInterrupt) -> signal.Signals:
    """The signal for which `interrupt`, or Python's own handler, has raised this error."""
    return signal.Signals(error.args[0]) if error.args else signal.SIGINT


def interrupted_status(error: KeyboardInterrupt) -> int:
    """The exit status after `interrupt` has raised this error."""
    return status_after_signal(signal_of(error))


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle a signal in the main thread: raise `KeyboardInterrupt`, with the signal's number.

    While Python starts the script, or while the script or torch is being imported, end the process at
    once instead: nothing has begun, and a half-imported module may swallow the exception.
    """
    inner, started = "", False
    while frame is not None:
        module = frame.f_globals.get("__name__") if frame.f_code.co_name == "<module>" else None
        if module == "torch" or (module == "__main__" and "importlib" in inner):
            os._exit(status_after_signal(number))
        started |= module == "__main__"
        inner, frame = frame.f_code.co_filename, frame.f_back
    if not started:
        os._exit(status_after_signal(number))
    raise KeyboardInterrupt(number)


def end_after_grace(number: int, unless: Callable[[], bool] = lambda: False) -> None:
    """End the process after `GRACE_SECONDS`, in which the main thread can do so by itself.

    `unless`: whether the signal has another meaning by then.
    """
    time.sleep(GRACE_SECONDS)
    if not unless():
        os._exit(status_after_signal(number))


class SignalThread:
    """A context in which a thread calls `react` with the number of each signal that has a handler.

    Python runs the handler itself in the main thread, between two steps of Python code, so not while
    that thread waits in the store, in gloo or in NCCL. But it writes the number of the signal to a
    file descriptor at once, from which the thread reads it. Enter the context in the main thread.
    """

    def __init__(self, react: Callable[[int], None]) -> None:
        self.react = react

    def __enter__(self) -> None:
        import threading  # takes longer than all that this module does before Ctrl-C is handled

        self.reading, self.writing = os.pipe()
        os.set_blocking(self.writing, False)
        threading.Thread(target=self._read, name="signals", daemon=True).start()
        self.outer = signal.set_wakeup_fd(self.writing, warn_on_full_buffer=False)

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self.outer)
        os.close(self.writing)  # ends the thread

    def _read(self) -> None:
        while number := os.read(self.reading, 1):
            self.react(number[0])
        os.close(self.reading)


def handle_interrupts() -> None:
    """Handle Ctrl-C by `interrupt`, unless it is ignored, or another program handles it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        try:
            signal.signal(signal.SIGINT, interrupt)
        except ValueError:  # imported in another thread than the main one, such as a worker of Ray
            return


handle_interrupts()
# A forked child shares the file descriptor, and its signals are not this process's.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
