"""Notes operations that are under way while a rank computes: they begin in one phase of a
step and end in another, or never.

If two runs of a layout differ, the rank has used the result of one of these too early: most likely one in
whose memory the differing tensor lies.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from megacore.distributed.events import Listener, Operation
from megacore.pipeline.schedule import TRANSFERS, Action
from megacore.tools.verify.compare import Difference

NEVER = "never"
UPDATE = "optimizer step"  # a phase, as `TrainStep` names it
# What a figure is made of; each other difference is of the memory of its own kind and name.
MADE_OF = {"loss": "parameter", "valid_loss": "parameter", "grad_norm": "gradient"}

Memory = tuple[int, int]  # its first byte, and the one behind its last


@dataclass
class Flight:
    """One operation, with the steps and phases in which it begins and is awaited."""

    what: str  # such as "all_reduce over dp"
    first_step: int
    begun: str
    last_step: int | None = None  # None: nobody has waited for it
    awaited: str = NEVER
    memory: list[Memory] = field(default_factory=list)  # of its tensors, in this process
    # of what is recorded, all that lies in its tensors: "gradient|embedding.weight"
    holds: list[str] = field(default_factory=list)

    def is_on(self, difference: Difference) -> bool:
        """Whether a differing tensor lies in its memory, or something that a differing figure is made of."""
        if difference.kind == "figure":
            return any(key.startswith(f"{MADE_OF.get(difference.name)}|") for key in self.holds)
        return f"{difference.kind}|{difference.name}" in self.holds


class Flights(Listener):
    """Notes what this process begins, and where it waits for it."""

    on_error = "raise"

    def __init__(self) -> None:
        self.step, self.phase = 0, "starting"
        self.flights: list[Flight] = []

    def on_step_begin(self, step: int, logged: bool) -> None:
        self.step = step

    def on_phase(self, phase: str) -> None:
        self.phase = phase

    def on_pause_begin(self, phase: str) -> None:
        self.phase = phase

    def on_action_begin(self, action: Action) -> None:
        if action.op not in TRANSFERS:
            self.phase = action.op.value.replace("_", " ")

    def on_collective(self, operation: Operation) -> Flight:
        name = "transfer" if operation.name in ("send", "receive") else operation.name
        memory = [memory_of(x) for x in operation.tensors]
        self.flights.append(
            Flight(f"{name} over {operation.group.name}", self.step, self.phase, memory=memory)
        )
        return self.flights[-1]

    def on_wait_begin(self, flight: Flight) -> None:
        if flight.last_step is None:
            flight.last_step, flight.awaited = self.step, self.phase

    def spanning(self, lasting: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """The operations that were under way from one phase to another, as JSON values.

        `lasting`: tensors that stay where they are in the whole run, by kind and name.
        """
        spanning = [f for f in self.flights if (f.first_step, f.begun) != (f.last_step, f.awaited)]
        places = {key: memory_of(x) for key, x in lasting.items()}
        for flight in spanning:
            flight.holds = [
                key for key, place in places.items() if any(overlap(place, own) for own in flight.memory)
            ]
        return [asdict(flight) for flight in spanning]


def memory_of(x: Tensor) -> Memory:
    """Where a contiguous tensor lies."""
    return x.data_ptr(), x.data_ptr() + x.nbytes


def overlap(a: Memory, b: Memory) -> bool:
    """Whether two have a byte in common."""
    return max(a[0], b[0]) < min(a[1], b[1])


def in_flight(flights: Iterable[dict[str, Any]], difference: Difference) -> list[str]:
    """Names the operations under way in a difference's step before its update, from `Flights.spanning`: those
    on what differs come first. If any were never awaited, only these.
    """
    step = difference.step
    before = [f for f in (Flight(**f) for f in flights) if (f.first_step, f.begun == UPDATE) <= (step, False)]
    under_way = [f for f in before if f.last_step is None or step <= f.last_step]
    never = [f for f in under_way if f.last_step is None]
    counts = Counter(
        (
            not f.is_on(difference),
            f"{f.what}{' on what differs' * f.is_on(difference)} (begun: {f.begun}, awaited: {f.awaited})",
        )
        for f in never or under_way
    )
    return [f"{count} × {words}" for (_, words), count in sorted(counts.items())]
