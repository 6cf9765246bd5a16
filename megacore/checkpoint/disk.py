"""Writes files so that they are on the disk when a function returns; raises if they are not.

Everything that changes a checkpoints folder goes through the calls of `os`, one for each write, fsync and
rename.
"""

import errno
import fcntl
import mmap
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from megacore.checkpoint.digest import new_file_hash

# hashed and written, or read, at a time; more is no faster, and takes the cache from training
BLOCK_BYTES = 2 << 20
DIRECT = getattr(os, "O_DIRECT", 0)  # not on macOS
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_file(path: Path, parts: Iterable[memoryview | bytes]) -> tuple[int, str]:
    """Write a new file, wait until it is on the disk, and return its size in bytes and digest.

    Writes and reads back past the kernel's page cache where the file system can: a save then takes a third
    less processor time, and what is read back comes from the disk.

    Raises:
        OSError: it could not be written, or what is read back differs. The unfinished file is left.
    """
    digest, size = new_file_hash(), 0
    descriptor = _open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for block in _gathered(parts):
            digest.update(block)
            size += len(block)
            while block:
                if len(block) < BLOCK_BYTES:  # the file's end, or what a short write left: not aligned
                    _leave_direct(descriptor)
                try:
                    block = block[os.write(descriptor, block) :]
                except OSError as error:
                    if error.errno != errno.EINVAL or not _leave_direct(descriptor):
                        raise
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):  # else reading back might only show the page cache
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    if _digest(_open_direct(path, os.O_RDONLY)) != digest.hexdigest():
        raise OSError(errno.EIO, "what is read back is not what was written", str(path))
    return size, digest.hexdigest()


def file_digest(path: Path) -> str:
    """Return the digest of a file, as its manifest records it.

    It needs memory for one block, and leaves the file in the page cache.

    Raises:
        OSError: it cannot be read.
    """
    return _digest(os.open(path, os.O_RDONLY))


def _digest(descriptor: int) -> str:
    """Reads to the end, closes the descriptor, and returns the digest."""
    try:
        digest, buffer, count = new_file_hash(), _buffer(), 1
        while count:
            try:
                count = os.readv(descriptor, [buffer])
            except OSError as error:
                if error.errno != errno.EINVAL or not _leave_direct(descriptor):
                    raise
                continue
            digest.update(buffer[:count])
        return digest.hexdigest()
    finally:
        os.close(descriptor)


def _gathered(parts: Iterable[memoryview | bytes]) -> Iterator[memoryview]:
    """The parts' bytes in full blocks, and a last shorter one. Each block overwrites the one before."""
    buffer, filled = _buffer(), 0
    target = np.frombuffer(buffer, np.uint8)
    for part in parts:
        left = memoryview(part)
        while left:
            count = min(len(left), BLOCK_BYTES - filled)
            # a slice's assignment holds the interpreter
            np.copyto(target[filled : filled + count], np.frombuffer(left[:count], np.uint8))
            filled, left = filled + count, left[count:]
            if filled == BLOCK_BYTES:
                yield buffer
                filled = 0
        del part, left  # else a tensor would stay in memory until the next is there
    if filled:
        yield buffer[:filled]


def _buffer() -> memoryview:
    """A block of memory that begins on a page, as reading and writing past the page cache need."""
    return memoryview(mmap.mmap(-1, BLOCK_BYTES))


def _open_direct(path: Path, flags: int) -> int:
    """A descriptor that bypasses the page cache, or a plain one if the file system has no such."""
    try:
        return os.open(path, flags | DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o644)


def _leave_direct(descriptor: int) -> bool:
    """Switches to the page cache, which takes any number of bytes; returns whether the descriptor bypassed it
    before. Some file systems refuse to bypass it only now, with EINVAL.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~DIRECT)
    return bool(flags & DIRECT)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that nobody ever sees a part of it."""
    aside = path.with_name(f"{path.name}.writing")
    write_file(aside, [content])
    os.rename(aside, path)


def plain_size(path: Path) -> int | None:
    """Bytes of a plain file; None if there is none, or if it is a link, a folder or a device."""
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
    """Bytes that a user may still write on the file system of `folder`, or of the
    nearest folder above it that exists.
    """
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
