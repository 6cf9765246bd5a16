"""Finds ranks that hold up the others, because their own part of a step takes longer."""

from statistics import median

FACTOR = 2.0  # times the median
PART = 0.3  # a rank must exceed the median by this part of the step: less is not worth a warning
REPORTS = 3  # reports in a row in which a rank must stand out: one may be chance


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
    """Ranks whose own seconds in a step stand out, with these seconds. Waiting for others is not counted.

    In a synchronous step all ranks take equally long: a slow rank waits less than the others do.
    """
    usual = median(own)
    return {rank: mine for rank, mine in enumerate(own) if mine > FACTOR * usual and mine - usual > PART * step_seconds}
