"""Carries compiled kernels from one machine to another: packs the caches of Triton
and Inductor, and unpacks them.

An archive has a folder for each kind of cache. Triton keys a kernel by its source, its arguments and the
files of the Triton that compiles it, so a kernel that another machine would compile differently is never
taken. Inductor's keys contain PyTorch's version and the GPU. An entry that does not match is
ignored.
"""

import json
import lzma
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.caches import INDUCTOR, TRITON, keep_inductor_private, keep_triton_local

if TYPE_CHECKING:
    from benchmarks.gpu.running import Rows

# For each folder of an archive, the environment variable with the cache's own folder.
KINDS = {"triton": TRITON, "inductor": INDUCTOR}
PREPARED, KEPT = "triton_cache.tar.xz", "caches.tar.xz"  # what `--prepare` makes, and what a run leaves
MOST_BYTES = 15 * 2**20  # of an archive; some machines return files of up to 16 MiB


class BadArchive(Exception):
    """An archive of caches cannot be unpacked."""


def choose_folders() -> None:
    """Set the folders of both caches for this process and those it starts, unless the user has set them."""
    keep_triton_local()
    keep_inductor_private()


def use_folders_in(scratch: Path) -> None:
    """Keep both caches in `scratch`: a dry run compiles nothing that is worth keeping."""
    os.environ.update({variable: str(scratch / kind) for kind, variable in KINDS.items()})


def unpack_all(folder: Path) -> list[str]:
    """Unpack those archives that are in `folder` into the caches' folders; return a line about each.

    A run does not need them, so one that is damaged is no error.
    """
    lines = []
    for name in (PREPARED, KEPT):
        if not (folder / name).is_file():
            continue
        try:
            unpack(folder / name, {kind: Path(os.environ[variable]) for kind, variable in KINDS.items()})
        except BadArchive as error:
            lines.append(f"{name} is left out: {error}")
        else:
            lines.append(f"{name} is unpacked: the kernels in it need not be compiled again")
    return lines or [f"{folder} has no archive of kernels: all kernels are compiled here"]


def unpack(archive: Path, folders: dict[str, Path]) -> None:
    """Unpack each kind of cache in `archive` into its folder.

    Everything is unpacked and checked before a folder changes: Triton would take a kernel without some of its
    files for whole, and a group of files that it cannot read would stop every later run.

    Raises:
        BadArchive: it is damaged, not an archive of caches, or a folder cannot be written.
    """
    if not hasattr(tarfile, "data_filter"):
        raise BadArchive("Python 3.11.4 or newer can unpack it without writing elsewhere")
    with tempfile.TemporaryDirectory() as scratch:
        try:
            with tarfile.open(archive, "r:xz") as tar:
                tar.extractall(scratch, filter="data")
        except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
            raise BadArchive(str(error)) from error

        kinds = list(Path(scratch).iterdir())
        for kind in kinds:
            if kind.name not in folders or not kind.is_dir():
                raise BadArchive(f"{kind.name} is no cache")
        if any(path.is_symlink() for path in Path(scratch).rglob("*")):
            raise BadArchive("it has links")
        if "triton" in folders:
            relocate_triton(Path(scratch) / "triton", folders["triton"])

        for kind in kinds:
            kind.chmod(0o700)  # the cache's folder gets it too
            try:
                shutil.copytree(kind, folders[kind.name], dirs_exist_ok=True)
            except OSError as error:
                raise BadArchive(f"{folders[kind.name]} cannot be written: {error}") from error


def relocate_triton(unpacked: Path, folder: Path) -> None:
    """Correct the paths in a cache of Triton that will be copied to `folder`.

    Triton stores the absolute paths of a kernel's files. Raises `BadArchive` for a group of files that it
    could not read.
    """
    for group in unpacked.glob("*/__grp__*.json"):
        target = folder / group.parent.name
        try:
            content = json.loads(group.read_text(encoding="utf-8"))
            content["child_paths"] = {name: str(target / name) for name in content["child_paths"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadArchive(f"{group.relative_to(unpacked)} is damaged: {error!r}") from error
        group.write_text(json.dumps(content), encoding="utf-8")


def pack(
    archive: Path,
    folders: dict[str, Path],
    most_bytes: int = MOST_BYTES,
    has_time: Callable[[], bool] = lambda: True,
) -> dict[str, int]:
    """Pack the caches into `archive`; return how many files were packed and left out.

    Files that belong together are in one folder. Once `most_bytes` are written or no time is left, the
    remaining folders are left out.
    """
    counts = {"files": 0, "left_out": 0}
    unfinished = archive.with_suffix(".new")
    try:
        # The lowest preset packs about 15 MB/s.
        with unfinished.open("wb") as out, tarfile.open(fileobj=out, mode="w:xz", preset=1) as tar:
            for kind, top in folders.items():
                for folder, _, names in sorted(os.walk(top)):
                    has_room = out.tell() < most_bytes and has_time()
                    counts["files" if has_room else "left_out"] += len(names)
                    for name in names if has_room else ():
                        path = Path(folder) / name
                        tar.add(path, f"{kind}/{path.relative_to(top)}", recursive=False)
        unfinished.replace(archive)
    finally:
        unfinished.unlink(missing_ok=True)
    return counts


def keep(rows: "Rows") -> None:
    """A part of a slice: pack both caches next to the results, for a later run.

    Failing to is not an error of the run.
    """
    folders = {kind: Path(os.environ[variable]) for kind, variable in KINDS.items()}
    archive = rows.folder / KEPT
    try:
        counts = pack(archive, folders, has_time=lambda: rows.left() > 3)
    except OSError as error:
        rows.add(archive=KEPT, skipped_because=f"it cannot be written: {error}")
        return
    rows.add(archive=KEPT, MiB=archive.stat().st_size / 2**20, **counts)
