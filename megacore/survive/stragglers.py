"""Ranks that hold up the others: who needs longer for its own part of a step."""

from statistics import median

FACTOR = 2.0  # times the median
PART = 0.3  # of the step, by which a rank must be above the median: less is not worth a word
REPORTS = 3  # in a row in which a rank must stand out: one may be chance


class Stragglers:
    """Ranks that stand out again and again."""

    def __init__(self) -> None:
        self.in_a_row: dict[int, int] = {}

    def named(self, own: list[float], step_seconds: float) -> dict[int, float]:
        """Takes a report's figures (see `outliers`) and returns those of ranks that stood out in the last `REPORTS`."""
        found = outliers(own, step_seconds)
        self.in_a_row = {rank: self.in_a_row.get(rank, 0) + 1 for rank in found}
        return {rank: seconds for rank, seconds in found.items() if self.in_a_row[rank] >= REPORTS}


def outliers(own: list[float], step_seconds: float) -> dict[int, float]:
    """Ranks whose own seconds in a step (waiting for others left out) stand out, with these seconds.

    In a synchronous step all ranks take equally long: who is slow shows by waiting less than the others do.
    """
    usual = median(own)
    return {rank: mine for rank, mine in enumerate(own) if mine > FACTOR * usual and mine - usual > PART * step_seconds}
