"""Compares two records. numpy only: the process that compares needs no torch."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

# A tensor below this part of the largest tensor of its kind counts as zero but for rounding. The gradient of
# a key's bias, which softmax does not see, is such a tensor.
NOTHING = 1e-6


# In the order of a step; "own …" are differences from what a run should have made of its own numbers, see
# `replay`. "state" is every other state of an optimizer. An average of weights comes after the weights: that
# of `optim.ema` follows from them.
ORDER = (
    "drawn",
    "own copy",
    "routing",
    "loss",
    "own gradient",
    "gradient",
    "own norm",
    "grad_norm",
    "own adam_m",
    "adam_m",
    "own adam_v",
    "adam_v",
    "own state",
    "state",
    "own parameter",
    "direction",
    "parameter",
    "average",
    "buffer",
    "gathered",
    "valid_loss",
)
ROUTING = "routing"  # what routers chose, see `routing`
# kinds of first weights: before an engine holds them, and what computes in step 1
FIRST = ("drawn", "gathered")
ONLY_HERE, ONLY_THERE = "exists only in the layout", "does not exist in the layout"
OTHER_SHAPE = "has another shape in the layout"
EVIDENCE = ("given", "copy", *FIRST)  # kinds that no reference has, and maybe no other version of the code
Tensors = dict[str, np.ndarray]
Places = dict[str, tuple[list[int], list[int]]]  # offset and logical shape


@dataclass(frozen=True)
class Difference:
    """A difference of one tensor or figure on one rank."""

    kind: str  # gradient, parameter, adam_m, adam_v, own …, direction; figure for losses and norms
    step: int  # a parameter or moment was read after its update; 0: at the start
    name: str
    rank: int
    relative: float  # root mean square of the difference, over that of the reference
    # Why there is nothing to subtract, as the verb of a sentence; "" if both sides have the tensor. Then
    # `relative` is infinite only if a number is not finite.
    mismatch: str = ""

    @property
    def moment(self) -> tuple[int, int]:
        """When it happens in a run, as a sort key."""
        what = self.name if self.kind == "figure" else self.kind
        if what not in ORDER:
            what = "own state" if what.startswith("own ") else "state"
        return self.step, ORDER.index(what)

    def describe(self) -> str:
        """In words."""
        what = f"{self.kind} of {self.name}" if self.kind != "figure" else self.name
        return f"{what}, step {self.step}" if self.step else f"first value of {self.name}"

    @property
    def size(self) -> str:
        """How large the difference is, as the verb of a sentence."""
        if self.mismatch:
            return self.mismatch
        return f"is {self.relative:.1e} off" if math.isfinite(self.relative) else "is not finite"


class Records:
    """The records of all ranks of a run, from a folder."""

    def __init__(self, folder: Path, world: int) -> None:
        self.ranks: list[Tensors] = []
        self.evidence: list[Tensors] = []
        self.places: list[Places] = []
        self.figures: list[dict[str, dict[str, float]]] = []
        self.flights: list[list[dict[str, Any]]] = []  # see `flight`
        for rank in range(world):
            with safe_open(folder / f"record_{rank}.safetensors", framework="numpy") as file:
                metadata = file.metadata()
                tensors = {key: file.get_tensor(key).astype(np.float64) for key in file.keys()}  # noqa: SIM118 (no mapping)
            self.evidence.append(
                {key: tensor for key, tensor in tensors.items() if parsed(key)[0] in EVIDENCE}
            )
            self.ranks.append(
                {key: tensor for key, tensor in tensors.items() if key not in self.evidence[-1]}
            )
            self.places.append(json.loads(metadata["places"]))
            self.figures.append(json.loads(metadata["figures"]))
            # an older version does not have them
            self.flights.append(json.loads(metadata.get("flights", "[]")))

    @cached_property
    def whole(self) -> Tensors:
        """The logical tensors, put together from all ranks' pieces."""
        found: Tensors = {}
        for tensors, evidence, places in zip(self.ranks, self.evidence, self.places, strict=True):
            for key, tensor in (*tensors.items(), *evidence.items()):
                offset, shape = places[key]
                cut(found.setdefault(logical(key), np.full(shape, np.nan)), offset, tensor)[...] = tensor
        return found


def rms(x: np.ndarray) -> float:
    """The root mean square; infinite if anything is not finite."""
    value = math.sqrt(float(np.mean(np.square(x)))) if x.size else 0.0
    return value if math.isfinite(value) else math.inf


def relative(apart: np.ndarray, scale: float) -> float:
    """A difference as a part of `scale`.

    It is infinite if either is not finite, and unscaled if the scale is zero.
    """
    value = rms(apart) / (scale or 1.0)
    return value if math.isfinite(value) else math.inf


def scales_of(tensors: dict[str, np.ndarray]) -> dict[str, float]:
    """The scale for the differences of each of a rank's tensors: its size, or a small
    part of the largest of its kind.
    """
    sizes = {key: rms(tensor) for key, tensor in tensors.items()}
    largest: dict[str, float] = {}
    for key, size in sizes.items():
        kind = key.partition("|")[0]
        largest[kind] = max(largest.get(kind, 0.0), size)
    return {key: max(size, NOTHING * largest[key.partition("|")[0]]) for key, size in sizes.items()}


