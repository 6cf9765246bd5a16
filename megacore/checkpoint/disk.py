"""Files that are on the disk when a function returns, and say so when they are not.

Everything that changes a checkpoints folder goes through the calls of `os`, one for each write, fsync and rename.
"""

import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from megacore.checkpoint.digest import file_hash

BLOCK_BYTES = 8 << 20  # hashed and written, or read, at a time
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_file(path: Path, parts: Iterable[memoryview | bytes]) -> tuple[int, str]:
    """Write a new file, wait until it is on the disk, and return its size in bytes and digest.

    Raises:
        OSError: it could not be written, or what is read back is not what was written. What there is of it is left.
    """
    digest, size = file_hash(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for part in parts:
            for start in range(0, len(part), BLOCK_BYTES):
                block = memoryview(part)[start : start + BLOCK_BYTES]
                digest.update(block)
                size += len(block)
                while block:
                    block = block[os.write(descriptor, block) :]
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):  # or reading back would only show this machine's memory
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    if file_digest(path) != digest.hexdigest():
        raise OSError(errno.EIO, "what is read back is not what was written", str(path))
    return size, digest.hexdigest()


def file_digest(path: Path) -> str:
    """The digest of a file's bytes, in memory for one block.

    Raises:
        OSError: it cannot be read.
    """
    digest = file_hash()
    for block in _blocks(path):
        digest.update(block)
    return digest.hexdigest()


def _blocks(path: Path) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield buffer[:count]


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that nobody sees in part."""
    aside = path.with_name(f"{path.name}.writing")
    write_file(aside, [content])
    os.rename(aside, path)


def plain_size(path: Path) -> int | None:
    """Bytes of a plain file; None where there is none, or a link, a folder or a device in its place."""
    try:
        found = os.lstat(path)
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable, not only the contents of its files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(folder: Path) -> None:
    """Delete a folder, if it is there."""
    if folder.exists():
        shutil.rmtree(folder)


def free_bytes(folder: Path) -> int:
    """What a user may still write on the file system of `folder`, or of the nearest folder above it that is there."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def size_text(nbytes: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    size, units = float(nbytes), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while size >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{size:.4g} {unit}"
