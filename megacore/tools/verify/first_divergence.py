"""Finds where a layout first differs from one process: module, tensor, microbatch and direction."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from megacore.context_parallel.sharding import Documents, positions_of, runs_of
from megacore.tools.verify.compare import relative, rms

ORDER = {"forward": 0, "recompute": 1, "backward": 2}
# the most blocks along the features of which a rank may hold a part each: q, k, v; gate, up; …
MAX_INTERLEAVED = 8
Place = tuple[int, str, str, str, int]


@dataclass(frozen=True)
class Event:
    """One input, output or gradient of a module. The gradient of an output comes before that of an input."""

    order: int
    microbatch: int
    direction: str
    module: str
    what: str
    visit: int

    @property
    def place(self) -> "Place":
        """The parts that are the same in every layout."""
        return self.microbatch, self.direction, self.module, self.what, self.visit

    @property
    def is_activation(self) -> bool:
        """Whether it is an input or an output of a module, or its gradient; else a parameter's gradient."""
        return self.what.startswith(("input", "output"))

    def describe(self) -> str:
        """In words."""
        if self.module in ("logits", "loss"):  # places that are no modules
            where, what = "", f"the {self.module}"
        else:
            where, what = f"module {self.module}, ", f"its {self.what}"
        if self.direction == "backward":
            what = f"gradient of {what}"
        elif self.direction == "recompute":
            what += ", computed again for backward"
        direction = "backward" if self.direction == "backward" else "forward"
        return f"{where}{what}, microbatch {self.microbatch}, {direction}"


@dataclass(frozen=True)
class Parting:
    """The first event that differs, its ranks, the difference, and the last event before
    it that agreed on the same rank.
    """

    event: Event
    ranks: list[int]
    relative: float
    agreed: Event | None


def read(path: Path) -> dict[Event, np.ndarray]:
    """Reads a rank's trace, in its order."""
    events = {}
    for key, value in load_file(path).items():
        order, microbatch, direction, module, what, visit = key.split("|")
        events[Event(int(order), int(microbatch), direction, module, what, int(visit))] = value.astype(
            np.float64
        )
    return dict(sorted(events.items(), key=lambda item: item[0].order))