def against_reference(layout: Records, reference: Records) -> list[Difference]:
    """Compares every tensor and figure of every rank, replicas too, with the one process in `reference`."""
    whole = reference.ranks[0]
    first = {
        f"{kind} 0|{parsed(key)[2]}": x
        for kind in FIRST
        for key, x in whole.items()
        if parsed(key)[:2] == ("parameter", 0)
    }
    held = [{key: x for key, x in tensors.items() if parsed(key)[0] in FIRST} for tensors in layout.evidence]
    found = pieces_against(layout.ranks, layout.places, whole, scales_of(whole))
    return found + pieces_against(held, layout.places, first, scales_of(first)) + figures(layout, reference)


def pieces_against(
    ranks: Sequence[Tensors], places: Sequence[Places], whole: Tensors, scales: dict[str, float]
) -> list[Difference]:
    """Compares every rank's pieces with the logical tensors `whole`.

    Each difference is a part of its tensor's scale.
    """
    found = []
    for rank, tensors in enumerate(ranks):
        for key, tensor in tensors.items():
            offset, shape = places[rank][key]
            expected = whole.get(logical(key))
            if expected is None:
                found.append(difference(key, rank, math.inf, ONLY_HERE))
            elif tuple(shape) != expected.shape or cut(expected, offset, tensor).shape != tensor.shape:
                found.append(difference(key, rank, math.inf, OTHER_SHAPE))
            else:
                part = cut(expected, offset, tensor)
                found.append(difference(key, rank, relative(tensor - part, scales[logical(key)])))
    return found


def cut(whole: np.ndarray, offset: list[int], piece: np.ndarray) -> np.ndarray:
    """The part of a logical tensor at a piece's position (a view)."""
    where: tuple[Any, ...] = tuple(
        slice(start, start + size) for start, size in zip(offset, piece.shape, strict=True)
    )
    return whole[(..., *where)]  # a view of a scalar too


def rank_by_rank(ours: Records, theirs: Records, *, repeated: bool = False) -> list[Difference]:
    """Compares two records of the same layout, which have the same pieces on the same ranks.

    `repeated`: the code is the same too, so equal values that are not finite are no difference.
    """
    found = []
    for rank, (mine, other) in enumerate(zip(ours.ranks, theirs.ranks, strict=True)):
        scales = scales_of(other)
        for key in sorted(mine.keys() | other.keys()):
            if key not in mine or key not in other:
                found.append(difference(key, rank, math.inf, ONLY_HERE if key in mine else ONLY_THERE))
            elif mine[key].shape != other[key].shape:
                found.append(difference(key, rank, math.inf, OTHER_SHAPE))
            else:
                found.append(
                    difference(key, rank, relative(minus(mine[key], other[key], repeated), scales[key]))
                )
    return found + figures(ours, theirs, repeated)


def logical(key: str) -> str:
    """The reference's name for the tensor of a rank's piece (`shard.piece_key` numbers several pieces)."""
    return key.partition("#")[0]


def parsed(key: str) -> tuple[str, int, str]:
    """The kind, step and logical name in a record's `key`."""
    when, _, name = logical(key).partition("|")
    kind, _, step = when.partition(" ")
    return kind, int(step), name


def difference(key: str, rank: int, relative: float, mismatch: str = "") -> Difference:
    """The difference of the tensor that a record holds under `key`."""
    kind, step, name = parsed(key)
    return Difference(kind, step, name, rank, relative, mismatch)


def minus(a: np.ndarray, b: np.ndarray, repeated: bool) -> np.ndarray:
    """a − b. With `repeated` it is 0 where both are the same infinity, or NaN."""
    with np.errstate(invalid="ignore"):
        return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, a - b) if repeated else a - b


def figures(layout: Records, reference: Records, repeated: bool = False) -> list[Difference]:
    """Compares losses, gradient norms and the validation loss on every rank with those of the
    same rank or of the one process.
    """
    found = []
    for rank, by_step in enumerate(layout.figures):
        for step, expected in reference.figures[rank if len(reference.figures) > 1 else 0].items():
            for name, value in expected.items():
                measured = by_step.get(step, {}).get(name)
                if measured is None:
                    found.append(Difference("figure", int(step), name, rank, math.inf, ONLY_THERE))
                    continue
                scale = abs(value) if math.isfinite(value) else math.inf
                apart = relative(minus(np.array([measured]), np.array([value]), repeated), scale)
                found.append(Difference("figure", int(step), name, rank, apart))
    return found


def missing(layout: Records, reference: Records) -> list[str]:
    """Tensors of the reference that the layout does not have, or has only in part."""
    covered = {key: np.zeros(whole.shape, dtype=bool) for key, whole in reference.ranks[0].items()}
    for tensors, places in zip(layout.ranks, layout.places, strict=True):
        for piece, tensor in tensors.items():
            if logical(piece) in covered:
                cut(covered[logical(piece)], places[piece][0], tensor)[...] = True
    return [difference(key, 0, math.inf).describe() for key, found in covered.items() if not found.all()]
