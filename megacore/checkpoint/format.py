"""What stands in a manifest's JSON, and within which bounds: of today's format
version, and of versions 2 to 4.
"""

import re
from math import prod
from typing import Annotated, Any, Literal

import torch
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from megacore.checkpoint.slices import LARGEST, MOST_DIMS, Row, Slices

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

# in the folder itself: no path leads out of it
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,100}\.safetensors$")]
Size = Annotated[int, Field(ge=0, le=LARGEST)]
Sizes = Annotated[tuple[Size, ...], Field(max_length=MOST_DIMS)]
ContentDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
FileDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}([0-9a-f]{32})?$")]


Counted = Annotated[float, Field(ge=0, le=LARGEST)]
MOST_SAMPLES = 2**61  # of a run, as its config allows
MOST_NORMS = 128  # of the last steps, as `engine.spike_detector` remembers them


class Entry(BaseModel):
    # From JSON a tuple is a list; numbers are not coerced, nor unknown keys dropped.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class File(Entry):
    """A file of the checkpoint, as it was written."""

    bytes: Size
    hash: Literal["xxh3_128", "sha256"] = "sha256"  # which of `digest.HASHES`; version 2 did not say
    digest: FileDigest = Field(validation_alias=AliasChoices("digest", "sha256"))


class Logical(Entry):
    """A logical tensor, whole: the slices tile `shape` exactly."""

    shape: Sizes
    dtype: str
    digest: ContentDigest  # of the whole, in whatever slices it lies (see `digest.content_digest`)
    slices: Size  # how many

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


class EngineState(Entry, extra="allow"):
    """What an engine's `load_state` gets; of what stands here, each engine has some."""

    updates: Counted  # steps that were taken
    skipped: Counted  # and those that were not
    loss_scale: Annotated[float, Field(ge=2.0**-100, le=2.0**100)] = 1
    good_steps: Counted = 0
    norms: Annotated[
        list[Annotated[float, Field(ge=0, le=1e300)]], Field(max_length=MOST_NORMS, default_factory=list)
    ]


class RunState(Entry, extra="allow"):
    """What a run takes from the state of a checkpoint that it resumes, which says so by its `engine`."""

    samples: Annotated[int, Field(ge=0, le=MOST_SAMPLES)]  # read, or passed over
    rollbacks: Size = 0
    engine: EngineState


class Head(Entry):
    """What every version says."""

    format_version: int
    megacore_version: str
    step: Size
    state: dict[str, Any]  # of the run, whose `model` entry is the config's model section; see `RunState`
    files: dict[FileName, File]


class Text(Head):
    """All of a manifest's text but its digest. The slices stand in the order of their tensors."""

    tensors: dict[str, Logical]
    slices: dict[str, str]  # see `Slices.texts`


class ObjectSlice(Entry):
    """A slice as versions 2 to 4 had it: an object each."""

    file: FileName
    key: str
    offset: Sizes
    shape: Sizes
    digest: ContentDigest


class ObjectTensor(Entry):
    shape: Sizes
    dtype: str
    digest: ContentDigest
    slices: list[ObjectSlice]


class EarlierText(Head):
    tensors: dict[str, ObjectTensor]

    def columns(self) -> tuple[dict[str, Logical], Slices]:
        """The same, as version 5 has it.

        Raises:
            ValueError: a slice that cannot be a column's.
        """
        places = {name: place for place, name in enumerate(self.files)}
        rows: list[Row] = []
        for name, tensor in self.tensors.items():
            for piece in tensor.slices:
                if piece.file not in places:
                    raise ValueError(f"tensor {name} is in {piece.file}, of no recorded size")
                if not len(piece.offset) == len(piece.shape) == len(tensor.shape):
                    raise ValueError(
                        f"tensor {name} has a slice {piece.shape} at {piece.offset}, outside its shape "
                        f"{tensor.shape}"
                    )
                rows.append(
                    (
                        places[piece.file],
                        _number(name, piece.key),
                        piece.offset,
                        piece.shape,
                        int(piece.digest, 16),
                    )
                )
        tensors = {
            name: Logical(
                shape=tensor.shape, dtype=tensor.dtype, digest=tensor.digest, slices=len(tensor.slices)
            )
            for name, tensor in self.tensors.items()
        }
        return tensors, Slices.of(rows).widened(
            max((len(tensor.shape) for tensor in tensors.values()), default=0)
        )


def _number(name: str, key: str) -> int:
    """Which piece of tensor `name` a key is of (see `shard.piece_key`)."""
    if key == name:
        return 1
    found = (
        re.fullmatch(r"#([2-9]|[1-9][0-9]{1,9})", key.removeprefix(name)) if key.startswith(name) else None
    )
    if found is None:
        raise ValueError(f"tensor {name} has a slice under the name {key[:200]}")
    return int(found[1])