def first_parting(
    layout: Path,
    world: int,
    tensor: int,
    reference: Path,
    bound: float,
    *,
    same_layout: bool = False,
    context: int = 1,
    sequence: bool = False,
    seq_len: int = 0,
    micro_batch: int = 1,
) -> Parting | None:
    """Compares the traces in two folders.

    Returns None if every activation and gradient agrees within `bound`.

    `reference` holds the trace of one process, or with `same_layout` one for each rank. Of several
    differences it takes the first in the reference's order: forward before backward, by microbatch, then in
    the order of execution. `context` ranks divide the `micro_batch` sequences of `seq_len` tokens; with
    `sequence` tensor ranks divide the tokens too.
    """
    parted: dict[tuple[int, int, int], tuple[Event, list[int], float, Event | None]] = {}
    traces = [read(layout / f"trace_{rank}.safetensors") for rank in range(world)]
    by_place = [{event.place: value for event, value in trace.items()} for trace in traces]
    for rank, trace in enumerate(traces):
        expected = read(reference / f"trace_{rank if same_layout else 0}.safetensors")
        references = {event.place: (event, value) for event, value in expected.items()}
        agreed: dict[tuple[int, str], Event] = {}
        documents = {
            event.microbatch: bounds_of(value)
            for event, value in expected.items()
            if event.module == "documents"
        }
        sharers = [] if same_layout else ranks_that_divide_tokens(rank, tensor, context, sequence)
        for event, value in trace.items():
            place = event.place
            # one process keeps the value, which must come out the same
            if event.direction == "recompute" and place not in references:
                place = replace(event, direction="forward").place
            if place not in references:
                continue
            original, whole = references[place]
            original = replace(original, direction=event.direction)

            candidates = [(value, whole)]
            if context > 1 and not same_layout:
                runs = runs_of(seq_len, context, rank // tensor % context, documents.get(event.microbatch))
                candidates.append((value, of_tokens(whole, positions_of(runs), seq_len)))
            # Without a row for each token, ranks have all of it, or add what their tokens give.
            tokens = has_tokens(whole, micro_batch, seq_len)
            for ranks in sharers if event.is_activation else []:
                over_context = ranks[0] % tensor == ranks[-1] % tensor
                alike = all(shape_at(by_place[other], event.place) == value.shape for other in ranks)
                if alike and (over_context or not tokens):
                    candidates.append((np.sum([by_place[other][event.place] for other in ranks], 0), whole))
            distances = [apart(x, expected_x, rank % tensor, tensor) for x, expected_x in candidates]
            distance = min((d for d in distances if d is not None), default=None)
            if distance is None:
                continue
            if distance <= bound:
                agreed[event.microbatch, event.direction] = event
                continue
            key = (ORDER[event.direction], event.microbatch, original.order)
            _, ranks, most, before = parted.get(
                key, (original, [], 0.0, agreed.get((event.microbatch, event.direction)))
            )
            parted[key] = (original, [*ranks, rank], max(most, distance), before)
    if not parted:
        return None
    return Parting(*parted[min(parted)])


def shape_at(trace: dict[Place, np.ndarray], place: Place) -> tuple[int, ...] | None:
    """The shape of a rank's value at a place; None if it has none there."""
    return trace[place].shape if place in trace else None


def ranks_that_divide_tokens(rank: int, tensor: int, context: int, sequence: bool) -> list[list[int]]:
    """The groups of ranks, each with `rank`, over which a sum over tokens may be divided: context ranks, with
    `sequence` tensor ranks, and both.
    """
    first = rank // (tensor * context) * tensor * context  # tensor ranks are neighbours, then context ranks
    over_context = [first + c * tensor + rank % tensor for c in range(context)]
    over_tensor = [rank // tensor * tensor + t for t in range(tensor if sequence else 1)]
    both = [first + i for i in range(tensor * context)]
    groups = [over_context, over_tensor, *([both] if sequence else [])]
    return [group for i, group in enumerate(groups) if len(group) > 1 and group not in groups[:i]]


def has_tokens(whole: np.ndarray, micro_batch: int, seq_len: int) -> bool:
    """Whether an activation of one process has a row for each token, or a dim for those of a sequence."""
    if seq_len == 0:
        return True
    rows = whole.ndim > 0 and whole.shape[0] % (micro_batch * seq_len) == 0
    return rows or (whole.ndim > 1 and seq_len in whole.shape[:2])


def bounds_of(positions: np.ndarray) -> Documents:
    """The documents of each sequence, from the positions ``[batch, seq]`` of its tokens in them."""
    return tuple((*np.flatnonzero(row == 0).tolist(), len(row)) for row in positions)


def of_tokens(whole: np.ndarray, own: np.ndarray, seq_len: int) -> np.ndarray:
    """The part of a microbatch's activations, ``[batch · seq, …]`` or ``[batch, seq, …]``, that has the
    tokens `own` of each sequence.
    """
    if whole.ndim > 1 and whole.shape[1] == seq_len and whole.shape[0] % seq_len:
        return whole[:, own]
    if whole.ndim and whole.shape[0] % seq_len == 0:
        return whole.reshape(-1, seq_len, *whole.shape[1:])[:, own].reshape(-1, *whole.shape[1:])
    return whole


def apart(value: np.ndarray, whole: np.ndarray, tensor_rank: int, tensor_ranks: int) -> float | None:
    """The difference between a rank's tensor and the part of the whole that is most like it;
    None if no part has its shape.

    Every tensor rank may have a module's activations whole, or split along the tokens or the features. The
    shapes tell which; if the features are interleaved, the best fit counts.
    """
    scale = max(rms(whole), 1e-12)
    differences = [
        relative(value - part, scale) for part in parts(whole, value.shape, tensor_rank, tensor_ranks)
    ]
    return min(differences, default=None)


def parts(whole: np.ndarray, shape: tuple[int, ...], rank: int, ranks: int) -> Iterator[np.ndarray]:
    """Yields every part of `whole` with this shape that a tensor rank may hold."""
    if whole.ndim != len(shape):
        return
    if ranks > 1 and whole.ndim > 2 and shape[0] == 1:  # tokens of plain modules under sequence parallelism
        whole = whole.reshape(1, -1, *whole.shape[2:])
    if whole.shape == shape:
        yield whole
        return
    cut = [dim for dim in range(whole.ndim) if whole.shape[dim] != shape[dim]]
    if len(cut) != 1 or ranks == 1:
        return
    (dim,) = cut
    size, piece = whole.shape[dim], shape[dim]
    start = rank * -(-size // ranks)
    if start + piece <= size:
        yield np.take(whole, range(start, start + piece), dim)
    for blocks in range(2, MAX_INTERLEAVED + 1):
        if size % (blocks * ranks) == 0 and piece * ranks == size:
            split = whole.reshape(*whole.shape[:dim], blocks, size // blocks, *whole.shape[dim + 1 :])
            mine = range(rank * piece // blocks, (rank + 1) * piece // blocks)
            yield np.take(split, mine, dim + 1).reshape(shape)
