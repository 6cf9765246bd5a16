"""Reading checkpoints: the newest whole one, and any slice of any tensor in it."""

import logging
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megacore.checkpoint.manifest import DTYPE_CODES, DTYPES, MANIFEST, Manifest, Slice, overlap, read_manifest
from megacore.errors import CheckpointError
from megacore.tensor_parallel.shard import Box, Shard

logger = logging.getLogger(__name__)

# `.old` is a step that was being saved anew: it counts only where the crash came before the new one took its place.
STEP_FOLDER = re.compile(r"step_(\d{8,})(\.old)?")

# Model keys that may change between a checkpoint and the run that resumes it: they do not touch what is computed. (max_positions
# is the shape of a learned position table, which is compared as every tensor's is.)
FREE_MODEL_KEYS = {"dropout", "attention", "init_std", "max_positions"}


class Reader:
    """An open checkpoint. Any rank of any layout reads the slices it needs, and only the bytes of those.

    Opening checks the manifest and that every file is there in its recorded size, so that all ranks refuse a damaged
    checkpoint alike, before any of them waits for another; `verify` also opens every file.

    Raises:
        CheckpointError: no such checkpoint, or it is damaged or of an unknown version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: Manifest = read_manifest(path)
        self._files: dict[str, safe_open] = {}  # opened once: parsing a header for each slice would be quadratic

    @property
    def step(self) -> int:
        """The step after whose update the checkpoint was written."""
        return self.manifest.step

    @property
    def state(self) -> dict[str, Any]:
        """The JSON state that `save` was given."""
        return self.manifest.state

    @property
    def names(self) -> list[str]:
        """The logical tensors, in the order of their names."""
        return sorted(self.manifest.tensors)

    def read(self, name: str, shard: Box | Shard) -> Tensor:
        """The slice of tensor `name` that `shard` describes, on the CPU, in the dtype it was saved in.

        Raises:
            CheckpointError: no such tensor, another global shape, or a damaged file.
        """
        self.check(name, shard.global_shape)
        out = torch.empty(shard.local_shape, dtype=DTYPES[self.manifest.tensors[name].dtype])
        self.read_into(name, shard, out)
        return out

    @torch.no_grad()
    def read_into(self, name: str, shard: Box | Shard, out: Tensor) -> None:
        """`read`, copied into `out` (`shard.local_shape`; any dtype, any device), which may be a parameter."""
        self.check(name, shard.global_shape)
        assert out.shape == shard.local_shape, f"{name}: {tuple(out.shape)} given for a slice of {shard.local_shape}"
        for piece in self.manifest.tensors[name].slices:
            box = overlap(piece.offset, piece.shape, shard.offset, shard.local_shape)
            if box is not None:
                out[_relative(box, shard.offset)].copy_(self._stored(name, piece)[_relative(box, piece.offset)])

    def check_model(self, model: dict[str, Any], otherwise: str = "take another checkpoint") -> None:
        """Refuse a model section that is not the one the checkpoint was written with, naming the first key that differs.

        Keys that only one of them has are passed over, as are those that change no shape and no function (dropout). `otherwise`
        is what to do for a user who wants the section as it is.
        """
        recorded = self.state.get("model", {})
        for key in model:  # in the schema's order: what others are derived from comes first
            if key in recorded and key not in FREE_MODEL_KEYS and recorded[key] != model[key]:
                wrong = f"was written with model.{key}={recorded[key]}, and the config says {model[key]}"
                right = f"set model.{key}={recorded[key]}, or {otherwise}"
                raise CheckpointError(str(self.path), wrong, right)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a logical tensor that is not there, or not of this shape.

        Raises:
            CheckpointError: naming it.
        """
        tensor = self.manifest.tensors.get(name)
        right = "set the model section of the config to the one recorded in its manifest.json"
        if tensor is None:
            raise CheckpointError(str(self.path), f"has no tensor {name} of shape {shape}", right)
        if tensor.shape != shape:
            raise CheckpointError(str(self.path), f"tensor {name} has shape {tensor.shape}, and the model of this config {shape}", right)

    def verify(self) -> None:
        """Open every file and compare its header with the manifest.

        Raises:
            CheckpointError: naming the file or the tensor that is not what the manifest says.
        """
        for name, tensor in self.manifest.tensors.items():
            for piece in tensor.slices:
                self._stored(name, piece)

    def _stored(self, name: str, piece: Slice) -> Any:
        """A slice on disk, its header checked: a lazy safetensors slice that reads what it is indexed with."""
        try:
            if piece.file not in self._files:
                self._files[piece.file] = safe_open(self.path / piece.file, framework="pt")
            stored = self._files[piece.file].get_slice(piece.key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(str(self.path), f"{piece.file} is damaged: {error}", "use an earlier checkpoint") from error
        dtype = DTYPE_CODES[DTYPES[self.manifest.tensors[name].dtype]]
        if tuple(stored.get_shape()) != piece.shape or stored.get_dtype() != dtype:
            wrong = f"tensor {name} is {stored.get_dtype()} {tuple(stored.get_shape())} in {piece.file}"
            raise CheckpointError(str(self.path), wrong, f"its manifest says {dtype} {piece.shape}; use an earlier checkpoint")
        return stored


def _relative(box: tuple[slice, ...], offset: tuple[int, ...]) -> tuple[slice, ...]:
    """`box`, in coordinates that start at `offset`."""
    return tuple(slice(s.start - start, s.stop - start) for s, start in zip(box, offset, strict=True))


def checkpoints_in(path: Path) -> list[Path]:
    """The step folders that `path` means, newest first, whole or not.

    `path` is a run's log.dir, its checkpoints folder, or a step folder itself; a path that is none of them has none.
    """
    if (path / MANIFEST).exists() or STEP_FOLDER.fullmatch(path.name):
        return [path]
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if not directory.is_dir():
        return []
    steps = ((match, child) for child in directory.iterdir() if (match := STEP_FOLDER.fullmatch(child.name)))
    return [child for _, child in sorted(steps, key=lambda step: (int(step[0][1]), step[0][2] is None), reverse=True)]


def find_latest(path: Path) -> Path | None:
    """The newest whole checkpoint in `path` (see `checkpoints_in`), or None. Logs a warning for each that it skips.

    Call it on one rank and share the step: ranks that look for themselves may see different folders.
    """
    for candidate in checkpoints_in(path):
        try:
            Reader(candidate).verify()
        except CheckpointError as error:
            logger.warning("skipped a checkpoint that is not whole: %s", error)
        else:
            return candidate
    return None


def locate(path: Path) -> Path:
    """The checkpoint that a user means by `path`: the step folder itself, or the newest whole one of a run.

    Raises:
        CheckpointError: there is none, or the step folder is damaged.
    """
    candidates = checkpoints_in(path)
    if candidates == [path]:
        Reader(path).verify()
        return path
    latest = find_latest(path)
    if latest is None:
        wrong = "holds no checkpoint" if not candidates else f"none of its {len(candidates)} checkpoints is whole"
        raise CheckpointError(str(path), wrong, "give a run's log.dir, its checkpoints folder or one step_… folder")
    return latest
