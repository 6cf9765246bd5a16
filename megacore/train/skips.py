"""Counts skipped steps, and decides whether the run goes on, goes back, or gives up."""

from megacore.train.mailbox import Figures


class TooManySkips(RuntimeError):
    """Too many steps in a row were skipped."""


class Skips:
    """Counts skipped steps in a row, the same on every rank."""

    def __init__(self, limit: int, rollbacks: int, skipped: float) -> None:
        """`limit`: how many steps in a row are too many. `rollbacks`: how often the run may go back. `skipped`: steps skipped so far."""
        self.limit, self.rollbacks, self.skipped = limit, rollbacks, skipped
        self.in_a_row = 0

    def saw(self, figures: Figures) -> bool:
        """Whether this step was skipped."""
        new = figures.skipped > self.skipped
        self.skipped = figures.skipped
        self.in_a_row = self.in_a_row + 1 if new else 0
        return new

    def too_many(self) -> bool:
        """Whether the run must go back now. Raises `TooManySkips` if it may not."""
        if self.in_a_row < self.limit:
            return False
        if not self.rollbacks:
            wrong = f"{self.in_a_row} steps in a row were skipped: their loss or gradient was not finite, or a spike"
            raise TooManySkips(f"{wrong} (optim.max_skips, optim.max_rollbacks; their samples are in skipped.jsonl)")
        self.rollbacks -= 1
        self.in_a_row = 0
        return True
