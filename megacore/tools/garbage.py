"""Python's garbage collector, taken out of the step.

It starts by itself when enough objects were made, on each rank at another moment: it then looks at all
objects, which takes some hundred milliseconds beside a large program, and every other rank waits for this
one.
"""

import gc

from megacore.distributed.events import Listener

EVERY = 100  # steps between collections


class Garbage(Listener):
    """Collects garbage after every `EVERY`-th step, on all ranks after the same one, until the run ends.

    Objects that exist from the start, or from the first step, are no longer looked at.
    """

    on_error = "keep"

    def __init__(self) -> None:
        self.steps = 0  # done so far
        self.was_on = gc.isenabled()

    def on_end(self) -> None:
        """Let Python collect by itself again."""
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
