"""Keeps compiled code from run to run, in folders where only this user can write: its
files are run as code.
"""

import contextlib
import functools
import os
import stat
import tempfile
from itertools import pairwise
from pathlib import Path

TRITON = "TRITON_CACHE_DIR"  # where it is not set, Triton keeps its kernels in ~/.triton/cache
# where it is not set, torch.compile keeps its code in /tmp/torchinductor_<user>
INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"


def cache_folder(kind: str) -> Path:
    """Makes and returns the folder ``~/.cache/megacore/<kind>`` (or below XDG_CACHE_HOME).

    If it cannot be made, or other users could replace it, returns a new folder for this process.
    """
    with contextlib.suppress(OSError, RuntimeError):  # a home that is read-only; a user without one
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = (home / "megacore" / kind).resolve()
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if is_private(folder):
            return folder
    return new_folder(kind)


def is_private(folder: Path) -> bool:
    """Whether a folder belongs to this user, and nobody else can write in a folder on the way to it.

    A sticky folder such as /tmp is allowed on the way if the next folder belongs to this user or root: there,
    users can remove only what is their own.
    """
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & stat.S_IWOTH:
        return False
    for inner, outer in pairwise(path.stat() for path in (folder, *folder.parents)):
        sticky = bool(outer.st_mode & stat.S_ISVTX) and inner.st_uid in (0, os.geteuid())
        if outer.st_mode & stat.S_IWOTH and not sticky:
            return False
    return True


def node_folder(kind: str) -> Path:
    """A folder of this user's on this machine's own disk: a home may be every machine's, and
    thousands of ranks that compile the same would write to it at once. Where other users could put
    something in its place, as `cache_folder`.
    """
    with contextlib.suppress(OSError):
        folder = (Path(tempfile.gettempdir()) / f"megacore_{kind}_{os.geteuid()}").resolve()
        folder.mkdir(mode=0o700, exist_ok=True)
        if is_private(folder):
            return folder
    return cache_folder(kind)


@functools.cache
def new_folder(kind: str) -> Path:
    """Makes a folder for this process, with a name that nobody can guess."""
    return Path(tempfile.mkdtemp(prefix=f"megacore_{kind}_"))


def keep_inductor_private() -> None:
    """Gives torch.compile a cache on this machine's own disk that only this user can write, unless the user
    has named one. Call it before compiling anything.
    """
    os.environ.setdefault(INDUCTOR, str(node_folder("inductor")))


def keep_triton_local() -> None:
    """Gives Triton a cache on this machine's own disk, unless the user has named one; to be
    called before a kernel is compiled.
    """
    os.environ.setdefault(TRITON, str(node_folder("triton")))
