"""Mistakes that people make in parallel training, planted one at a time, and the check that catches each.

    python -m tests.faults                 plants every fault and prints what caught it
    python -m tests.faults --write         the same, and writes tests/faults/README.md
    python -m tests.faults --silent 10     the same checks on the code as it is: none may speak

A fault is a context manager that changes the code of a running process;
`launch/verify.py --plant tests.faults.tensor:NAME` enters one too. Here is the catalogue they enter
themselves in; `checks.py` runs them.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Plant = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Fault:
    """A mistake: what it is, in which layout it shows, and the words with which its check must report it."""

    mistake: str
    plant: Plant
    layout: str
    found: str  # what the check says first, without figures
    overrides: tuple[str, ...] = ()
    check: str = "verify"  # verify, resume, rollback, trained, samples, plan, sums or formula
    precision: str = "fp64"  # verify's

    @property
    def name(self) -> str:
        """The planting function's."""
        return self.plant.__name__

    @property
    def case(self) -> tuple[object, ...]:
        """All but the mistake: what is run, with it or without."""
        return self.check, self.layout, self.overrides, self.precision

    @property
    def path(self) -> str:
        """module:function, as `--plant` takes it."""
        return f"{self.plant.__module__}:{self.name}"


FAULTS: list[Fault] = []
# stands for a corpus with a mask of learned tokens: some ranks then learn nothing in a step
MASKED = "data.train=MASKED"


def fault(
    mistake: str, layout: str, found: str, *overrides: str, check: str = "verify", precision: str = "fp64"
) -> Callable[[Plant], Plant]:
    """Enters a planting function in the catalogue."""

    def enter(plant: Plant) -> Plant:
        FAULTS.append(Fault(mistake, plant, layout, found, overrides, check, precision))
        return plant

    return enter


@contextlib.contextmanager
def both(*plants: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Several changes that make one fault."""
    with contextlib.ExitStack() as stack:
        for plant in plants:
            stack.enter_context(plant)
        yield
