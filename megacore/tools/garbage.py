"""Python's garbage collector, taken out of the step.

It starts by itself when enough objects were made, on each rank at another moment: it then looks at all
objects, which takes some hundred milliseconds beside a large program, and every other rank waits for this
one.
"""

import gc
from types import TracebackType

from megacore.distributed.events import Listener

EVERY = 100  # steps between collections


class Garbage(Listener):
    """From the first step until this context ends, garbage is collected only behind some steps, on all ranks
    behind the same. Objects that are there from the start, or from the first step, are no longer looked at.
    """

    def __init__(self) -> None:
        self.steps = 0  # done so far
        self.was_on = gc.isenabled()

    def __enter__(self) -> "Garbage":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.unfreeze()
        if self.was_on:
            gc.enable()

    def on_step_begin(self, step: int, logged: bool) -> None:
        """Between two steps, and before the first."""
        if self.steps <= 1:  # the first has compiled, and made what stays
            gc.disable()
            gc.collect()
            gc.freeze()
        elif self.steps % EVERY == 0:
            gc.collect()
        self.steps += 1
