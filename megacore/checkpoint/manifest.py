"""The manifest of a checkpoint lists every logical tensor, the file that holds each slice of it, and the digests of both.

It contains a digest of itself, so that a flipped bit in it is noticed. A digest does not say who wrote the manifest, so it is read
as if anybody could have.
"""

import hashlib
import json
import os
import re
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import torch
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from megacore.checkpoint.digest import add_digests, identity_word
from megacore.checkpoint.disk import plain_size
from megacore.checkpoint.tiling import overlapping, tiles
from megacore.errors import CheckpointError

FORMAT_VERSION = 4
READABLE = (2, 3, FORMAT_VERSION)
NAMELESS = (2, 3)  # versions whose content digests do not contain a tensor's name, dtype and shape
MANIFEST = "manifest.json"
# `.old` is a step that was saved anew. It counts only if a crash came before the new folder had its name.
STEP_FOLDER = re.compile(r"step_(\d{8,})(\.old)?")

# torch dtype -> its code in a safetensors header. The manifest itself says `float32`, as torch does.
DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_CODES}

# Bounds far above any model: no number in a manifest may make a reader allocate or count without end.
MOST_DIMS, LARGEST, MANIFEST_BYTES = 8, 2**48, 2**31
EARLIER = "use an earlier checkpoint"

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,100}\.safetensors$")]  # in the folder itself: no path leads out of it
Size = Annotated[int, Field(ge=0, le=LARGEST)]
Sizes = Annotated[tuple[Size, ...], Field(max_length=MOST_DIMS)]
ContentDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
FileDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}([0-9a-f]{32})?$")]


class Entry(BaseModel):
    # JSON has lists for tuples. Numbers are not coerced, and unknown keys are refused.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Slice(Entry):
    """A box of a logical tensor, stored under `key` in `file`. Its first element is at `offset` in the whole tensor."""

    file: FileName
    key: str
    offset: Sizes
    shape: Sizes
    digest: ContentDigest  # its part of the tensor's digest


class Logical(Entry):
    """A logical tensor, whose slices tile `shape` exactly."""

    shape: Sizes
    dtype: str
    digest: ContentDigest  # of the whole tensor (see `digest.content_digest`)
    slices: list[Slice]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    def fault(self) -> str | None:
        """Why the whole tensor cannot be read, or None if it can."""
        if self.dtype not in DTYPES:
            return f"has the unknown dtype {self.dtype}"
        for piece in self.slices:
            if not len(piece.offset) == len(piece.shape) == len(self.shape) or any(
                start + size > whole for start, size, whole in zip(piece.offset, piece.shape, self.shape, strict=True)
            ):
                return f"has a slice {piece.shape} at {piece.offset} in {piece.file}, outside its shape {self.shape}"
        extents = [(piece.offset, piece.shape) for piece in self.slices]
        if not tiles(self.shape, extents):
            if pair := overlapping(extents):
                a, b = (self.slices[i] for i in pair)
                return f"has overlapping slices, at {a.offset} in {a.file} and at {b.offset} in {b.file}"
            covered = sum(prod(shape) for _, shape in extents)
            return f"has slices for {covered} of its {prod(self.shape)} elements only"
        if add_digests([piece.digest for piece in self.slices]) != self.digest:
            return "has another digest than its slices together"
        return None


class File(Entry):
    """A file of the checkpoint, as it was written."""

    bytes: Size
    hash: Literal["xxh3_128", "sha256"] = "sha256"  # a name in `digest.HASHES`; version 2 did not record it
    digest: FileDigest = Field(validation_alias=AliasChoices("digest", "sha256"))


class Index(Entry):
    """What one rank wrote: its files, and its slices of tensors."""

    files: dict[FileName, File]
    tensors: dict[str, Logical]


class Manifest(Index):
    """What all ranks wrote, and the run's state, whose entry `model` is the config's model section."""

    format_version: int
    megacore_version: str
    step: Size
    state: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files.values())

    def identity(self, name: str) -> int:
        """The word that stands for tensor `name` in its content digest (see `digest.identity_word`)."""
        tensor = self.tensors[name]
        return 0 if self.format_version in NAMELESS else identity_word(name, tensor.dtype, tensor.shape)

    def fault(self) -> str | None:
        """The first contradiction in the manifest, or None."""
        room = {name: file.bytes for name, file in self.files.items()}
        taken = set()
        for name, tensor in self.tensors.items():
            if fault := tensor.fault():
                return f"tensor {name} {fault}"
            for piece in tensor.slices:
                if (piece.file, piece.key) in taken:
                    return f"tensor {name} has a slice in {piece.file} that another one has: {piece.key[:200]}"
                taken.add((piece.file, piece.key))
                if piece.file not in room:
                    return f"tensor {name} is in {piece.file}, of no recorded size"
                room[piece.file] -= prod(piece.shape) * DTYPES[tensor.dtype].itemsize
                if room[piece.file] < 0:
                    return f"tensor {name} does not fit in the {self.files[piece.file].bytes} bytes of {piece.file}"
        return None


