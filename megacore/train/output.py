"""Lets a run go on when its standard output is gone: a pipe without a reader, a closed terminal, a full disk."""

import contextlib
import os
import sys
from typing import IO, Any


class Output:
    """A text stream that writes to `stream` for as long as that works. Then it says so once on stderr, and drops the rest."""

    def __init__(self, stream: IO[str] | None) -> None:
        """`stream`: None if the process was started without one."""
        self.stream = stream

    def write(self, text: str) -> int:
        """As a file's."""
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        """As a file's."""
        self._try("flush")

    def isatty(self) -> bool:
        """As a file's."""
        return self.stream is not None and self.stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _try(self, method: str, *arguments: str) -> None:
        if self.stream is None:
            return
        try:
            getattr(self.stream, method)(*arguments)
        except OSError as error:
            with contextlib.suppress(OSError, ValueError):  # its buffer would fail again when the process ends
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self.stream.fileno())
                os.close(null)
            self.stream = None
            with contextlib.suppress(OSError):  # it may be the same pipe
                print(f"standard output cannot be written any more ({error.strerror}): training goes on without it", file=sys.stderr)
