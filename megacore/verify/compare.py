"""How far two records are apart. numpy only: the process that compares needs no torch."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open

# Below this part of the largest tensor of its kind, a tensor counts as zero but for rounding: a key's bias, which softmax
# does not see, has a gradient of exactly that.
NOTHING = 1e-6


ORDER = ("loss", "gradient", "grad_norm", "adam_m", "adam_v", "parameter", "valid_loss")


@dataclass(frozen=True)
class Difference:
    """Of one tensor or figure on one rank."""

    kind: str  # gradient, parameter, adam_m, adam_v; figure for losses and norms
    step: int  # after whose update a parameter or moment was read; 0: where it starts from
    name: str
    rank: int
    relative: float  # root mean square of the difference over that of the reference

    @property
    def moment(self) -> tuple[int, int]:
        """When in a run this comes about, to be sorted by."""
        what = self.name if self.kind == "figure" else self.kind
        return self.step, ORDER.index(what) if what in ORDER else len(ORDER)  # another optimizer may have other moments

    def describe(self) -> str:
        """In words."""
        what = f"{self.kind} of {self.name}" if self.kind != "figure" else self.name
        return f"{what}, step {self.step}" if self.step else f"first value of {self.name}"


class Records:
    """The records of all ranks of a run, from a folder."""

    def __init__(self, folder: Path, world: int) -> None:
        self.ranks: list[dict[str, np.ndarray]] = []
        self.places: list[dict[str, tuple[list[int], list[int]]]] = []
        self.figures: list[dict[str, dict[str, float]]] = []
        for rank in range(world):
            with safe_open(folder / f"record_{rank}.safetensors", framework="numpy") as file:
                metadata = file.metadata()
                self.ranks.append({key: file.get_tensor(key).astype(np.float64) for key in file.keys()})  # noqa: SIM118 (no mapping)
            self.places.append(json.loads(metadata["places"]))
            self.figures.append(json.loads(metadata["figures"]))


def rms(x: np.ndarray) -> float:
    """Root mean square; infinite where anything is not finite."""
    value = math.sqrt(float(np.mean(np.square(x)))) if x.size else 0.0
    return value if math.isfinite(value) else math.inf


def relative(apart: np.ndarray, scale: float) -> float:
    """A difference as a part of `scale`; infinite where either is not finite, and as it is where the scale is zero."""
    value = rms(apart) / (scale or 1.0)
    return value if math.isfinite(value) else math.inf


def scales_of(tensors: dict[str, np.ndarray]) -> dict[str, float]:
    """What the difference of each of a rank's tensors is to be held against: its size, or a little of the largest of its kind."""
    sizes = {key: rms(tensor) for key, tensor in tensors.items()}
    largest: dict[str, float] = {}
    for key, size in sizes.items():
        kind = key.partition("|")[0]
        largest[kind] = max(largest.get(kind, 0.0), size)
    return {key: max(size, NOTHING * largest[key.partition("|")[0]]) for key, size in sizes.items()}


def against_reference(layout: Records, reference: Records) -> list[Difference]:
    """Every tensor and figure of every rank, replicas too, against the one process that `reference` holds."""
    whole = reference.ranks[0]
    scales = scales_of(whole)
    found = []
    for rank, (tensors, places) in enumerate(zip(layout.ranks, layout.places, strict=True)):
        for key, tensor in tensors.items():
            offset, shape = places[key]
            expected = whole.get(logical(key))
            if expected is None or tuple(shape) != expected.shape:
                found.append(difference(key, rank, math.inf))
                continue
            cut = expected[tuple(slice(start, start + size) for start, size in zip(offset, tensor.shape, strict=True))]
            apart = relative(tensor - cut, scales[logical(key)]) if cut.shape == tensor.shape else math.inf
            found.append(difference(key, rank, apart))
    return found + figures(layout, reference.figures[0])


def rank_by_rank(ours: Records, theirs: Records) -> list[Difference]:
    """Two records of the same layout: the same pieces on the same ranks."""
    found = []
    for rank, (mine, other) in enumerate(zip(ours.ranks, theirs.ranks, strict=True)):
        scales = scales_of(other)
        for key in sorted(mine.keys() | other.keys()):
            if key not in mine or key not in other or mine[key].shape != other[key].shape:
                found.append(difference(key, rank, math.inf))
            else:
                found.append(difference(key, rank, relative(mine[key] - other[key], scales[key])))
    return found + figures(ours, theirs.figures[0])


def logical(key: str) -> str:
    """What the reference calls the tensor of which a rank has a piece (`shard.piece_key` numbers several)."""
    return key.partition("#")[0]


def difference(key: str, rank: int, relative: float) -> Difference:
    """Of the tensor that a record holds under `key`."""
    when, _, name = logical(key).partition("|")
    kind, _, step = when.partition(" ")
    return Difference(kind, int(step), name, rank, relative)


def figures(layout: Records, reference: dict[str, dict[str, float]]) -> list[Difference]:
    """Losses, gradient norms and the validation loss on every rank."""
    found = []
    for rank, by_step in enumerate(layout.figures):
        for step, expected in reference.items():
            for name, value in expected.items():
                measured = by_step.get(step, {}).get(name, math.nan)
                found.append(Difference("figure", int(step), name, rank, relative(np.array([measured - value]), abs(value))))
    return found


def missing(layout: Records, reference: Records) -> list[str]:
    """What the reference has and no rank of the layout, or a layout's part of it leaves out."""
    lacking = []
    for key, whole in reference.ranks[0].items():
        covered = np.zeros(whole.shape, dtype=bool)
        for tensors, places in zip(layout.ranks, layout.places, strict=True):
            for piece, tensor in tensors.items():
                if logical(piece) == key:
                    start = places[piece][0]
                    covered[tuple(slice(s, s + size) for s, size in zip(start, tensor.shape, strict=True))] = True
        if not covered.all():
            lacking.append(difference(key, 0, math.inf).describe())
    return lacking
