"""Notes operations that are under way while a rank computes: they begin in one phase of a step and end in another, or never.

If two runs of a layout differ, the rank has used the result of one of these too early.
"""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from megacore.survive.ledger import Ledger
from megacore.survive.noting import Begun

NEVER = "never"
UPDATE = "optimizer step"  # the phase that `survive.noting` marks


@dataclass
class Flight:
    """One operation, with the steps and phases in which it begins and is awaited."""

    what: str  # such as "all_reduce over dp"
    first_step: int
    begun: str
    last_step: int | None = None  # None: nobody has waited for it
    awaited: str = NEVER


class Flights:
    """A context that notes what this process begins, and where it waits for it."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.flights: dict[tuple[int, int], Flight] = {}

    def __enter__(self) -> "Flights":
        self.begin, self.wait = Begun.__init__, Begun.wait
        begin, wait = self.begin, self.wait

        def begun(work: Begun, *rest: Any) -> None:
            begin(work, *rest)
            notes = {number: f"{operation} over {name}" for number, name, operation, *_ in work.channel.recent}
            phase = self.ledger.phase[0].replace("_", " ")
            self.flights[id(work.channel), work.number] = Flight(notes.get(work.number, "an operation"), self.ledger.step, phase)

        def waited(work: Begun) -> None:
            flight = self.flights.get((id(work.channel), work.number))
            if flight is not None and flight.last_step is None:
                flight.last_step, flight.awaited = self.ledger.step, self.ledger.phase[0].replace("_", " ")
            wait(work)

        setattr(Begun, "__init__", begun)  # noqa: B010 (what is assigned to a class's method, mypy takes for a mistake)
        setattr(Begun, "wait", waited)  # noqa: B010
        return self

    def __exit__(self, *_: object) -> None:
        setattr(Begun, "__init__", self.begin)  # noqa: B010
        setattr(Begun, "wait", self.wait)  # noqa: B010

    def spanning(self) -> list[dict[str, Any]]:
        """The operations that were under way from one phase to another, as JSON values."""
        return [asdict(f) for f in self.flights.values() if (f.first_step, f.begun) != (f.last_step, f.awaited)]


def in_flight(flights: list[dict[str, Any]], step: int) -> list[str]:
    """Names the operations under way in a step before its update, from `Flights.spanning`; if any were never awaited, only these."""
    before = [f for f in (Flight(**f) for f in flights) if (f.first_step, f.begun == UPDATE) <= (step, False)]
    under_way = [f for f in before if f.last_step is None or step <= f.last_step]
    never = [f for f in under_way if f.last_step is None]
    counts = Counter(f"{f.what} (begun: {f.begun}, awaited: {f.awaited})" for f in never or under_way)
    return [f"{count} × {words}" for words, count in sorted(counts.items())]
