"""Which hostfile the deepspeed launcher's command names.

Standard library only: it is read before torch is imported.
"""

import os
import re
from pathlib import Path

from megacore.distributed.processes import stat_fields

HOSTFILE = re.compile(r"(--hostfile|-H)(=(.*))?")  # an option of the deepspeed launcher


def missing_hostfile() -> str | None:
    """The hostfile that this process's deepspeed launcher did not find, or None (Linux).

    The launcher itself only warns, and trains on this machine alone.
    """
    pid = os.getppid()
    while pid > 1:
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            parent = int(stat_fields(pid)[1])
            folder = Path(f"/proc/{pid}/cwd").resolve()
        except OSError:
            return None  # not Linux, or not ours to read
        if any(Path(argument).name in ("deepspeed", "runner.py") for argument in arguments[:2]):
            return hostfile_of(arguments, folder)
        pid = parent
    return None


def hostfile_of(arguments: list[str], folder: Path) -> str | None:
    """The value of a launcher's --hostfile (-H), if there is no such file.

    By an empty one the deepspeed launcher means none.
    """
    named = named_hostfile(arguments)
    return named[1] if named and named[1] and not (folder / named[1]).is_file() else None


def named_hostfile(command: list[str]) -> tuple[int, str] | None:
    """The number of the word that names the hostfile in a command of the deepspeed launcher, and the file,
    whose name may be empty; None if it names none.
    """
    for i, word in enumerate(command):
        if found := HOSTFILE.fullmatch(word):
            return (i, found[3]) if found[2] else (i + 1, command[i + 1]) if i + 1 < len(command) else None
    return None
