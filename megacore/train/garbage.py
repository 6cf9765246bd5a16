"""Python's garbage collector, taken out of the step.

It starts by itself when enough objects were made, on each rank at another moment: it then looks at all objects, which takes some
hundred milliseconds beside a large program, and every other rank waits for this one.
"""

import gc
from types import TracebackType

EVERY = 100  # steps between collections


class Garbage:
    """While entered, garbage is collected only where `step` does, on all ranks behind the same steps. Objects that are there from the
    start, or from the first step, are no longer looked at."""

    def __enter__(self) -> "Garbage":
        self.steps, self.was_on = 0, gc.isenabled()
        gc.disable()
        self._settle()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        gc.unfreeze()
        if self.was_on:
            gc.enable()

    def step(self) -> None:
        """Between two steps."""
        self.steps += 1
        if self.steps == 1:  # which has compiled, and made what stays
            self._settle()
        elif self.steps % EVERY == 0:
            gc.collect()

    def _settle(self) -> None:
        gc.collect()
        gc.freeze()
