"""Where compiled code is kept from run to run: whoever can put a file there can run code as this user."""

import contextlib
import functools
import os
import stat
import tempfile
from itertools import pairwise
from pathlib import Path

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"  # where it is not set, torch.compile keeps its code in /tmp/torchinductor_<user>


def cache_folder(kind: str) -> Path:
    """The folder ``~/.cache/megacore/<kind>`` (or below XDG_CACHE_HOME), made if it is missing. Where it cannot be made, or other
    users could put something in its place, a new folder for this process."""
    with contextlib.suppress(OSError, RuntimeError):  # a home that is read-only; a user without one
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = (home / "megacore" / kind).resolve()
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if is_private(folder):
            return folder
    return new_folder(kind)


def is_private(folder: Path) -> bool:
    """Whether a folder is this user's, and no folder on the way to it is open to everybody. One like /tmp may be, where everybody
    removes only what is their own, if what comes next is this user's or root's."""
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & stat.S_IWOTH:
        return False
    for inner, outer in pairwise(path.stat() for path in (folder, *folder.parents)):
        sticky = bool(outer.st_mode & stat.S_ISVTX) and inner.st_uid in (0, os.geteuid())
        if outer.st_mode & stat.S_IWOTH and not sticky:
            return False
    return True


@functools.cache
def new_folder(kind: str) -> Path:
    """One a process, under a name that nobody can know before."""
    return Path(tempfile.mkdtemp(prefix=f"megacore_{kind}_"))


def keep_inductor_private() -> None:
    """Gives torch.compile a cache of this user's own, unless the user has named one; to be called before anything is compiled."""
    os.environ.setdefault(INDUCTOR, str(cache_folder("inductor")))
