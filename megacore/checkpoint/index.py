"""What each rank says it wrote, in a file of its own, and all of that together."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from megacore.checkpoint.digest import digest_text
from megacore.checkpoint.entries import File, Logical
from megacore.checkpoint.slices import Slices
from megacore.errors import CheckpointError


@dataclass(frozen=True)
class Index:
    """What one rank wrote: its file if it has one, and its slices, in the order of their tensors."""

    files: dict[str, File]
    tensors: dict[str, tuple[str, tuple[int, ...], int]]  # dtype, global shape, how many slices
    slices: Slices

    def encoded(self) -> bytes:
        """As `decoded` reads it."""
        content: dict[str, Any] = {"files": {name: file.model_dump() for name, file in self.files.items()}}
        return json.dumps(content | {"tensors": self.tensors, "slices": self.slices.texts()}).encode()

    @classmethod
    def decoded(cls, text: bytes) -> Self:
        """Raises `ValueError` where it is not what `encoded` made."""
        content = json.loads(text)
        files = {name: File.model_validate(file) for name, file in content["files"].items()}
        tensors = {name: (dtype, tuple(shape), count) for name, (dtype, shape, count) in content["tensors"].items()}
        rows, dims = sum(count for _, _, count in tensors.values()), max((len(shape) for _, shape, _ in tensors.values()), default=0)
        return cls(files, tensors, Slices.of_texts(content["slices"], rows, dims))


def index_file(folder: Path, rank: int) -> Path:
    """Where a rank says what it wrote."""
    return folder / f"rank_{rank:05d}.json"


def merged(folder: Path, world: int) -> tuple[dict[str, File], dict[str, Logical], Slices]:
    """What all ranks wrote: files, tensors, and their slices in the order of the tensors.

    Raises:
        CheckpointError: ranks do not agree in what a tensor is.
    """
    files: dict[str, File] = {}
    known: dict[str, tuple[int, str, tuple[int, ...]]] = {}  # which of the tensors, its dtype and shape
    parts, tensor_of = [], []
    for rank in range(world):
        index = Index.decoded(index_file(folder, rank).read_bytes())
        parts.append(index.slices.behind(len(files)))
        files |= index.files
        for name, (dtype, shape, count) in index.tensors.items():
            place, *others = known.setdefault(name, (len(known), dtype, shape))
            if others != [dtype, shape]:
                wrong = f"tensor {name} is {dtype} {shape} on rank {rank}"
                raise CheckpointError(str(folder), wrong, "{} {} on the ranks before".format(*others))
            tensor_of.append((place, count))
    owners = np.repeat(*np.array(tensor_of, np.int64).reshape(-1, 2).T)  # the tensor of each slice
    slices = Slices.joined(parts)[np.argsort(owners, kind="stable")]
    counts = np.bincount(owners, minlength=len(known)).tolist()
    ends = np.cumsum(counts, dtype=np.int64)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(slices.digest, dtype=np.uint64)])  # modulo 2⁶⁴, as digests add up
    digests = (sums[ends] - sums[ends - counts]).tolist()
    tensors = {
        name: Logical(shape=shape, dtype=dtype, digest=digest_text(digest), slices=count)
        for (name, (_, dtype, shape)), digest, count in zip(known.items(), digests, counts, strict=True)
    }
    return files, tensors, slices
