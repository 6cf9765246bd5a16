"""Why a run ends before its last step, or goes back: somebody asks it to stop, or too
many steps in a row are skipped.
"""

from megacore.train.metrics import StepMetrics


class StopAgreed(Exception):
    """All ranks have agreed to stop here, at the boundary of a step."""


class TooManySkips(RuntimeError):
    """Too many steps in a row were skipped."""


class Skips:
    """Counts skipped steps in a row, the same on every rank."""

    def __init__(self, limit: int, max_rollbacks: int) -> None:
        """`limit`: how many steps in a row are too many.

        `max_rollbacks`: how often the run may go back, however often it is started.
        """
        self.limit, self.max_rollbacks = limit, max_rollbacks
        self.in_a_row = 0
        self.skipped = 0.0  # steps skipped so far
        self.rollbacks = 0  # how often the run has gone back

    def restore(self, skipped: float, rollbacks: int) -> None:
        """Goes on from a checkpoint. One that a run goes back to does not know of that."""
        self.skipped, self.rollbacks = skipped, max(self.rollbacks, rollbacks)

    def saw(self, figures: StepMetrics) -> bool:
        """Whether this step was skipped."""
        new = figures.skipped > self.skipped
        self.skipped = figures.skipped
        self.in_a_row = self.in_a_row + 1 if new else 0
        return new

    def too_many(self) -> bool:
        """Whether the run must go back now. Raises `TooManySkips` if it may not."""
        if self.in_a_row < self.limit:
            return False
        if self.rollbacks >= self.max_rollbacks:
            wrong = (
                f"{self.in_a_row} steps in a row were skipped: their loss or gradient was not finite, "
                "or a spike"
            )
            raise TooManySkips(
                f"{wrong} (optim.max_skips, optim.max_rollbacks; their samples are in skipped.jsonl)"
            )
        self.rollbacks += 1
        self.in_a_row = 0
        return True
