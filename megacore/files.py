"""Reads and writes files that a user names.

Only plain files of a bounded size are read, never a pipe that nobody fills or an endless device. A file is
written whole or not at all.
"""

import errno
import json
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from megacore.errors import ConfigError

OUTPUT = "a file that can be written, in a folder that exists"
ASIDE = ".{}.tmp"  # behind the name of a file that is being written; with the process's number
PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parent  # of the checkout, or the folder into which megacore is installed
# The scripts: in the package where it is installed, else next to it.
LAUNCH = PACKAGE / "launch" if (PACKAGE / "launch" / "pretrain.py").is_file() else ROOT / "launch"
MOST_BYTES = 256 << 20  # far above any config, hostfile, index or tokenizer


def open_plain(path: str | Path) -> BinaryIO:
    """Opens a plain file to read.

    Raises `OSError`, whose `strerror` says why not, also for a name that no file can have.
    """
    try:
        # O_NONBLOCK: a pipe opens at once, to be refused
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:  # NUL, or half a surrogate pair
        raise OSError(errno.EINVAL, "no file can have this name", str(path)) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        code, why = (
            (errno.EISDIR, os.strerror(errno.EISDIR))
            if stat.S_ISDIR(mode)
            else (errno.EINVAL, "Not a plain file")
        )
        raise OSError(code, why, str(path))
    return os.fdopen(descriptor, "rb")


def read_plain(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """The content of a plain file of at most so many bytes. Raises `OSError` as `open_plain` does."""
    with open_plain(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"Larger than {most:,} bytes", str(path))
    return content


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """Return the text of a plain UTF-8 file, without the byte order mark that some editors put before it.

    Raises `OSError` as `read_plain` does, or `UnicodeDecodeError`.
    """
    return read_plain(path, most).decode("utf-8-sig")


class RepeatedKey(ValueError):
    """A key that is in a JSON object twice; the text says which."""


def read_json(text: str) -> Any:
    """The value of JSON that a person wrote.

    Raises `ValueError`, or `RecursionError`; `RepeatedKey` because one of its values would be lost.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise RepeatedKey(f"the key {key} twice in one object")
            found[key] = value
        return found

    return json.loads(text, object_pairs_hook=once)


def write_whole(path: str | Path, text: str) -> None:
    """Writes a file whole or not at all.

    Raises `OSError`, and then leaves what was there. A device or a pipe, such as /dev/stdout, is written to
    and not replaced.
    """
    in_place = os.path.exists(path) and not os.path.isfile(path)
    aside = Path(path if in_place else f"{path}{ASIDE.format(os.getpid())}")
    try:
        aside.write_text(text, encoding="utf-8")
        if not in_place:
            os.replace(aside, path)
    except OSError:
        if not in_place:
            with suppress(OSError):  # a name that is too long
                aside.unlink(missing_ok=True)
        raise


def write_json(option: str, path: str | Path, value: Any) -> None:
    """Writes a value as `write_whole` does. Raises `ConfigError`, naming the option."""
    try:
        write_whole(path, json.dumps(value, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(option, f"cannot write {path}: {error.strerror}", OUTPUT) from None


def check_folder(key: str, folder: str | Path) -> None:
    """Raises `ConfigError`, naming the key, unless the folder can be made and
    written in, and its disk has room.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(4096))
    except OSError as error:
        raise ConfigError(
            key, f"cannot write in {folder}: {error.strerror}", "a folder that can be made and written"
        ) from None
