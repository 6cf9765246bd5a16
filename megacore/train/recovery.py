"""Why a run ends early or goes back: a rank is asked to stop, or too many steps are skipped."""

from megacore.train.step import StepResult


class StopAgreed(Exception):
    """All ranks have agreed to stop after the current step."""


class TooManySkips(RuntimeError):
    """Too many steps in a row were skipped."""


class Skips:
    """Counts skipped steps, with the same result on every rank."""

    def __init__(self, limit: int, max_rollbacks: int) -> None:
        """`limit`: steps in a row that may be skipped before the run goes back (`optim.max_skips`).

        `max_rollbacks`: how often a run may go back, restarts included.
        """
        self.limit = limit
        self.max_rollbacks = max_rollbacks
        self.in_a_row = 0
        self.skipped_so_far = 0.0  # updates since the run began
        self.rollbacks = 0

    def restore(self, skipped: float, rollbacks: int) -> None:
        """Continue with the counts of a checkpoint.

        A checkpoint that the run goes back to does not know of that rollback, so the larger number counts.
        """
        self.skipped_so_far = skipped
        self.rollbacks = max(self.rollbacks, rollbacks)

    def count(self, result: StepResult[float]) -> bool:
        """Count a step, and return whether it was skipped."""
        is_skipped = result.skipped_so_far > self.skipped_so_far
        self.skipped_so_far = result.skipped_so_far
        self.in_a_row = self.in_a_row + 1 if is_skipped else 0
        return is_skipped

    @property
    def are_too_many(self) -> bool:
        """Whether the run must go back to a checkpoint."""
        return self.in_a_row >= self.limit

    def count_rollback(self) -> None:
        """Count that the run goes back.

        Raises:
            TooManySkips: if it has gone back too often.
        """
        if self.rollbacks >= self.max_rollbacks:
            raise TooManySkips(
                f"{self.in_a_row} steps in a row were skipped: their loss or gradient was not finite, or a "
                "spike (optim.max_skips, optim.max_rollbacks; their samples are in skipped.jsonl)"
            )
        self.rollbacks += 1
        self.in_a_row = 0
