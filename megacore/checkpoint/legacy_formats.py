"""Manifests of format versions 2 to 4, which had an object for each slice."""

import re

from megacore.checkpoint.entries import ContentDigest, Entry, FileName, Head, Logical, Sizes
from megacore.checkpoint.slices import Row, Slices


class ObjectSlice(Entry):
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
                    raise ValueError(f"tensor {name} has a slice {piece.shape} at {piece.offset}, outside its shape {tensor.shape}")
                rows.append((places[piece.file], _number(name, piece.key), piece.offset, piece.shape, int(piece.digest, 16)))
        tensors = {
            name: Logical(shape=tensor.shape, dtype=tensor.dtype, digest=tensor.digest, slices=len(tensor.slices))
            for name, tensor in self.tensors.items()
        }
        return tensors, Slices.of(rows).widened(max((len(tensor.shape) for tensor in tensors.values()), default=0))


def _number(name: str, key: str) -> int:
    """Which piece of tensor `name` a key is of (see `shard.piece_key`)."""
    if key == name:
        return 1
    found = re.fullmatch(r"#([2-9]|[1-9][0-9]{1,9})", key.removeprefix(name)) if key.startswith(name) else None
    if found is None:
        raise ValueError(f"tensor {name} has a slice under the name {key[:200]}")
    return int(found[1])
