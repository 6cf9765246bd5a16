"""The manifest of a checkpoint lists every logical tensor, the file that holds each slice
of it, and the digests of both.

It contains a digest of itself, so that a flipped bit in it is noticed. A digest does not say who wrote the
manifest, so it is read as if anybody could have.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
from pydantic import ValidationError

from megacore.checkpoint.digest import digest_text, identity_word
from megacore.checkpoint.disk import plain_size
from megacore.checkpoint.format import DTYPES, File, Logical, Text
from megacore.checkpoint.slices import Numbers, Slice, Slices, overlapping, tiled
from megacore.distributed.shard import TensorSlice, piece_name
from megacore.errors import CheckpointError

FORMAT_VERSION = 5
MANIFEST = "manifest.json"
# `.old` is a step that was saved anew. It counts only if a crash came before the new folder had its name.
STEP_FOLDER = re.compile(r"step_([0-9]{8,})(\.old)?")
MANIFEST_BYTES = 2**31
LARGEST_CHECKPOINT = 2**62  # bytes
EARLIER = "use an earlier checkpoint"


@dataclass
class Manifest:
    """What all ranks wrote, and the state of the run. `slices` stand in the order of `tensors`."""

    megacore_version: str
    step: int
    state: dict[str, Any]
    files: dict[str, File]
    tensors: dict[str, Logical]
    slices: Slices
    text: bytes = field(default=b"", repr=False)  # as it was read, for other ranks

    def __post_init__(self) -> None:
        ends = list(accumulate(tensor.slices for tensor in self.tensors.values()))
        starts = [0, *ends[:-1]]
        self.names, self.file_names, self.ends = (
            list(self.tensors),
            list(self.files),
            np.array(ends, np.int64),
        )
        self.places = {name: place for place, name in enumerate(self.file_names)}
        self.spans = {
            name: slice(start, end) for name, start, end in zip(self.names, starts, ends, strict=True)
        }

    @classmethod
    def of_text(cls, text: bytes) -> Self:
        """What stands in the text of manifest.json, not yet compared with itself.

        Raises:
            ValueError: something in it has changed, or it is not a manifest's; a `ValidationError` where an
                entry is not.
            UnknownVersion: it is of another version.
        """
        read = Text.model_validate_json(unsealed(text))
        dims = max((len(tensor.shape) for tensor in read.tensors.values()), default=0)
        slices = Slices.of_texts(read.slices, sum(tensor.slices for tensor in read.tensors.values()), dims)
        return cls(read.megacore_version, read.step, read.state, read.files, read.tensors, slices, text)

    def sealed(self) -> bytes:
        """The text of manifest.json."""
        content = Text(
            format_version=FORMAT_VERSION,
            megacore_version=self.megacore_version,
            step=self.step,
            state=self.state,
            files=self.files,
            tensors=self.tensors,
            slices=self.slices.texts(),
        )
        return sealed(content.model_dump())

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files.values())

    def identity(self, name: str) -> int:
        """The word that stands for tensor `name` in its content digest (see `digest.identity_word`)."""
        tensor = self.tensors[name]
        return identity_word(name, tensor.dtype, tensor.shape)

    def pieces(self, name: str, box: TensorSlice | None = None) -> Iterator[Slice]:
        """The slices of a tensor, or those of them that share an element with `box`."""
        span = self.spans[name]
        rows = (
            np.arange(span.start, span.stop)
            if box is None
            else span.start + self.slices[span].overlapping(box)
        )
        return (piece for _, piece in self.named(rows))

    def named(self, rows: Numbers) -> Iterator[tuple[str, Slice]]:
        """Slices, each with the name of its tensor."""
        owners = np.searchsorted(self.ends, rows, side="right")  # no empty tensor's: its end is its start
        for owner, file, number, offset, shape, digest in zip(
            owners.tolist(), *self.slices[rows].lists(), strict=True
        ):
            name = self.names[owner]
            dims = len(self.tensors[name].shape)
            piece = Slice(
                self.file_names[file],
                piece_name(name, number),
                tuple(offset[:dims]),
                tuple(shape[:dims]),
                digest,
            )
            yield name, piece

    def fault(self) -> str | None:
        """The first contradiction in the manifest, or None."""
        if self.nbytes > LARGEST_CHECKPOINT:
            return f"has files of {self.nbytes} bytes"
        if int(self.slices.file.max(initial=0)) >= len(self.files) and len(self.slices):
            return f"has a slice in file {self.slices.file.max()} of {len(self.files)}"
        for name, tensor in self.tensors.items():
            if tensor.dtype not in DTYPES:
                return f"tensor {name} has the unknown dtype {tensor.dtype}"
            if "#" in name:
                return f"tensor {name} has the name of a slice"
            if tensor.nbytes > LARGEST_CHECKPOINT:
                return f"tensor {name} has {tensor.nbytes} bytes"
        return self._fault_of_slices()

    def _fault_of_slices(self) -> str | None:
        """The first reason why a tensor cannot be read in whole.

        All tensors are looked at together: there may be a million.
        """
        rows, tensors = self.slices, list(self.tensors.values())
        dims = np.array([len(tensor.shape) for tensor in tensors], np.int64)
        most = rows.offset.shape[1]
        shapes = np.array(
            [(*tensor.shape, *(1,) * (most - len(tensor.shape))) for tensor in tensors], np.int64
        ).reshape(len(tensors), most)
        owners = np.repeat(np.arange(len(tensors)), np.diff(self.ends, prepend=0))
        offset, shape = rows.offset.astype(np.int64), rows.shape.astype(np.int64)
        beyond = np.arange(most) >= dims[owners, None]  # dims that a tensor does not have
        outside = (offset + shape > shapes[owners]).any(axis=1) | (
            beyond & ((offset != 0) | (shape != 1))
        ).any(axis=1)
        if outside.any():
            name, first = self._first(outside)
            return (
                f"tensor {name} has a slice {first.shape} at {first.offset} in {first.file}, outside "
                f"its shape {self.tensors[name].shape}"
            )
        for count in np.unique(dims).tolist():
            own = np.flatnonzero(dims == count)
            mine = np.flatnonzero(dims[owners] == count)
            whole = tiled(
                shapes[own, :count],
                np.searchsorted(own, owners[mine]),
                offset[mine, :count],
                shape[mine, :count],
            )
            if not whole.all():
                return self._untiled(self.names[own[np.argmin(whole)]])
        # modulo 2⁶⁴, as digests add up
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(rows.digest, dtype=np.uint64)])
        for name, tensor, digest in zip(
            self.names, tensors, np.diff(sums[np.concatenate([[0], self.ends])]).tolist(), strict=True
        ):
            if digest_text(digest) != tensor.digest:
                return f"tensor {name} has another digest than its slices together"
        return self._fault_of_places(
            owners,
            shape.prod(axis=1) * np.array([DTYPES[t.dtype].itemsize for t in tensors], np.int64)[owners],
        )

    def _untiled(self, name: str) -> str:
        """Why the slices of a tensor do not make it up."""
        tensor, rows = self.tensors[name], self.slices[self.spans[name]]
        offsets, shapes, dims = rows.offset.tolist(), rows.shape.tolist(), len(tensor.shape)
        boxes = [
            (tuple(offset[:dims]), tuple(shape[:dims])) for offset, shape in zip(offsets, shapes, strict=True)
        ]
        if pair := overlapping(boxes):
            a, b = (piece for _, piece in self.named(self.spans[name].start + np.array(pair)))
            return (
                f"tensor {name} has overlapping slices, at {a.offset} in {a.file} and at {b.offset} in "
                f"{b.file}"
            )
        elements = sum(prod(shape) for _, shape in boxes)
        return f"tensor {name} has slices for {elements} of its {prod(tensor.shape)} elements only"

    def _fault_of_places(self, owners: Numbers, nbytes: Numbers) -> str | None:
        """Two slices in one place, or more in a file than fits there; `owners`, `nbytes`: of each
        slice its tensor and its size.
        """
        file, number = self.slices.file, self.slices.number
        order = np.lexsort((number, file, owners))
        same = [column[order][1:] == column[order][:-1] for column in (number, file, owners)]
        again = np.zeros(len(order), bool)
        again[order[1:]] = same[0] & same[1] & same[2]
        again |= number == 0
        if again.any():
            return f"tensor {self._first(again)[0]} has two slices of one name in one file"
        order = np.argsort(file, kind="stable")
        filled = np.cumsum(nbytes[order], dtype=np.float64)  # exact as far as a file may be large
        begins = np.searchsorted(file[order], np.arange(len(self.files)))
        before = np.concatenate([[0.0], filled])[begins][file[order]]
        full = np.zeros(len(order), bool)
        full[order] = (
            filled - before > np.array([one.bytes for one in self.files.values()], np.float64)[file[order]]
        )
        if full.any():
            name, first = self._first(full)
            return f"tensor {name} does not fit in the {self.files[first.file].bytes} bytes of {first.file}"
        return None

    def _first(self, rows: Numbers) -> tuple[str, Slice]:
        """The first slice for which `rows` are true, with the name of its tensor."""
        return next(self.named(np.flatnonzero(rows)[:1]))


# The text begins with its own digest: of an opening brace and everything behind this head.
HEAD = re.compile(rb'\{"manifest_sha256": "([0-9a-f]{64})", ')


def sealed(content: dict[str, Any]) -> bytes:
    """The text of manifest.json for `content`: one JSON object that begins with its digest."""
    body = json.dumps(content, allow_nan=False).encode()
    return b'{"manifest_sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'", ' + body[1:]


def unsealed(text: bytes) -> bytes:
    """Return the JSON text that `sealed` was given, after checking its digest and format version.

    Raises:
        ValueError: it has changed, or is not standard JSON.
        UnknownVersion: it is of another version.
    """
    head = HEAD.match(text)
    body = text if head is None else b"{" + text[head.end() :]
    if head is not None and hashlib.sha256(body).hexdigest().encode() != head[1]:
        raise ValueError("its digest is of another content")
    version = _json(body).get("format_version")
    if isinstance(version, int) and version != FORMAT_VERSION:
        raise UnknownVersion(version)
    if head is None:
        raise ValueError("it does not begin with its digest")
    if not isinstance(version, int):
        raise ValueError("its format_version is not an integer")
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
    """Reads the manifest of the checkpoint in folder `path`; checks its digest, its
    contents, and the sizes of the files.

    Raises:
        CheckpointError: no checkpoint, another version, a changed manifest, a tensor with a hole or an
            overlap, a missing or cut-off file.
    """
    size = plain_size(path / MANIFEST)
    if size is None:
        where = f"has no {MANIFEST}" if path.is_dir() else "there is no such folder"
        if path.is_dir() and not os.access(path, os.X_OK, effective_ids=True):
            where = "cannot be read: Permission denied"
        raise CheckpointError(str(path), where, "give a step_… folder of a run's checkpoints/")
    if size > MANIFEST_BYTES:
        raise CheckpointError(str(path), f"{MANIFEST} is damaged: it has {size} bytes", EARLIER)
    try:
        text = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise CheckpointError(str(path), f"{MANIFEST} cannot be read: {error.strerror}", EARLIER) from error
    manifest = parsed(path, text)
    if fault := manifest.fault():
        raise CheckpointError(str(path), fault, "every element must be in exactly one slice")
    named = STEP_FOLDER.fullmatch(path.name)
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(
            str(path), f"{MANIFEST} is of step {manifest.step}", "a folder has the name of its step"
        )
    for name, file in manifest.files.items():
        found = plain_size(path / name)
        if found != file.bytes:
            wrong = (
                f"{name} is missing, or no plain file"
                if found is None
                else f"{name} has {found} bytes of {file.bytes}"
            )
            raise CheckpointError(str(path), wrong, f"copy the whole folder again, or {EARLIER}")
    return manifest


def parsed(path: Path, text: bytes) -> Manifest:
    """The manifest whose text this is, of the checkpoint in folder `path`; what it says is not
    compared with itself, nor with files.

    Raises:
        CheckpointError: another version, or a change in it.
    """
    try:
        return Manifest.of_text(text)
    except UnknownVersion as error:
        wrong = f"{MANIFEST} has format version {error}, and this megacore reads version {FORMAT_VERSION}"
        raise CheckpointError(str(path), wrong, "use the megacore that wrote it") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        reason = f"{'.'.join(map(str, first['loc']))[:200]}: {first['msg']}"
        raise CheckpointError(str(path), f"{MANIFEST} is damaged: {reason}", EARLIER) from None
    except (ValueError, RecursionError) as error:  # which the parser raises for deep nesting
        raise CheckpointError(
            str(path), f"{MANIFEST} is damaged: {' '.join(str(error).split())[:200]}", EARLIER
        ) from error
