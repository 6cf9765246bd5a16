"""Writing checkpoints: aside, checked, then renamed, so that a folder called step_… is always whole.

The shared file system carries everything that ranks tell one another, besides the barriers: each leaves an index of
what it wrote, and rank 0 merges them. A rank that cannot write raises at once, with its own reason; the
others are left in the barrier, to be ended with the job.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import megacore
from megacore.checkpoint.manifest import DTYPE_CODES, FORMAT_VERSION, MANIFEST, Index, Logical, Manifest, Slice
from megacore.checkpoint.read import Reader, checkpoints_in
from megacore.errors import CheckpointError
from megacore.tensor_parallel.shard import Box, Shard, logical_name

logger = logging.getLogger(__name__)

LocalTensor = tuple[Tensor, Box | Shard]  # this rank's piece, and where it stands in the logical tensor
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # what a file will hold, in its order


def save(
    directory: Path,
    step: int,
    tensors: Mapping[str, LocalTensor],
    state: dict[str, Any],
    *,
    rank: int,
    world: int,
    barrier: Callable[[], None],
    keep: int,
) -> Path:
    """Write the checkpoint of `step` and return its folder. Every rank calls it; on return it is whole and on disk.

    Args:
        directory: the run's checkpoints folder, on a file system that all ranks share.
        tensors: this rank's pieces by logical name (see `shard.piece_key`). Those not `counted` are another rank's to write.
        state: JSON values (step, samples, seed, …; `model`: the config's model section). Rank 0's is written.
        barrier: waits for all `world` ranks.
        keep: whole checkpoints to keep, this one among them; older ones are deleted.

    Raises:
        CheckpointError: the slices do not tile their tensors (nothing is committed).
        OSError: this rank could not write. Earlier checkpoints stay.
    """
    final = directory / f"step_{step:08d}"
    partial = final.with_suffix(".partial")
    try:
        if rank == 0:
            for leftover in directory.glob("step_*.partial"):  # of a save that was interrupted
                shutil.rmtree(leftover)
            partial.mkdir(parents=True)
        barrier()
        own = {name: piece for name, piece in tensors.items() if piece[1].counted}
        for name, (tensor, shard) in own.items():
            assert tensor.shape == shard.local_shape, f"{name}: {tuple(tensor.shape)} is not the slice {shard.local_shape}"
        # Widest dtype first: every tensor is then aligned, as readers that map the file expect.
        names = sorted(own, key=lambda name: (-own[name][0].itemsize, name))
        _write_rank(partial, rank, {name: (own[name][0].dtype, own[name][1]) for name in names}, (own[name][0] for name in names))
        barrier()
        if rank == 0:
            _merge(partial, step, state, world)
            _commit(partial, final)
        barrier()
        if rank == 0:
            _prune(directory, final, keep)
    except OSError as error:
        raise OSError(f"rank {rank} of {world} could not save the checkpoint {final}: {error}") from error
    return final


def save_stream(directory: Path, step: int, layout: Layout, tensors: Iterator[Tensor], state: dict[str, Any], file_bytes: int) -> Path:
    """Write the checkpoint of `step` from one process that never holds more than one tensor, and return its folder.

    Args:
        directory: the run's checkpoints folder.
        layout: whole logical tensors.
        tensors: the same, made one after the other when their turn comes, in the order of `layout`.
        state: as for `save`.
        file_bytes: a file is closed before it would exceed this; a tensor that alone does has a file of its own.
    """
    final = directory / f"step_{step:08d}"
    partial = final.with_suffix(".partial")
    partial.mkdir(parents=True)
    files = pack(layout, file_bytes)
    for part, names in enumerate(files):  # as if each file were the work of a rank of its own
        _write_rank(partial, part, {name: (layout[name][0], Shard(layout[name][1])) for name in names}, tensors)
    _merge(partial, step, state, len(files))
    _commit(partial, final)
    return final


def pack(layout: Layout, file_bytes: int) -> list[list[str]]:
    """The names of `layout`, in order, cut into files of at most `file_bytes` (a larger tensor has a file of its own)."""
    files: list[list[str]] = [[]]
    size = 0
    for name, (dtype, shape) in layout.items():
        nbytes = dtype.itemsize * prod(shape)
        if files[-1] and size + nbytes > file_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size += nbytes
    return files


def _write_rank(folder: Path, rank: int, pieces: Mapping[str, tuple[torch.dtype, Box | Shard]], tensors: Iterator[Tensor]) -> None:
    """Write a rank's slices and its index. A rank without any leaves an empty index, so that a lost one is noticed."""
    file = folder / f"rank_{rank:05d}.safetensors"
    entries: dict[str, Logical] = {}
    for key, (dtype, box) in pieces.items():
        if prod(box.local_shape) > 0:  # a rank beyond the end of a size that does not divide holds nothing
            entry = Logical(shape=box.global_shape, dtype=str(dtype).removeprefix("torch."), slices=[])
            piece = Slice(file=file.name, key=key, offset=box.offset, shape=box.local_shape)
            entries.setdefault(logical_name(key), entry).slices.append(piece)
    files = {}
    if entries:
        layout = {key: (dtype, box.local_shape) for key, (dtype, box) in pieces.items()}
        files[file.name] = write_safetensors(file, layout, tensors)
    _write_json(_index(folder, rank), Index(files=files, tensors=entries))


def write_safetensors(file: Path, layout: Layout, tensors: Iterator[Tensor]) -> int:
    """Write a safetensors file, one tensor after the other, and return its size in bytes.

    The library's own writer wants every tensor on the CPU at once; this one needs memory for the largest only,
    where a host with eight devices may not have room for all their weights and moments, or a model may be larger than memory.

    Args:
        layout: what the file will hold; without elements is left out.
        tensors: as many tensors in that order, on any device. Each is let go before the next is asked for.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in layout.items():
        start, end = end, end + dtype.itemsize * prod(shape)
        if end > start:
            header[name] = {"dtype": DTYPE_CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with file.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for name, expected in layout.items():
            tensor = next(tensors)
            assert (tensor.dtype, tensor.shape) == expected, f"{name}: {tensor.dtype} {tuple(tensor.shape)} is not {expected}"
            # Bytes of a flat copy: numpy knows no bfloat16, and a 0-dim tensor cannot be viewed in another width.
            out.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del tensor
        out.flush()
        os.fsync(out.fileno())
        return out.tell()


def _merge(folder: Path, step: int, state: dict[str, Any], world: int) -> None:
    """Merge the indexes of all ranks into the manifest, and read the whole back as a check."""
    files: dict[str, int] = {}
    tensors: dict[str, Logical] = {}
    for rank in range(world):
        index = Index.model_validate_json(_index(folder, rank).read_text(encoding="utf-8"))
        files |= index.files
        for name, entry in index.tensors.items():
            known = tensors.setdefault(name, entry.model_copy(update={"slices": []}))
            if (known.shape, known.dtype) != (entry.shape, entry.dtype):
                wrong = f"tensor {name} is {entry.dtype} {entry.shape} on rank {rank}"
                raise CheckpointError(str(folder), wrong, f"{known.dtype} {known.shape} on the ranks before")
            known.slices.extend(entry.slices)
    _write_json(
        folder / MANIFEST,
        Manifest(
            format_version=FORMAT_VERSION, megacore_version=megacore.__version__, step=step, state=state, files=files, tensors=tensors
        ),
    )
    Reader(folder).verify()
    for rank in range(world):
        _index(folder, rank).unlink()


def _commit(partial: Path, final: Path) -> None:
    """Give the whole checkpoint its name. An earlier one of the same step is renamed aside, and found there if we stop between."""
    _sync_folder(partial)
    if final.exists():
        old = final.with_suffix(".old")
        if old.exists():
            shutil.rmtree(old)
        final.rename(old)
    partial.rename(final)
    _sync_folder(final.parent)


def _prune(directory: Path, newest: Path, keep: int) -> None:
    """Delete what is older than the `keep` newest whole checkpoints; `newest`, just written, is always one of them.

    Only whole ones count, so damage never uses up the room of a checkpoint that could be resumed from.
    """
    whole = 1
    for path in checkpoints_in(directory):
        if path == newest:
            continue
        replaced = path.suffix == ".old" and path.with_suffix("").exists()
        if whole < keep and not replaced:
            whole += _is_whole(path)
        else:
            _delete(path)


def _delete(path: Path) -> None:
    try:
        # Out of sight first: a deletion that is interrupted must not leave a damaged checkpoint.
        doomed = path.with_suffix(".partial")
        path.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:  # the new checkpoint is safe: an old one that stays is no reason to end the run
        logger.warning("could not delete the old checkpoint %s: %s", path, error)


def _is_whole(path: Path) -> bool:
    try:
        Reader(path).verify()
    except CheckpointError:
        return False
    return True


def _index(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.json"


def _write_json(file: Path, model: Index) -> None:
    with file.open("w", encoding="utf-8") as out:
        json.dump(model.model_dump(), out)
        out.flush()
        os.fsync(out.fileno())


def _sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable, not only the contents of its files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
