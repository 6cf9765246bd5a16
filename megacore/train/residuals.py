"""Restores what gradient compression has lost so far (`engine.compression`), also in another layout."""

from collections.abc import Mapping

from torch import Tensor

from megacore.checkpoint import Reader
from megacore.distributed.shard import TensorSlice, logical_name
from megacore.engine.compression import BASIS, RESIDUAL


def read_residuals(reader: Reader, held: Mapping[str, tuple[Tensor, TensorSlice]]) -> list[str]:
    """Restores compression's state among an engine's tensors, and says in up to two lines what became of it.

    Where a parameter has as many as in the checkpoint, each comes back. Else number i of the checkpoint is
    added to number i mod n of
    the n that the run has: what gradients still lack is the sum of all, and that stays.
    """
    saved = {
        name: reader.manifest.tensors[name].shape[0] for name in reader.names if name.startswith(RESIDUAL)
    }
    moved = set[tuple[int, int]]()
    for key, (tensor, box) in held.items():
        if not key.startswith(RESIDUAL):
            continue
        name, (count, *shape), (number, *offset) = logical_name(key), box.global_shape, box.offset
        tensor.zero_()
        for other in range(number, saved.get(name, 0), count):
            piece = TensorSlice((saved[name], *shape), (other, *offset), box.local_shape)
            if other == number:
                reader.read_into(name, piece, tensor)
            else:
                tensor.add_(reader.read(name, piece).to(tensor))
        if saved.get(name, count) != count:
            moved.add((saved[name], count))
    if saved and not any(key.startswith(RESIDUAL) for key in held):
        return [
            "WARNING: the checkpoint's residuals are left out, because this run does not compress "
            "gradients: what they hold is lost"
        ]
    texts = ", ".join(f"{was} of each parameter became {now}" for was, now in sorted(moved))
    lines = [f"residuals of gradient compression: {texts}, with the same sum"] if moved else []
    bases = [(key, tensor, box) for key, (tensor, box) in held.items() if key.startswith(BASIS)]
    known = {name: tensor.shape for name, tensor in reader.manifest.tensors.items()}
    for key, tensor, box in bases:
        if known.get(key) == box.global_shape:
            reader.read_into(key, box, tensor)
    missing = sum(known.get(key) != box.global_shape for key, _, box in bases)
    if missing and any(name.startswith(BASIS) for name in known):
        lines.append(
            f"low rank: {missing} of {len(bases)} bases are drawn anew, because the checkpoint's are of "
            "another layout or rank"
        )
    return lines