# The text begins with its own digest: of an opening brace and everything behind this head.
HEAD = re.compile(rb'\{"manifest_sha256": "([0-9a-f]{64})", ')


def sealed(content: dict[str, Any]) -> bytes:
    """The text of manifest.json for `content`: one JSON object that begins with its digest."""
    body = json.dumps(content, allow_nan=False).encode()
    return b'{"manifest_sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'", ' + body[1:]


def unsealed(text: bytes) -> bytes:
    """The JSON text that `sealed` was given, once its digest is checked.

    Raises:
        ValueError: it has changed, or is not standard JSON.
        UnknownVersion: it is of another version.
    """
    head = HEAD.match(text)
    body = text if head is None else b"{" + text[head.end() :]
    if head is not None and hashlib.sha256(body).hexdigest().encode() != head[1]:
        raise ValueError("its digest is of another content")
    version = _json(body).get("format_version")
    if version not in READABLE and isinstance(version, int):
        raise UnknownVersion(version)
    if head is None:
        raise ValueError("it does not begin with its digest")
    return body


class UnknownVersion(ValueError):
    """The manifest has a format version that this megacore does not read."""


def _json(text: bytes) -> dict[str, Any]:
    """Parses a JSON object. Unlike Python's parser it refuses NaN, and a key that stands twice."""

    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"it holds {name}")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("it holds a key twice")
        return found

    content = json.loads(text.decode(), parse_constant=no_constant, object_pairs_hook=once)
    if not isinstance(content, dict):
        raise ValueError("it is not an object")
    return content


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of the checkpoint in folder `path`; checks its digest, its contents, and the sizes of the files.

    Raises:
        CheckpointError: no checkpoint, another version, a changed manifest, a tensor with a hole or an overlap, a missing or cut-off file.
    """
    size = plain_size(path / MANIFEST)
    if size is None:
        where = f"has no {MANIFEST}" if path.is_dir() else "there is no such folder"
        if path.is_dir() and not os.access(path, os.X_OK, effective_ids=True):
            where = "cannot be read: Permission denied"
        raise CheckpointError(str(path), where, "give a step_… folder of a run's checkpoints/")
    try:
        if size > MANIFEST_BYTES:
            raise ValueError(f"it has {size} bytes")
        manifest = Manifest.model_validate_json(unsealed((path / MANIFEST).read_bytes()))
    except UnknownVersion as error:
        right = f"this megacore reads format versions {READABLE[0]} to {READABLE[-1]}; read it with the megacore that wrote it"
        raise CheckpointError(str(path), f"{MANIFEST} has format version {error}", right) from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        reason = f"{'.'.join(map(str, first['loc']))[:200]}: {first['msg']}"
        raise CheckpointError(str(path), f"{MANIFEST} is damaged: {reason}", EARLIER) from None
    except OSError as error:
        raise CheckpointError(str(path), f"{MANIFEST} cannot be read: {error.strerror}", EARLIER) from error
    except (ValueError, RecursionError) as error:  # which the parser raises for deep nesting
        raise CheckpointError(str(path), f"{MANIFEST} is damaged: {' '.join(str(error).split())[:200]}", EARLIER) from error
    if fault := manifest.fault():
        raise CheckpointError(str(path), fault, "every element must be in exactly one slice")
    named = STEP_FOLDER.fullmatch(path.name)
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(str(path), f"{MANIFEST} is of step {manifest.step}", "a folder has the name of its step")
    for name, file in manifest.files.items():
        found = plain_size(path / name)
        if found != file.bytes:
            wrong = f"{name} is missing, or no plain file" if found is None else f"{name} has {found} bytes of {file.bytes}"
            raise CheckpointError(str(path), wrong, f"copy the whole folder again, or {EARLIER}")
    return manifest
