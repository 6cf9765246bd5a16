"""What a script writes where a user says: looked at before the work whose result it is,
and there only once it is whole.
"""

import errno
import io
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from megacore.errors import ConfigError
from megacore.files import ASIDE, OUTPUT, write_json

NAME_BYTES = 255  # of a name on every common file system
BLOCK = 4096  # bytes; a full disk has no room for them


def check_output(option: str, path: str) -> None:
    """Raises `ConfigError`, naming the option, unless `path` can be written.

    It is called before work whose result would be lost.
    """
    try:
        if not path or path.endswith("/") or (os.path.lexists(path) and stat.S_ISDIR(os.stat(path).st_mode)):
            raise OSError(errno.EINVAL, "Not a plain file")
        if not stat.S_ISDIR(os.stat(os.path.dirname(path) or ".").st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if len(os.fsencode(os.path.basename(path))) > NAME_BYTES - len(ASIDE.format("")) - 10:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        if os.path.exists(path) and not os.path.isfile(path):  # a device or a pipe is written in place
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        # Only a file that is made there shows that the folder takes one: /proc has permissions that say so.
        with tempfile.TemporaryFile(dir=os.path.dirname(path) or ".", buffering=0) as file:
            file.write(bytes(BLOCK))
    except OSError as error:
        raise ConfigError(
            option, f"cannot write {path or 'a file without a name'}: {error.strerror}", OUTPUT
        ) from None


def check_json(path: str | None) -> None:
    """Raise `ConfigError` unless the file of `--json` can be written; `-` is the terminal, None no file."""
    if path not in (None, "-"):
        check_output("--json", path)


@contextmanager
def report_unless_json(path: str | None) -> Iterator[None]:
    """A context in which nothing is printed if `--json -` prints the results in place of the report."""
    if path == "-":
        with redirect_stdout(io.StringIO()):
            yield
    else:
        yield


def write_results(path: str | None, results: Any) -> None:
    """Write the results to the file of `--json`, or print them if it is `-`. Raises `ConfigError`."""
    if path == "-":
        print(json.dumps(results, indent=2))
    elif path is not None:
        write_json("--json", path, results)


@contextmanager
def replaced(path: str) -> Iterator[str]:
    """A path with the same ending, for a file that then takes the place of `path`.

    An exception leaves what was there before.
    """
    aside = f"{path}{ASIDE.format(os.getpid())}{Path(path).suffix}"
    try:
        yield aside
        os.replace(aside, path)
    finally:
        Path(aside).unlink(missing_ok=True)


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """A context in which the folder is there.

    After an exception, those that were made for it are removed if they are empty.
    """
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for each in new:
            with suppress(OSError):
                each.rmdir()
        raise
