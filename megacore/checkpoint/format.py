"""The entries of a manifest's JSON, and the bounds of their values."""

from math import prod
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from megacore.checkpoint.slices import LARGEST, MOST_DIMS

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
FileDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


Counted = Annotated[float, Field(ge=0, le=LARGEST)]
MOST_SAMPLES = 2**61  # of a run, as its config allows
MOST_NORMS = 128  # of the last steps, as `engine.spike_detector` remembers them


class Entry(BaseModel):
    # From JSON a tuple is a list; numbers are not coerced, nor unknown keys dropped.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class File(Entry):
    """A file of the checkpoint, as it was written."""

    bytes: Size
    hash: Literal["xxh3_128"]
    digest: FileDigest


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
    rollbacks: Size
    engine: EngineState


class Text(Entry):
    """All of a manifest's text but its digest. The slices are in the order of their tensors."""

    format_version: int
    megacore_version: str
    step: Size
    state: dict[str, Any]  # of the run, whose `model` entry is the config's model section; see `RunState`
    files: dict[FileName, File]
    tensors: dict[str, Logical]
    slices: dict[str, str]  # see `Slices.texts`
