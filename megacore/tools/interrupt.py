"""Ctrl-C while a script starts. Every script imports this module first, because its imports take seconds.

It imports little: until its last line Python's own handler prints a traceback.
"""

import os
import signal
import threading
from types import FrameType

INTERRUPTED = 130  # what shells report for a command that Ctrl-C ended


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handles Ctrl-C: raises `KeyboardInterrupt`.

    While the script or torch is being imported it ends the process at once instead: nothing has begun, and a
    half-imported module may swallow the exception.
    """
    inner = ""
    while frame is not None:
        module = frame.f_globals.get("__name__") if frame.f_code.co_name == "<module>" else None
        if module == "torch" or (module == "__main__" and "importlib" in inner):
            os._exit(INTERRUPTED)
        inner, frame = frame.f_code.co_filename, frame.f_back
    raise KeyboardInterrupt


if (
    signal.getsignal(signal.SIGINT) is signal.default_int_handler
    and threading.current_thread() is threading.main_thread()
):
    signal.signal(signal.SIGINT, interrupt)
